"""The files of a run: directory, checkpoints, metrics, summary."""
