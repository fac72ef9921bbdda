"""What the commands do besides training: each tool reads runs or starts them."""
