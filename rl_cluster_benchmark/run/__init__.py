"""What every run has, whatever it trains: a directory, checkpoints, metrics, progress, an end."""
