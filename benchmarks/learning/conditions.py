"""What is compared: the quickstart's recipe on spot machines that never die, and on ones that do.

The two job files of a seed differ in their names and in `rollout.spot.any_of[0].market`, in nothing else.
A seed decides the initial weights (made and warmed up once, then shared by both conditions), the order of
the prompts, and in the storm when which machine goes. Sampling is not reproducible: engines draw their own
seeds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

RECIPE = Path(__file__).resolve().parents[2] / "examples" / "quickstart.yaml"

QUIET, STORMY = "quiet", "stormy"
CONDITIONS = (QUIET, STORMY)

TOKENS_PER_S_PER_RESPONSE = 8
"""A third of the quickstart's pace: a step generates for longer than it trains, so that kills find work."""
STORM = {"mean_lifetime_s": 30, "mean_absence_s": 3, "notice_fraction": 0.2, "notice_s": 5}
"""A machine lives 30 s in the mean (quickstart: 45), of which it spends up to 10 starting where the computer
is busy; every fifth reclaim is announced."""
WARMUP_S = 1800
"""Long enough for a busy computer: seeds must start from equally good models."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One run of the comparison."""

    condition: str
    seed: int
    job: dict[str, Any]  # as in a job file

    @property
    def name(self) -> str:
        """The run's name."""
        return f"{self.condition}-{self.seed}"

    @property
    def digest(self) -> str:
        """Digest of the job: a stored result counts only for the same one."""
        return hashlib.sha256(json.dumps(self.job, sort_keys=True).encode()).hexdigest()[:16]

    def write(self, folder: Path) -> Path:
        """Write the job file and return its path."""
        path = folder / f"{self.name}.yaml"
        with path.open("w") as file:
            YAML().dump(self.job, file)
        return path


def planned(seeds: Sequence[int], steps: int) -> list[Planned]:
    """Return all runs in the order in which they are made.

    A seed's two runs follow each other, and which comes first alternates: what else happens on the machine
    meanwhile favours neither.
    """
    return [
        Planned(condition, seed, _job(condition, seed, steps))
        for index, seed in enumerate(seeds)
        for condition in (CONDITIONS if index % 2 == 0 else reversed(CONDITIONS))
    ]


def _job(condition: str, seed: int, steps: int) -> dict[str, Any]:
    job: dict[str, Any] = YAML(typ="safe").load(RECIPE)
    job["name"] = f"{condition}-{seed}"
    job["model"]["seed"] = seed
    job["model"]["warmup"]["max_seconds"] = WARMUP_S  # ends by its target, not by the clock
    job["algorithm"] |= {"seed": seed, "steps": steps}
    job["rollout"]["engine_args"]["tokens_per_s_per_response"] = TOKENS_PER_S_PER_RESPONSE
    (offer,) = job["rollout"]["spot"]["any_of"]
    offer["market"] = {"seed": seed, **STORM} if condition == STORMY else None
    job["evidence"] = {"keep_journal": True}
    return job
