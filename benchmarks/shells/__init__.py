"""Deterministic simulation of the live shells.

The real coordinator, fleet controller and agents run in one process on virtual time, over a network, disks,
engines and a cloud that are played and fail as a seed says.
"""
