"""Clouds through SkyPilot, which has a venv and a process of its own (docs/skypilot.md).

Enter at `provider.SkyPilotProvider`.
"""
