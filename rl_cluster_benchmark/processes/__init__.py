"""Worker processes, independent of what they compute: starting, watching and ending them, and their shared memory."""
