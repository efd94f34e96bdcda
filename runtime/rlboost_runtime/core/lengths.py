"""How long responses become, as finished ones showed: what is still to be expected of one that runs.

A response that has got far will get farther than the mean: given x tokens so far, the expected length is the
mean of those finished ones that were longer than x. Costs O(log samples) per question.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate

ENOUGH = 512
"""Finished responses that are remembered, in whole steps; fewer and the mean of the long ones is a guess."""


class Lengths:
    """Lengths of the responses of the last steps, in tokens."""

    def __init__(self) -> None:
        self._steps: deque[Sequence[int]] = deque()
        self._sorted: list[int] = []
        self._sum_from: list[int] = []
        self._squares = 0.0

    @property
    def is_known(self) -> bool:
        """Whether anything has finished."""
        return bool(self._sorted)

    @property
    def longest(self) -> float:
        """Tokens of the longest. Ask only if `is_known`."""
        return float(self._sorted[-1])

    @property
    def mean_context(self) -> float:
        """Response tokens before a token, in the mean over all tokens. Ask only if `is_known`."""
        return self._squares / (2.0 * self._sum_from[0]) if self._sum_from[0] else 0.0

    def learn(self, finished: Iterable[int]) -> None:
        """Take in the lengths of one step's finished responses; old steps are forgotten."""
        step = tuple(finished)
        if not step:
            return
        self._steps.append(step)
        while sum(map(len, self._steps)) - len(self._steps[0]) >= ENOUGH:
            self._steps.popleft()
        self._sorted = sorted(length for each in self._steps for length in each)
        self._squares = float(sum(length * length for length in self._sorted))
        self._sum_from = [*accumulate(reversed(self._sorted))][::-1]

    def expected(self, so_far: int) -> float:
        """Return the expected length of a response with so many tokens that is not over.

        One longer than all known ones is about to end, for all that is known. Ask only if `is_known`.
        """
        index = bisect_right(self._sorted, so_far)
        if index == len(self._sorted):
            return float(so_far)
        return self._sum_from[index] / (len(self._sorted) - index)
