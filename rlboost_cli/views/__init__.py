"""A run while it goes on and when it has ended, as lines for a person."""
