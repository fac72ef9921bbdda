"""IMPALA: actors that play, learners that learn from what they played."""
