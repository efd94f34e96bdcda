"""The puller's child process, played: it fetches from the head's weight server, hangs, or dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random

import msgspec

from rlboost_runtime.weights.child_pipe import ChildFailure, PullProgress, PullReport, PullRequest

PULL_S = (0.05, 3.0)
VERSION_BYTES, LOOKS = 1000, 4


class _Child:
    """One pull under way."""

    def __init__(self) -> None:
        self.output = asyncio.StreamReader()
        self.hangs = self.is_over = False

    def die(self) -> None:
        """End without a word, as by SIGKILL."""
        self.say(None)

    def say(self, message: PullProgress | PullReport | ChildFailure | None) -> None:
        """Write a line; None: end."""
        if self.is_over:
            return
        if message is not None:
            self.output.feed_data(msgspec.json.encode(message) + b"\n")
        if not isinstance(message, PullProgress):
            self.is_over = True
            self.output.feed_eof()


class PlayedPulls:
    """All children. `is_served` says whether a version can be fetched now."""

    def __init__(self, random: Random, is_served: Callable[[int], bool]) -> None:
        self._random = random
        self._is_served = is_served
        self._children: list[_Child] = []

    def some(self) -> _Child | None:
        """Return a pull that is under way."""
        alive = [child for child in self._children if not (child.hangs or child.is_over)]
        return self._random.choice(alive) if alive else None

    @contextlib.asynccontextmanager
    async def child(
        self, command: tuple[str, ...], log_path: Path, request: PullRequest
    ) -> AsyncIterator[tuple[object, asyncio.StreamReader]]:
        """Take the place of `agent.weight_children._child`."""
        child = _Child()
        self._children = [each for each in self._children if not each.is_over] + [child]
        fetching = asyncio.get_running_loop().create_task(self._fetch(child, request.version))
        try:
            yield None, child.output
        finally:
            fetching.cancel()
            child.die()

    async def _fetch(self, child: _Child, version: int) -> None:
        seconds = self._random.uniform(*PULL_S)
        for look in range(LOOKS):
            if not self._is_served(version):
                child.say(ChildFailure(f"version {version} cannot be fetched: nobody serves it"))
                return
            child.say(PullProgress(VERSION_BYTES * look // LOOKS, VERSION_BYTES))
            await asyncio.sleep(seconds / LOOKS)
            while child.hangs:  # noqa: ASYNC110 - until the agent loses its patience
                await asyncio.sleep(1.0)
        child.say(
            PullReport(version, f"/played/{version}", "full", VERSION_BYTES, VERSION_BYTES, pull_s=seconds)
        )
