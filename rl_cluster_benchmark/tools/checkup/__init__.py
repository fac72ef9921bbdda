"""The doctor's look at several machines at once."""
