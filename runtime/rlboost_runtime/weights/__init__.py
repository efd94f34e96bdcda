"""Immutable weight versions: store, server and puller."""
