"""Benchmarks: each prints one JSON object with its figure, its target and what limited it."""
