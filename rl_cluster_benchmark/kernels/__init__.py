"""Networks, heads, losses and pooling in C: the sources, their compilation, and how torch code calls them."""
