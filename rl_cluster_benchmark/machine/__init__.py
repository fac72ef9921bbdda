"""The machine: what it has (detection.py), and how a run uses it (planning.py, process.py)."""
