"""Rollouts, their collection, and the targets that are computed from their rewards."""
