"""`rlcb dashboard`: a live page over a directory of runs, for this machine's own browser."""
