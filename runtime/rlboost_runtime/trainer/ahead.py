"""Which steps were asked for while an earlier one is trained (`max_staleness`), and how old they are.

The rule: step m may be asked for while step n is the next to be trained if m <= n + max_staleness, and only
once all groups of step m - 1 have arrived. It is rolled out whole under the version published last, and is
trained after n' <= max_staleness further updates: so no token is older than that. A response is never cut
because a version was published: partial ones go on under the version that they began with. With
`max_staleness` 0 nothing is ever asked for ahead. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlboost_runtime.trainer.data import Prompt


@dataclass(slots=True)
class AskedStep:
    """A step that was asked for and is not trained yet."""

    step: int
    policy_version: int
    updates: int
    """Steps whose updates are in that version."""
    prompts: list[Prompt]
    order: list[int] = field(default_factory=list)
    """Groups that arrived, in that order."""

    @property
    def is_complete(self) -> bool:
        """Whether all its groups have arrived."""
        return len(self.order) == len(self.prompts)

    @property
    def staleness(self) -> int:
        """Updates between the weights that made its tokens and those that are trained with them."""
        return self.step - self.updates


class AskedSteps:
    """The steps under way, oldest first. Invariant: all but the newest one are complete."""

    def __init__(self, max_staleness: int, num_steps: int) -> None:
        self._max_staleness = max_staleness
        self._num_steps = num_steps
        self._steps: dict[int, AskedStep] = {}

    @property
    def newest(self) -> AskedStep:
        """The one whose groups are arriving, or have."""
        return self._steps[max(self._steps)]

    def get(self, step: int) -> AskedStep | None:
        """Return a step, if it was asked for."""
        return self._steps.get(step)

    def add(self, asked: AskedStep) -> None:
        """Take note of a step."""
        assert asked.staleness <= self._max_staleness
        assert all(each.is_complete and each.step < asked.step for each in self._steps.values())
        self._steps[asked.step] = asked

    def trained(self, step: int) -> None:
        """Forget a step."""
        del self._steps[step]

    def next_ahead(self, training: int) -> int | None:
        """Return the step to ask for now, while step `training` is the oldest that is not trained."""
        if not self.newest.is_complete:
            return None
        following = self.newest.step + 1
        return (
            following if following < self._num_steps and following <= training + self._max_staleness else None
        )

    def versions(self) -> list[list[int]]:
        """Return [step, policy version, updates] of all: what a resumed trainer asks for again."""
        return [[each.step, each.policy_version, each.updates] for each in self._steps.values()]
