"""What everything else uses and what knows nothing of the rest: errors, clocks, random streams, signals, files."""
