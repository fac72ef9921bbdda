"""One gradient step: parameters, gradients, optimisers, and the interfaces through which workers sum and share work."""
