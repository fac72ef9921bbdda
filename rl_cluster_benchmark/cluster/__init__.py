"""How machines find each other, agree on a run, and watch each other. Nothing here trains."""
