"""`rlcb benchmark`: a matrix of algorithms, modes, games and seeds, trained, evaluated and reported."""
