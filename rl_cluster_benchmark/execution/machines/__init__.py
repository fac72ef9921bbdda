"""What crosses the network between the machines of a run."""
