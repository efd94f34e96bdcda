"""Clouds through SkyPilot, which has a venv and a process of its own (docs/skypilot.md)."""

from rlboost_providers.skypilot.provider import SkyPilotProvider

__all__ = ["SkyPilotProvider"]
