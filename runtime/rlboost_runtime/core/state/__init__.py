"""What the core knows: responses, instances, machines and measured rates.

Changes itself only as told; it decides nothing. Imported by `core.dispatch`, `core.window` and `core.core`.
"""
