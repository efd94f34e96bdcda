"""What a reward function is given and answers, and the rule for responses whose reward fails. Pure.

**The rule.** A reward that raises, takes longer than `reward_timeout_s`, ends its process, or returns
something that is not a finite number scores `FAILED_SCORE`, which is 0, for that one response. The failure is
counted by kind, the response is trained on like any other, and the run goes on. It ends, as failed, where the
failures say that the reward itself is broken: when all responses of a step failed, or when the first
`HOPELESS` ones of a process did, so that nobody waits a night for timeouts. What was trained stays;
`launch --resume` goes on from it.

Who counts: the trainer puts the counts into each step's metrics (`reward_failures` names them); from there
they reach the events in words, the status, and the cost report that is shown at the end.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.protocol.reward_failures import WORDS, RewardFailure, metric_of

Score = Callable[["RewardCall"], object]
ScoreGroup = Callable[["Sequence[RewardCall]"], list[object]]
"""Scores the responses to one prompt; an exception may stand for the value of one of them."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What computes the reward: `file.py:name` in `folder`, or the name of a built-in one. `memory_bytes`
    bounds the process's address space; `timeout_s` an asynchronous call."""

    folder: str
    reward: str
    memory_bytes: int | None = None
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class RewardCall:
    """One response to score."""

    prompt: str
    response: str
    row: dict[str, Any]  # any JSON object, or a reasoning-gym entry


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """`failure` is "" or one of raised, memory, not_finite, not_a_number, timeout; for the setup: `load`."""

    reward: float = 0.0
    failure: str = ""
    problem: str = ""
    takes_groups: bool = False
    """For the setup: all responses to a prompt go into one call."""


FAILED_SCORE = 0.0
"""The reward of a response whose reward could not be computed."""
HOPELESS = 16
"""So many failures before the first success mean a broken reward. With one reward process and the default
timeout that takes 160 s, where a step of a thousand responses would take hours to show the same."""
_MAX_PROBLEM = 400  # characters of an exception's text that people are shown


@dataclass(frozen=True, slots=True)
class Reward:
    """One response's reward; `FAILED_SCORE` where there is a `failure`, which `problem` explains."""

    value: float
    failure: RewardFailure | None = None
    problem: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    """Of several named rewards the value of each, without its weight."""


def failed(kind: RewardFailure, problem: str) -> Reward:
    """Return the reward of a response whose reward could not be computed."""
    return Reward(FAILED_SCORE, kind, problem)


def failure_metrics(rewards: Iterable[Reward]) -> dict[str, float]:
    """Return `reward_failures_KIND` for every kind, zeros included."""
    counts = dict.fromkeys(RewardFailure, 0)
    for reward in rewards:
        if reward.failure is not None:
            counts[reward.failure] += 1
    return {metric_of(kind): float(count) for kind, count in counts.items()}


class RewardWatch:
    """Notices a broken reward early: `saw` raises once the first `HOPELESS` rewards have all failed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._failures = 0
        self._has_worked = False

    def saw(self, rewards: Iterable[Reward]) -> None:
        """Take note of rewards. Raises `RuntimeFault`."""
        if self._has_worked:
            return
        for reward in rewards:
            if reward.failure is None:
                self._has_worked = True
                return
            self._failures += 1
            if self._failures >= HOPELESS:
                raise _broken(self._name, f"failed for the first {HOPELESS} responses", reward)


def require_some_reward(rewards: list[Reward], name: str) -> None:
    """Raise `RuntimeFault` if every one of a step's rewards failed: such a step teaches nothing, nor will
    the next."""
    if rewards and all(reward.failure is not None for reward in rewards):
        raise _broken(name, f"failed for all {len(rewards)} responses of the step", rewards[-1])


def _broken(name: str, what: str, last: Reward) -> RuntimeFault:
    assert last.failure is not None
    return RuntimeFault(
        f"reward {name} {what}; the last one {WORDS[last.failure]}: {last.problem.strip()}",
        "correct it, then launch the run again with --resume;"
        " `rlboost logs RUN reward` shows what it printed",
    )


def explain_exception(error: BaseException, folder: Path) -> str:
    """Return `rewards.py:12: KeyError: 'answer'`: the place in the user's own files below `folder`, and what
    was raised, on one line. The innermost of their frames is named, as the one that they can change."""
    text = " ".join("".join(traceback.format_exception_only(error)).split("\n")).strip()
    if isinstance(error, SyntaxError) and error.filename:
        text = f"{type(error).__name__}: {error.msg}"
        return f"{_name(error.filename, folder)}:{error.lineno or 1}: {text}"[:_MAX_PROBLEM]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_below(frame.filename, folder)]
    where = f"{_name(own[-1].filename, folder)}:{own[-1].lineno}: " if own else ""
    return f"{where}{text}"[:_MAX_PROBLEM]


def _is_below(filename: str, folder: Path) -> bool:
    return Path(filename).is_relative_to(folder)


def _name(filename: str, folder: Path) -> str:
    path = Path(filename)
    return path.relative_to(folder).as_posix() if _is_below(filename, folder) else path.name
