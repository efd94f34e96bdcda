"""Computes a response's reward: the user's function or a built-in one in a pool of processes, or an
endpoint.

A reward that fails scores 0 and is counted (`outcome`). A function that cannot be loaded is a `ConfigError`
at the start.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Self

import psutil

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import (
    BUILT_IN_REWARDS,
    HttpReward,
    Job,
    RewardSetting,
    RewardSource,
    reward_parts,
)
from rlboost_runtime.trainer.rewards.http import HttpRewards
from rlboost_runtime.trainer.rewards.outcome import Reward, RewardCall, Setup
from rlboost_runtime.trainer.rewards.pool import RewardPool
from rlboost_runtime.trainer.rewards.sandbox import OFF, Sandbox

__all__ = ["RewardCall", "RewardScorer"]

MIN_MEMORY_BYTES = 4 << 30
"""Address space of a reward process if the job sets none: half the machine's memory, at least this
much, which libraries such as torch reserve without using it."""


class RewardScorer:
    """Scores responses; `submit` may be called from any thread. Close it at the end."""

    def __init__(
        self,
        reward: RewardSetting,
        files: Path,
        *,
        timeout_s: float,
        log_file: Path,
        num_children: int = 1,
        memory_bytes: int | None = None,
        others: Iterable[RewardSetting] = (),
        is_used: bool = True,
        sandbox: Sandbox = OFF,
    ) -> None:
        """`timeout_s` and `memory_bytes` are for one call and one process. `others`: what `submit` may name
        instead of `reward`. `is_used` False: nothing will be submitted. `sandbox` is that of a user's
        functions. Raises `ConfigError`."""
        self.name = " + ".join(name_of(source) for _, _, source in reward_parts(reward))
        self._reward = reward
        self._backends: dict[RewardSource, RewardPool | HttpRewards] = {}
        wanted = (reward, *others) if is_used else ()
        sources = [source for each in wanted for _, _, source in reward_parts(each)]
        try:
            for each in dict.fromkeys(sources):
                if isinstance(each, HttpReward):
                    self._backends[each] = HttpRewards(each, timeout_s=timeout_s)
                else:
                    self._backends[each] = RewardPool(
                        _setup(each, files, memory_bytes, timeout_s), each, timeout_s=timeout_s,
                        log_file=log_file, num_children=num_children,
                        sandbox=OFF if each in BUILT_IN_REWARDS else sandbox,
                    )  # fmt: skip
        except ConfigError:
            self.close()
            raise

    @classmethod
    def for_job(cls, job: Job, files: Path, log_file: Path) -> RewardScorer:
        """Return what the job asks for."""
        return cls(
            job.reward, files, timeout_s=job.reward_timeout_s, log_file=log_file,
            num_children=job.reward_processes or default_processes(),
            memory_bytes=memory_limit(job.reward_memory_mib),
            others=job.rewards[1:], is_used=job.is_scored, sandbox=Sandbox.of(job),
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, call: RewardCall, reward: RewardSetting | None = None) -> Future[Reward]:
        """Score one response in the background; see `submit_group`."""
        return self.submit_group([call], reward)[0]

    def submit_group(
        self, calls: Sequence[RewardCall], reward: RewardSetting | None = None
    ) -> list[Future[Reward]]:
        """Score the responses to one prompt in the background, with the job's reward where `reward` is None;
        the futures never raise."""
        wanted = self._reward if reward is None else reward
        parts = reward_parts(wanted)
        futures = [self._backends[source].submit(calls) for _, _, source in parts]
        if not isinstance(wanted, list):
            return futures[0]
        weights = {name: weight for name, weight, _ in parts}
        return [_weighted_sum(weights, of_response) for of_response in zip(*futures, strict=True)]

    def score(self, calls: Iterable[RewardCall]) -> list[Reward]:
        """Score all and wait."""
        return [future.result() for future in [self.submit(call) for call in calls]]

    def close(self) -> None:
        """End processes and connections; what still waits is dropped."""
        for backend in self._backends.values():
            backend.close()


def _weighted_sum(weights: dict[str, float], futures: Sequence[Future[Reward]]) -> Future[Reward]:
    """Return the sum of the named rewards of a response, each times its weight; one that failed counts as it
    scored, and is told as the failure of the whole."""
    whole: Future[Reward] = Future()
    lock, left = threading.Lock(), [len(futures)]

    def done(finished: Future[Reward]) -> None:
        with lock:
            left[0] -= 1
        if left[0]:
            return
        if any(each.cancelled() for each in futures):
            whole.cancel()
            return
        found = dict(zip(weights, (each.result() for each in futures), strict=True))
        value = sum(weights[name] * each.value for name, each in found.items())
        bad = next(((name, each) for name, each in found.items() if each.failure is not None), None)
        failure, problem = (None, "") if bad is None else (bad[1].failure, f"{bad[0]}: {bad[1].problem}")
        whole.set_result(Reward(value, failure, problem, {name: each.value for name, each in found.items()}))

    for each in futures:
        each.add_done_callback(done)
    return whole


def name_of(reward: RewardSource) -> str:
    """Return the reward's name, as people know it."""
    return reward.http if isinstance(reward, HttpReward) else reward


def default_processes() -> int:
    """Return how many processes run a user's code where the job does not say."""
    return max(1, min(8, (os.cpu_count() or 1) // 4))


def memory_limit(mib: int | None) -> int:
    """Return the bytes of address space of one such process; None: the job sets no limit."""
    return max(MIN_MEMORY_BYTES, psutil.virtual_memory().total // 2) if mib is None else mib << 20


def _setup(reward: str, files: Path, memory_bytes: int | None, timeout_s: float) -> Setup:
    folder = str(files.absolute())
    if memory_bytes is None:
        memory_bytes = memory_limit(None)
    if reward in BUILT_IN_REWARDS:
        return Setup(folder, reward, memory_bytes, timeout_s)
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
    return Setup(folder, reward, memory_bytes, timeout_s)
