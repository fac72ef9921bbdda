"""How machines find each other, agree and keep watch over each other. Nothing here trains."""
