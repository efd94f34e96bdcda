"""A run's folder: its layout, creation, address of its head, secrets and index of all runs.

Enter at `folder.RunFolder`. No other room joins paths inside a run's folder. Every role imports it.
"""
