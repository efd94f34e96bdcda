"""What the core counts over a run, for status and tests; nothing is decided on it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rlboost_runtime.core.messages import LossCause


@dataclass(slots=True)
class Counters:
    """Counts since the run began."""

    migrations: int = 0
    """Assignments that continued a response with kept tokens on another instance than before."""
    tokens_migrated: int = 0
    """Kept tokens (as far as the core knows) of those migrations."""
    redispatches: int = 0
    """Assignments of a response beyond its first."""
    losses: Counter[LossCause] = field(default_factory=Counter)
    """Instances lost, by cause."""
    preemptions: Counter[LossCause] = field(default_factory=Counter)
    """Spot machines without any instance left, by what took the last one; counted anew if one comes back."""
    stale_words: int = 0
    """Events that no longer mean anything: unknown or former instance, assignment, step or lease."""
    duplicates: int = 0
    """Events that said again what was known."""
    quarantined: list[int] = field(default_factory=list)
    """Responses given up after failing on several instances."""
    cancelled: int = 0
    """Responses dropped unfinished because the trainer asked for another step."""
    recalls: int = 0
    """Times the GPU was recalled from the trainer."""
