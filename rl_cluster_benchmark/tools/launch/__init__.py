"""Starting a run on several machines: locally, with ssh, SLURM, PBS or Ray."""
