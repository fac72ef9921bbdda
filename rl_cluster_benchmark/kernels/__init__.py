"""The C code, its compilation, and its place in torch."""
