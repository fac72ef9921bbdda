"""The networks, which map observations to action logits and a value."""
