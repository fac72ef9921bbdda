"""The environments: Procgen, two toy games, and the results that were published for Procgen."""
