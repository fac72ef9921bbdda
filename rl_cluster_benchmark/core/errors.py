"""Errors that are shown to the user: each message is a sentence that names the cause and the remedy."""


class UserError(Exception):
    """A wrong input or a missing part. The command line prints its message and exits with status 2."""


class TrainingFailedError(Exception):
    """A run that cannot go on (diverged, disk full). The command line prints its message and exits with status 1."""
