"""Which response goes to which instance: dispatch, load balance and token-level migration (paper 4.2).

Enter at `dispatcher`. Imported by `core.core` and the controllers beside it.
"""
