"""What happened in the environments, and what it was worth."""
