"""The fastest settings of a config on this machine."""
