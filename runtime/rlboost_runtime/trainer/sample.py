"""What the learner eats: a finished response with its advantage."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """A finished response with what the trainer needs of it.

    `logprobs`: the engine's, one per token of `token_ids`. `old_logprobs`: the trainer's under the step's
    policy, where they were recomputed. `usable` False (quarantined) masks it out.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    advantage: float
    usable: bool = True
    old_logprobs: list[float] | None = None


NOTHING = Sample([0], [0], [0.0], 0.0, usable=False)
"""What a rank computes that has no share of a micro-batch: its peers need it for their collectives."""
