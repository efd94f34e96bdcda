"""Decisions as pure functions of events and time; the standard library only."""
