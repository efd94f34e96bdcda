"""Lossless deltas between two versions: only changed elements, and the kernels that find them.

Enter at `file`. Imported by `weights.store` and `weights.pull`.
"""
