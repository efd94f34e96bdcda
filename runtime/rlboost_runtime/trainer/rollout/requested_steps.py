"""Steps that were requested while an earlier one is trained (`max_staleness`), and how old they are.

The rule: step m may be requested while step n is the next to be trained if m <= n + max_staleness, and only
once all groups of step m - 1 have arrived. It is rolled out whole under the version published last, and is
trained after n' <= max_staleness further updates: so no token is older than that. A response is never cut
because a version was published: partial ones go on under the version that they began with. With
`max_staleness` 0 nothing is ever requested ahead. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rlboost_runtime.trainer.data.prompts import Prompt

Group = TypeVar("Group")


@dataclass(slots=True)
class RequestedStep(Generic[Group]):
    """A step that was requested and is not trained yet."""

    step: int
    policy_version: int
    updates: int
    """Steps whose updates are in that version."""
    prompts: list[Prompt]
    arrived: list[Group] = field(default_factory=list)
    """Groups that have arrived, in that order."""

    @property
    def is_complete(self) -> bool:
        """True once all its groups have arrived."""
        return len(self.arrived) == len(self.prompts)

    @property
    def staleness(self) -> int:
        """Updates between the weights that made its tokens and those that are trained with them."""
        return self.step - self.updates


class RequestedSteps(Generic[Group]):
    """The steps under way, oldest first. Invariant: all but the newest one are complete."""

    def __init__(self, max_staleness: int, num_steps: int) -> None:
        self._max_staleness = max_staleness
        self._num_steps = num_steps
        self._steps: dict[int, RequestedStep[Group]] = {}

    @property
    def newest(self) -> RequestedStep[Group]:
        """The step whose groups are arriving, or have arrived."""
        return self._steps[max(self._steps)]

    def get(self, step: int) -> RequestedStep[Group] | None:
        """Return a step, if it was requested."""
        return self._steps.get(step)

    def add(self, requested: RequestedStep[Group]) -> None:
        """Add the newest step."""
        assert requested.staleness <= self._max_staleness
        assert all(each.is_complete and each.step < requested.step for each in self._steps.values())
        self._steps[requested.step] = requested

    def remove(self, step: int) -> None:
        """Remove a step that was trained."""
        del self._steps[step]

    def next_ahead(self, training: int) -> int | None:
        """Return the step to request now, while step `training` is the oldest that is not trained."""
        if not self.newest.is_complete:
            return None
        following = self.newest.step + 1
        return (
            following if following < self._num_steps and following <= training + self._max_staleness else None
        )

    def versions(self) -> list[list[int]]:
        """Return [step, policy version, updates] of all: what a resumed trainer requests again."""
        return [[each.step, each.policy_version, each.updates] for each in self._steps.values()]
