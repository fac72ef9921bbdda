"""The algorithms PPO, A2C and IMPALA: their targets, losses and epochs."""
