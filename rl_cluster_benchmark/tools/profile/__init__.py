"""Where a run spends its time, and what limits it."""
