"""`rlcb profile`: where the time of a run goes, what the machine could do, and what limits it."""
