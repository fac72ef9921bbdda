"""The rlcb command: arguments, help, and which tool a subcommand calls."""
