"""PPO and A2C on several workers, which take every step together."""
