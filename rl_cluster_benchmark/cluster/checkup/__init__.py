"""`rlcb doctor --cluster`: could these machines train together, and how well?"""
