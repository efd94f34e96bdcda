"""Weights on their way: how small deltas are, and how fast versions travel."""
