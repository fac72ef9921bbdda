"""The environments: Procgen and two toy games."""
