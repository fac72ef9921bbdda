"""Reading runs and comparing them: the figures."""
