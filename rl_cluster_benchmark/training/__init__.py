"""The course of a training run, from a config to the summary, on one machine or several."""
