"""The typed config of a run, and the files that it is read from."""
