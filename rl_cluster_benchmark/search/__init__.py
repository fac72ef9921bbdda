"""`rlcb search`: hyperparameter search, with Optuna as the sampler and ordinary runs as trials."""
