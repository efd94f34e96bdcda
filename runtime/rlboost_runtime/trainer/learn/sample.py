"""A finished response with its advantage, as the learner reads it.

Tokens and logprobs are arrays from the coordinator's bytes to the padded tensor: as Python numbers they would
take eight times the memory.

Which groups of a step are trained where some teach nothing (dynamic sampling, arXiv 2503.14476):

A step requests `wanted` prompts and some spares, and more of them while it lacks groups (`max_refills`). A
group whose rewards are all equal (*flat*) has no gradient:

- keep: it is trained like any other, so it counts in the mean;
- drop: it is left out, and out of the mean;
- replace: it is left out and a spare takes its place. The trained groups are the first `wanted` that are not
  flat, in the order of their **numbers**, never in that of their arrival: taking whatever finishes first
  would favour short answers. A group is handed out as soon as nothing that may still arrive can push it out
  of this set, so most need not wait.

Pure; the same groups give the same set, whatever order they arrive in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlboost_runtime.job import Algorithm, Rejection

TokenIds = NDArray[np.int32]
Logprobs = NDArray[np.float32]
"""A number per token."""
Routes = NDArray[np.int16]
"""The experts of positions, as a flat array: position, layer, choice."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A finished response with what the learner needs of it.

    `logprobs`: the engine's, one per token of `token_ids`. `old_logprobs`: the trainer's under the step's
    policy, where they were recomputed; `reference_logprobs`: the reference policy's, where there is one.
    `usable` False (quarantined) masks it out. For ppo: `reward`, of the whole response; `values`, the
    critic's before the step's first update, and what follows from both: `advantages` and `returns`, all per
    token. Where there are `advantages` (ppo's, or those of turns) `advantage` is not used.
    """

    prompt_ids: TokenIds
    token_ids: TokenIds
    logprobs: Logprobs
    advantage: float
    usable: bool = True
    old_logprobs: Logprobs | None = None
    reference_logprobs: Logprobs | None = None
    sampled: NDArray[np.bool_] | None = None
    """Per token of `token_ids`: whether the policy sampled it, so that it is trained; None: all of them."""
    reward: float = 0.0
    values: Logprobs | None = None
    advantages: Logprobs | None = None
    returns: Logprobs | None = None
    routes: Routes | None = None
    """Of a mixture whose routes are replayed: the experts that the step's policy chose for each position but
    the last, prompt included."""
    rewards: Logprobs | None = None
    """For ppo, where turns have rewards: per token, in the place of `reward` at the last one."""

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled."""
        return len(self.token_ids) if self.sampled is None else int(self.sampled.sum())

    @classmethod
    def of(
        cls,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        advantage: float,
        *,
        usable: bool = True,
    ) -> Sample:
        """Return a sample of plain numbers, for small batches."""
        return cls(
            np.asarray(prompt_ids, np.int32), np.asarray(token_ids, np.int32),
            np.asarray(logprobs, np.float32), advantage, usable,
        )  # fmt: skip


NOTHING = Sample.of([0], [0], [0.0], 0.0, usable=False)
"""What a rank without a share of a micro-batch computes: its peers need it in their collectives."""


def chosen_responses(rewards: Sequence[float], usable: Sequence[bool], algorithm: Algorithm) -> list[float]:
    """Return what each response of a group is to the losses that choose among them; 0: it is not trained.

    dpo: 1 for the best, -1 for the worst, none where their rewards are equal. rejection: 1 for each that is
    kept. Among equals the one with the lower number comes first, so that the choice does not depend on
    arrival.
    """
    ranked = sorted((i for i, ok in enumerate(usable) if ok), key=lambda i: -rewards[i])
    found = [0.0] * len(rewards)
    if algorithm.loss == "dpo":
        if ranked and rewards[ranked[0]] - rewards[ranked[-1]] > _EQUAL:
            worst = next(i for i in ranked if rewards[i] - rewards[ranked[-1]] <= _EQUAL)
            found[ranked[0]], found[worst] = 1.0, -1.0
        return found
    settings = algorithm.rejection or Rejection()
    kept = [i for i in ranked if settings.above is None or rewards[i] > settings.above]
    for i in kept[: settings.keep]:
        found[i] = 1.0
    return found


_EQUAL = 1e-9
"""Rewards that differ by no more are equal."""

ZeroVariance = Literal["keep", "drop", "replace"]


@dataclass(slots=True)
class GroupSelection:
    """The choice of one step's groups. Invariant: a group is returned at most once, after it arrived."""

    policy: ZeroVariance
    wanted: int
    """Groups to train; those numbered from here on are spares."""
    _flat: set[int] = field(default_factory=set)
    _waiting: set[int] = field(default_factory=set)
    _chosen: list[int] = field(default_factory=list)

    def arrived(self, group: int, *, flat: bool) -> list[int]:
        """Add a group; return those to train now, in ascending order."""
        if flat:
            self._flat.add(group)
        if not flat or self.policy == "keep":
            self._waiting.add(group)
        ready = sorted(each for each in self._waiting if self._is_certain(each))
        self._waiting.difference_update(ready)
        self._chosen += ready
        return ready

    def _is_certain(self, group: int) -> bool:
        """Return True if fewer than `wanted` lower-numbered groups are, or may yet be, trained."""
        if self.policy != "replace":
            return True
        return group - sum(each < group for each in self._flat) < self.wanted

    @property
    def num_missing(self) -> int:
        """Groups that the step lacks so far."""
        return self.wanted - len(self._chosen)

    def num_to_ask_for(self, num_arrived: int) -> int:
        """Return how many further prompts are likely to suffice, once `num_arrived`, all, have arrived; 0:
        the step is full.

        What is missing over the share of useful groups so far, at most `wanted`: a step without any useful
        group asks for as many as it began with.
        """
        missing = self.num_missing
        if self.policy != "replace" or missing <= 0:
            return 0
        num_useful = num_arrived - len(self._flat)
        return self.wanted if not num_useful else min(self.wanted, -(-missing * num_arrived // num_useful))

    def metrics(self) -> dict[str, float]:
        """Return counts of groups, once all have arrived."""
        replaced = sum(group >= self.wanted for group in self._chosen)
        return {
            "groups_trained": float(len(self._chosen)),
            "groups_flat": float(len(self._flat)),
            "groups_replaced": float(replaced),
            "groups_spare_unused": float(len(self._waiting)),
        }
