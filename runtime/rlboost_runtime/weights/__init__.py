"""Immutable weight versions: files that are written once, checked by digest and never changed.

`manifest` describes a version, `store` keeps it, `delta` makes it small, `serve` and `pull` move it.
"""
