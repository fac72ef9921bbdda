"""What a process of a run that is profiled measures about itself."""
