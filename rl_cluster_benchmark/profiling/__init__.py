"""Measurements that each process of a profiled run makes of itself."""
