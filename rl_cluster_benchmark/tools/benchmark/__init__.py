"""A matrix of runs, trained and evaluated one after the other."""
