"""The maths: targets and losses of a batch of experience. Nothing here knows about processes, logs or files."""
