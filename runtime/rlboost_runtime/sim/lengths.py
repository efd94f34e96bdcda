"""How long responses become: lognormal, part of the spread common to a group, cut at the limit.

The lengths of a step depend on the seed and the step alone, so that policies are compared on the same
responses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from rlboost_runtime.sim.calibration import Assumptions
from rlboost_runtime.sim.presets import Workload


@dataclass(frozen=True, slots=True)
class StepLengths:
    """One step's responses, group after group."""

    prompts: tuple[int, ...]
    """Prompt tokens, by response."""
    tokens: tuple[int, ...]
    """Response tokens, by response."""


def draw_lengths(workload: Workload, assumptions: Assumptions, seed: int, step: int) -> StepLengths:
    """Return the lengths of a step's responses."""
    random = Random(f"{seed}/{step}")  # noqa: S311 (lengths, no secrets)
    common = assumptions.length_sigma * math.sqrt(assumptions.length_group_share)
    own = assumptions.length_sigma * math.sqrt(1.0 - assumptions.length_group_share)
    middle = math.log(assumptions.length_median)
    prompts: list[int] = []
    tokens: list[int] = []
    for _ in range(workload.prompts):
        prompt = max(1, round(workload.prompt_tokens * random.uniform(0.5, 1.5)))
        centre = middle + common * random.gauss(0.0, 1.0)
        for _ in range(workload.group_size):
            length = math.exp(centre + own * random.gauss(0.0, 1.0))
            prompts.append(prompt)
            tokens.append(max(1, min(workload.max_response_tokens, round(length))))
    return StepLengths(tuple(prompts), tuple(tokens))
