"""Preemption notices, from any source: SIGTERM, a file `notice.json` {"seconds": s} in the machine's
working folder, or the cloud's metadata service (`cloud_notices`)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from rlboost_runtime.agent.cloud_notices import Metadata, metadata_of, wait_for_announcement

NOTICE_FILE = "notice.json"
POLL_S = 0.2
"""How often the file is checked: real notices leave 30 s and more."""
TERM_SECONDS = 30.0
"""Assumed after SIGTERM, which gives no time: the shortest notice that a large cloud gives."""


@dataclass(frozen=True, slots=True)
class PreemptionNotice:
    """The machine will be taken in `seconds`."""

    seconds: float
    source: str


async def wait_for_notice(folder: Path, terminated: asyncio.Event, cloud: str = "") -> PreemptionNotice:
    """Return the first notice. `terminated` is set by SIGTERM; `cloud`: whose metadata service to watch, or
    empty."""
    service = metadata_of(cloud)
    tasks: list[asyncio.Task[PreemptionNotice]] = [
        asyncio.create_task(_signalled(terminated)),
        asyncio.create_task(_written(folder / NOTICE_FILE)),
    ]
    if service is not None:
        tasks.append(asyncio.create_task(_announced(service)))
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(iter(done)).result()
    finally:
        for task in tasks:
            task.cancel()


async def _signalled(terminated: asyncio.Event) -> PreemptionNotice:
    await terminated.wait()
    return PreemptionNotice(TERM_SECONDS, "SIGTERM")


async def _written(path: Path) -> PreemptionNotice:
    while (notice := read_notice(path)) is None:  # noqa: ASYNC110 a file gives no event
        await asyncio.sleep(POLL_S)
    return notice


async def _announced(service: Metadata) -> PreemptionNotice:
    announced = await wait_for_announcement(service)
    return PreemptionNotice(announced.seconds, announced.source)


def read_notice(path: Path) -> PreemptionNotice | None:
    """Return the notice in `path`; None if there is none, or it cannot be read (yet)."""
    try:
        seconds = float(json.loads(path.read_bytes())["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return PreemptionNotice(max(0.0, seconds), NOTICE_FILE)


def watch_sigterm(terminated: asyncio.Event) -> None:
    """Let a first SIGTERM set `terminated`; a second one ends this process at once."""

    def on_signal() -> None:
        if terminated.is_set():
            os._exit(128 + signal.SIGTERM)  # the children end with us
        terminated.set()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_signal)
