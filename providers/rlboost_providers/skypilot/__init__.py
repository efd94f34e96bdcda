"""Clouds through SkyPilot, which has a venv and a process of its own (docs/skypilot.md)."""

from rlboost_providers.skypilot.provider import HeadTerms, SkyPilotProvider

__all__ = ["HeadTerms", "SkyPilotProvider"]
