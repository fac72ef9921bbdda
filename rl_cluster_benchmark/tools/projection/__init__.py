"""How training would scale on more machines, from what one machine measured."""
