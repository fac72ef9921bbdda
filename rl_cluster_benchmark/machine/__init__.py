"""What this machine has, and how a run uses it."""
