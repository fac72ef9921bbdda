"""PPO, A2C and IMPALA: targets, losses and epochs."""
