"""The commands: each is a thin caller of functions that return data.

A command imports what it needs inside its function: `rlboost --help` loads nothing but typer.
"""
