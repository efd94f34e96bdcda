"""The `rlboost` command: one module per command, heavy imports inside the commands."""
