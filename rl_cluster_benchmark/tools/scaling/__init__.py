"""How training speeds up with workers, measured, and the model of how it does with machines."""
