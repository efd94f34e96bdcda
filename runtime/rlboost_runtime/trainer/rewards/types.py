"""What a reward function is given and what comes back from the process in which it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

Score = Callable[["RewardCall"], object]


@dataclass(frozen=True, slots=True)
class Setup:
    """What computes the reward: `file.py:name` in `folder`, or the name of a built-in one. `memory_bytes`
    bounds the process's address space."""

    folder: str
    reward: str
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class RewardCall:
    """One response to score."""

    prompt: str
    response: str
    row: dict[str, Any]  # any JSON object, or a reasoning-gym entry


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """`failure` is "" or one of raised, memory, not_finite, not_a_number; for the setup: `load`."""

    reward: float = 0.0
    failure: str = ""
    problem: str = ""
