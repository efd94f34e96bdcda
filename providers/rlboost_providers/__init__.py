"""Clouds behind one small protocol: one module each, imported only where it is used."""
