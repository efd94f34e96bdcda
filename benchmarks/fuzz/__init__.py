"""Mutated messages and files against the coordinator's parsers. Enter at `__main__`."""
