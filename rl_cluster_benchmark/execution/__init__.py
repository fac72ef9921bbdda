"""Who collects and who updates: one process, the cores of a machine, a cluster. Nothing here knows a loss."""
