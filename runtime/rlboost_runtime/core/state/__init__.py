"""What the core knows: responses, instances, machines and measured rates.

It records and decides nothing. Imported by `core.dispatch`, `core.window` and `core.core`.
"""
