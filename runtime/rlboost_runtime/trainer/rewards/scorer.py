"""Computes a response's reward: the user's function or a built-in one in a pool of processes, or an
endpoint.

A reward that fails scores 0 and is counted (`outcome`). A function that cannot be loaded is a `ConfigError`
at the start.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Self

import psutil

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import BUILT_IN_REWARDS, HttpReward, Job, data_sources
from rlboost_runtime.trainer.rewards.http import HttpRewards
from rlboost_runtime.trainer.rewards.outcome import Reward, RewardCall, Setup
from rlboost_runtime.trainer.rewards.pool import RewardPool

__all__ = ["RewardCall", "RewardScorer"]

MIN_MEMORY_BYTES = 4 << 30
"""Address space of a reward process if the job sets none: half the machine's memory, at least this
much, which libraries such as torch reserve without using it."""


class RewardScorer:
    """Scores responses; `submit` may be called from any thread. Close it at the end."""

    def __init__(
        self,
        reward: str | HttpReward,
        files: Path,
        *,
        timeout_s: float,
        log_file: Path,
        num_children: int = 1,
        memory_bytes: int | None = None,
        others: Iterable[str | HttpReward] = (),
    ) -> None:
        """`timeout_s` and `memory_bytes` are for one call and one process. `others`: what `submit` may name
        instead of `reward`. Raises `ConfigError`."""
        self.name = name_of(reward)
        self._reward = reward
        self._backends: dict[str | HttpReward, RewardPool | HttpRewards] = {}
        try:
            for each in dict.fromkeys([reward, *others]):
                if isinstance(each, HttpReward):
                    self._backends[each] = HttpRewards(each, timeout_s=timeout_s)
                else:
                    self._backends[each] = RewardPool(
                        _setup(each, files, memory_bytes), each, timeout_s=timeout_s, log_file=log_file,
                        num_children=num_children,
                    )  # fmt: skip
        except ConfigError:
            self.close()
            raise

    @classmethod
    def for_job(cls, job: Job, files: Path, log_file: Path) -> RewardScorer:
        """Return what the job asks for."""
        memory = job.reward_memory_mib
        return cls(
            job.reward, files, timeout_s=job.reward_timeout_s, log_file=log_file,
            num_children=job.reward_processes or max(1, min(8, (os.cpu_count() or 1) // 4)),
            memory_bytes=None if memory is None else memory << 20,
            others=[
                each.reward for each in [*data_sources(job.data), *job.evaluations] if each.reward is not None
            ],
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, call: RewardCall, reward: str | HttpReward | None = None) -> Future[Reward]:
        """Score in the background, with the job's reward where `reward` is None; the future never raises."""
        return self._backends[self._reward if reward is None else reward].submit(call)

    def score(self, calls: Iterable[RewardCall]) -> list[Reward]:
        """Score all and wait."""
        return [future.result() for future in [self.submit(call) for call in calls]]

    def close(self) -> None:
        """End processes and connections; what still waits is dropped."""
        for backend in self._backends.values():
            backend.close()


def name_of(reward: str | HttpReward) -> str:
    """Return the reward's name, as people know it."""
    return reward.http if isinstance(reward, HttpReward) else reward


def _setup(reward: str, files: Path, memory_bytes: int | None) -> Setup:
    folder = str(files.absolute())
    if memory_bytes is None:
        memory_bytes = max(MIN_MEMORY_BYTES, psutil.virtual_memory().total // 2)
    if reward in BUILT_IN_REWARDS:
        return Setup(folder, reward, memory_bytes)
    file, _, function = reward.rpartition(":")
    if not file.endswith(".py") or not function.isidentifier():
        raise ConfigError(
            f"reward: {reward!r} is not file.py:function",
            f"give a Python file and a function, or one of {', '.join(BUILT_IN_REWARDS)}",
        )
    if not (files / file).is_file():
        raise ConfigError(
            f"reward: file {file} does not exist", "check the path; it is relative to the job file"
        )
    return Setup(folder, reward, memory_bytes)
