"""Versions on disk: written whole or not at all, kept as long as somebody may need them.

Enter at `store.WeightStore`.
"""
