"""What a user's reward function may take, by name."""

from __future__ import annotations

from collections.abc import Sequence

OFFERED = ("prompt", "response", "row")
GROUP_OFFERED = ("prompt", "responses", "row")
"""A function that takes `responses` scores all responses to a prompt at once."""


def unknown_in_words(required: Sequence[str], offered: Sequence[str]) -> str:
    """Return that a function requires parameters which are not offered."""
    return f"takes {', '.join(required)}, but a reward gets {', '.join(offered)}"
