"""The networks: from observations to action logits and a value."""
