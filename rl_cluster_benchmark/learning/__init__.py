"""One gradient step: parameters, gradients, optimisers, and what a learner sees of other workers."""
