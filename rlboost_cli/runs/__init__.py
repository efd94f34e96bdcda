"""A run from outside: found, started, asked, followed in its logs, taken down."""
