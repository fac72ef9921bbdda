"""Networks, heads and losses in C: the sources, their compilation, and how torch code calls them."""
