"""`rlcb scaling`: how training speeds up with workers, and whether the machine or this program sets the limit."""
