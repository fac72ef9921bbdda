"""`rlcb launch`: start a distributed run on engines that are already there, and start it again when it fails."""
