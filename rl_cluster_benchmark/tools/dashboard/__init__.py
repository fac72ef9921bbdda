"""A page in the browser that shows runs while they train."""
