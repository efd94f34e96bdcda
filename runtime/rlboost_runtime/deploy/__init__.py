"""Bringing RLBoost onto a machine that has none: what is shipped, and where it is put together."""
