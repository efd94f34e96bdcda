"""Clouds behind one small protocol (`base.provider.Provider`): one folder each, imported only where used.

Enter at `registry.provider_for`. To add a cloud, add a folder and a line to the registry.
"""
