"""Worker processes, whatever they compute: starting, watching and ending them, and the memory that they share."""
