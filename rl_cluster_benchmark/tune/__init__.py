"""`rlcb tune`: the fastest way to run a config on this machine, found by measuring."""
