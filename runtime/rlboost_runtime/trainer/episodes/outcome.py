"""What is asked of the process that plays an episode, what it answers, and what becomes of the episode. Pure.

**The rule.** An episode whose environment raises, hangs, ends its process or gives no number is played
again, up to `environment.tries` times; then it is left out: it is not trained, its group's advantages are
those of the others, and it is counted. One that was lost with the endpoint, or whose response was lost, says
nothing of the environment and is played again without counting as a try. Where a process dies or hangs nobody
knows which of its episodes is to blame: each is played again in a process of its own, and counts there. No
failure becomes a reward of 0: neither one that runs out of memory, nor one whose server vanished. An
episode that asks for more turns or tokens than it may have has ended there: what its environment then says is
its reward, and 0 where a function or program lets the refusal end it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.inference.episodes import EpisodeRecord
from rlboost_runtime.job.environment import OpenEnvServer
from rlboost_runtime.protocol.episode_failures import WORDS, EpisodeFailure
from rlboost_runtime.trainer.episodes.taskset import TasksetSetup


@dataclass(frozen=True, slots=True)
class EpisodeSetup:
    """What plays episodes: `python` (`file.py:name` in `folder`), `command`, `taskset` or `openenv`.
    `timeout_s` is for an episode; `memory_bytes` bounds the process's address space."""

    folder: str
    python: str | None
    command: tuple[str, ...] | None
    max_turns: int
    timeout_s: float
    memory_bytes: int | None
    taskset: TasksetSetup | None = None
    openenv: OpenEnvServer | None = None

    @property
    def name(self) -> str:
        """What people know the environment by."""
        if self.taskset is not None:
            return str(self.taskset.told["taskset"])
        if self.openenv is not None:
            return self.openenv.url or " ".join(self.openenv.command or ())
        return self.python or " ".join(self.command or ())

    @property
    def times_itself(self) -> bool:
        """True if its process ends an episode that takes too long by itself: it knows when the episode waits
        for the model."""
        return self.python is not None or self.openenv is not None


@dataclass(frozen=True, slots=True)
class EpisodeCall:
    """One episode to play. The prompt is text, or messages. `url`: of the endpoint, for programs."""

    number: int
    name: str
    key: str
    prompt: str
    messages: tuple[dict[str, Any], ...] | None
    row: dict[str, Any]  # any JSON object, or a reasoning-gym entry
    url: str = ""
    template: str | None = None
    template_args: dict[str, bool | int | float | str] = field(default_factory=dict)


class Played(msgspec.Struct, frozen=True, array_like=True):
    """How episode `number` of a process ended. `reward` None: the job's reward scores its last response.
    `is_stuck`: a thread of it still runs, so that the process has to be replaced. `num_ended`: with its
    process so many episodes ended; 0: it ended by itself. `rewards`: per turn, where the environment gives
    them; `reward` is their sum."""

    number: int
    reward: float | None = None
    failure: str = ""
    problem: str = ""
    is_stuck: bool = False
    num_ended: int = 0
    rewards: tuple[float, ...] | None = None


LOADED = -1
"""Number of the first answer, which says how loading went."""


class EpisodeResult(msgspec.Struct, frozen=True, array_like=True):
    """An episode that is over. With a `failure` it was left out. `rewards`: per turn, or None."""

    record: EpisodeRecord
    reward: float | None = None
    failure: str = ""
    problem: str = ""
    num_tries: int = 1
    rewards: tuple[float, ...] | None = None
    environment_s: float = 0.0
    """How long its environment took, without waiting for the model."""

    @property
    def num_responses(self) -> int:
        """Turns that the model has answered."""
        return sum(len(sample.turns) for sample in self.record.samples)

    @property
    def num_sampled(self) -> int:
        """Tokens that the model wrote."""
        return sum(sum(sample.sampled) for sample in self.record.samples)


NOTHING = EpisodeRecord((), 0, (), "", False, "", "")
"""What there is of an episode that was left out."""

HOPELESS = 16
"""So many episodes left out before the first that was not mean a broken environment."""


class EpisodeWatch:
    """Notices a broken environment early."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._num_left_out = 0
        self._has_worked = False

    def saw(self, results: Iterable[EpisodeResult]) -> None:
        """Take note of episodes. Raises `RuntimeFault`."""
        for each in results:
            self._has_worked = self._has_worked or not each.failure
            self._num_left_out += bool(each.failure)
            if not self._has_worked and self._num_left_out >= HOPELESS:
                raise _broken(self._name, f"failed for the first {HOPELESS} episodes", each)


def require_some_episode(results: Sequence[EpisodeResult], name: str) -> None:
    """Raise `RuntimeFault` if every one of a step's episodes was left out."""
    if results and all(each.failure for each in results):
        raise _broken(name, f"failed for all {len(results)} episodes of the step", results[-1])


def _broken(name: str, what: str, last: EpisodeResult) -> RuntimeFault:
    return RuntimeFault(
        f"environment {name} {what}; the last one {WORDS[EpisodeFailure(last.failure)]}:"
        f" {last.problem.strip()}",
        "correct it, then launch the run again with --resume;"
        " `rlboost logs RUN environment` shows what it printed",
    )


def episode_metrics(results: Sequence[EpisodeResult]) -> dict[str, float]:
    """Return turns and endings of a step's episodes."""
    whole = [each for each in results if not each.failure]
    num = max(1, len(whole))
    sampled = sum(each.num_sampled for each in whole)
    written = sum(len(s.sampled) for each in whole for s in each.record.samples) - sampled
    left_out = {f"episodes_left_out_{kind}": 0.0 for kind in EpisodeFailure}
    for each in results:
        if each.failure:
            left_out[f"episodes_left_out_{each.failure}"] += 1.0
    return {
        "turns_mean": sum(each.record.num_turns for each in whole) / num,
        "turns_max": float(max((each.record.num_turns for each in whole), default=0)),
        "samples_per_episode": sum(len(each.record.samples) for each in whole) / num,
        "environment_tokens_mean": written / num,
        "environment_s": sum(each.environment_s for each in whole)
        / max(1, sum(each.record.num_turns for each in whole)),
        "episodes_limited_share": sum(bool(each.record.limit) for each in whole) / num,
        "episodes_tried_again": float(sum(each.num_tries - 1 for each in results)),
        **left_out,
    }
