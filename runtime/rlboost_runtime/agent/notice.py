"""Preemption notices: SIGTERM, or a file `notice.json` {"seconds": s} in the machine's working folder."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

NOTICE_FILE = "notice.json"
POLL_S = 0.2
"""How often the file is looked for: real notices leave 30 s and more."""
TERM_SECONDS = 30.0
"""What SIGTERM is taken to leave, for it says nothing: the shortest notice that a large cloud gives."""


@dataclass(frozen=True, slots=True)
class PreemptionNotice:
    """The machine will be taken in `seconds`."""

    seconds: float
    source: str


async def wait_for_notice(folder: Path, terminated: asyncio.Event) -> PreemptionNotice:
    """Return once the cloud warns us. `terminated` is set by SIGTERM."""
    while True:
        notice = read_notice(folder / NOTICE_FILE)
        if notice is not None:
            return notice
        try:
            async with asyncio.timeout(POLL_S):
                await terminated.wait()
        except TimeoutError:
            continue
        return PreemptionNotice(TERM_SECONDS, "SIGTERM")


def read_notice(path: Path) -> PreemptionNotice | None:
    """Return the notice in `path`; None where there is none, or none that can be read (yet)."""
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
