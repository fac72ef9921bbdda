"""RL Cluster Benchmark: train, evaluate and compare PPO, A2C, A3C and IMPALA on Procgen, on CPUs."""

__version__ = "0.1.0"
