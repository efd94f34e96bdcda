"""Mutation testing of the modules that a run's tokens and money rest on."""
