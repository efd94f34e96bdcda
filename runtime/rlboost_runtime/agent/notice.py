"""Preemption notices, from whoever gives one: SIGTERM, a file `notice.json` {"seconds": s} in the machine's
working folder, or the cloud's metadata service (`rlboost_providers.base.metadata`)."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from rlboost_providers.base.metadata import MetadataService
from rlboost_providers.base.traits import metadata_of
from rlboost_runtime.logs import event
from rlboost_runtime.protocol.messages import TIMELESS_NOTICE

log = logging.getLogger(__name__)

NOTICE_FILE = "notice.json"
POLL_S = 0.2
"""How often the file is looked for: real notices leave 30 s and more."""
ASK_EVERY_S = 1.0
"""Pause between two requests to the metadata service: the shortest notice is 30 s, and the service is on the
machine's host."""
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
        tasks.append(asyncio.create_task(wait_for_announcement(service)))
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(iter(done)).result()
    finally:
        for task in tasks:
            task.cancel()


async def _signalled(terminated: asyncio.Event) -> PreemptionNotice:
    await terminated.wait()
    return PreemptionNotice(TERM_SECONDS, TIMELESS_NOTICE)


async def _written(path: Path) -> PreemptionNotice:
    while (notice := read_notice(path)) is None:  # noqa: ASYNC110 a file gives no event
        await asyncio.sleep(POLL_S)
    return notice


async def wait_for_announcement(service: MetadataService, every_s: float = ASK_EVERY_S) -> PreemptionNotice:
    """Ask until something is announced. Logs once that the service stops answering, and once that it answers
    again: a service that does not answer, or answers nonsense, announces nothing and stops nothing."""
    is_silent = False
    while True:
        try:
            announced = await asyncio.to_thread(service.ask)
        except Exception as error:  # noqa: BLE001 - a foreign service's edge: its answer may be anything
            if not is_silent:
                event(log, "metadata.silent", problem=repr(error))
            is_silent = True
        else:
            if announced is not None:
                return PreemptionNotice(announced.seconds, announced.source)
            if is_silent:
                event(log, "metadata.answers")
            is_silent = False
        await asyncio.sleep(every_s)


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
