"""Restarts of the coordinator: how long until tokens flow again. Enter at `__main__`."""
