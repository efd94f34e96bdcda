"""Rewards per turn: what each turn of an episode is credited with. Pure.

The return of a turn is the sum of its episode's rewards from that turn on: what was earned before is not its
merit. Its advantage compares it with the returns of the same turn of the group's other episodes, by the
loss's own formula (turn-level advantages, MT-GRPO, arXiv 2505.11821, whose turns carry their own reward and
the episode's). An episode that ended earlier does not count there; a turn that one episode alone reached has
nothing to be compared with, and so the advantage 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from rlboost_runtime.inference.episodes import RecordedSample
from rlboost_runtime.job.algorithm import Loss
from rlboost_runtime.trainer.learn.losses import group_advantages

Floats = NDArray[np.float32]


def returns(rewards: Sequence[float]) -> list[float]:
    """Return the return of each turn, given each one's reward."""
    return [*accumulate(reversed(rewards))][::-1]


def turn_advantages(
    returns_R: Sequence[Sequence[float]], usable_R: Sequence[bool], loss: Loss
) -> list[list[float]]:
    """Return the advantage of each turn of a group's R episodes; 0 in an episode that is not usable."""
    num_turns = max(map(len, returns_R), default=0)
    if num_turns == 0:
        return [[] for _ in returns_R]
    table_KR = torch.tensor(
        [[own[k] if k < len(own) else 0.0 for own in returns_R] for k in range(num_turns)],
        dtype=torch.float64,
    )
    counts_KR = torch.tensor(
        [
            [usable and k < len(own) for own, usable in zip(returns_R, usable_R, strict=True)]
            for k in range(num_turns)
        ]
    )
    found_KR = group_advantages(table_KR, counts_KR, loss)
    return [found_KR[: len(own), r].tolist() for r, own in enumerate(returns_R)]


def are_flat(returns_R: Sequence[Sequence[float]]) -> bool:
    """Return True if no turn distinguishes the episodes: they teach nothing."""
    num_turns = max(map(len, returns_R), default=0)
    columns = [[own[k] for own in returns_R if k < len(own)] for k in range(num_turns)]
    return all(max(column) - min(column) <= 1e-9 for column in columns)


def per_token(sample: RecordedSample, of_turns: Sequence[float]) -> Floats:
    """Return, per token of a sample, the number of the turn that it belongs to."""
    num_tokens = len(sample.sampled)
    found = np.zeros(num_tokens, np.float32)
    for turn, begin, end in _turns_of(sample):
        found[begin:end] = of_turns[turn]
    return found


def at_turns_ends(sample: RecordedSample, rewards: Sequence[float]) -> Floats:
    """Return, per token of a sample, the reward that is earned with it: each turn's at its last token. What
    the episode earns after the sample's last turn, in other samples, is earned there."""
    rest = returns(rewards)
    sampled = np.frombuffer(sample.sampled, np.uint8)
    found = np.zeros(len(sampled), np.float32)
    turns = list(_turns_of(sample))
    for (turn, begin, end), following in zip(turns, [*turns[1:], None], strict=True):
        last = begin + int(np.flatnonzero(sampled[begin:end])[-1])
        found[last] += rest[turn] - (rest[following[0]] if following is not None else 0.0)
    return found


def _turns_of(sample: RecordedSample) -> list[tuple[int, int, int]]:
    """Return (turn, first token, end) of a sample's turns that have a token; what the environment wrote after
    one is within."""
    begins = [begin for _, begin in sample.turns]
    ends = [*begins[1:], len(sample.sampled)]
    found = zip((turn for turn, _ in sample.turns), begins, ends, strict=True)
    return [(turn, begin, end) for turn, begin, end in found if any(sample.sampled[begin:end])]
