"""A3C: workers that update shared parameters without waiting for each other."""
