"""SkyPilot as its provider speaks with it: made, installed and started when it is first needed.

Guarantee: who asks waits so long at most for SkyPilot to be there, however long its installation or its API
server takes; until then `NotYet` is raised, and the work goes on for whoever asks next.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any, Protocol

from rlboost_providers.skypilot.environment import child_environment, skypilot_python
from rlboost_providers.skypilot.process import SkyPilotProcess
from rlboost_runtime.errors import NotYet
from rlboost_runtime.logs import event

log = logging.getLogger(__name__)

START_ANSWER_S = 20.0
"""How long a call waits for SkyPilot's API server, which takes seconds, or minutes on a busy machine."""
START_S = 240.0
"""Longest start of SkyPilot's API server; then it is tried anew."""


class SkyPilot(Protocol):
    """What the provider needs of `SkyPilotProcess`."""

    def ask(self, do: str, timeout_s: float, **arguments: object) -> Any:  # any JSON value
        """Return the answer, or raise what SkyPilot said."""

    def begin(self, do: str, hear: Callable[[str], None], **arguments: object) -> Future[Any]:
        """Send a request; `hear` is called with what SkyPilot says about it."""


class Session:
    """One SkyPilot for all threads of a provider; `folder` holds its log. `given`: instead of a child;
    `answer_s`: how long calls wait for it, START_ANSWER_S by default."""

    def __init__(self, folder: Path, given: SkyPilot | None = None, answer_s: float | None = None) -> None:
        self._folder = folder
        self._answer_s = START_ANSWER_S if answer_s is None else answer_s
        self._skypilot = given
        self._lock = threading.Lock()
        self._starting: Future[SkyPilot] | None = None

    def sky(self) -> SkyPilot:
        """Return SkyPilot with its API server up. Raises `NotYet`, and what keeps it from starting."""
        with self._lock:
            if self._starting is None:
                self._starting = Future()
                # a daemon: an installation that takes minutes is not to keep this process from ending
                threading.Thread(target=self._start, args=(self._starting,), daemon=True).start()
            starting = self._starting
        try:
            return starting.result(self._answer_s)
        except FutureTimeout:
            raise NotYet("SkyPilot is still starting", "wait; it is asked again") from None
        except BaseException:
            with self._lock:
                if self._starting is starting and starting.done():
                    self._starting = None  # the next call tries again
            raise

    def close(self) -> None:
        """End SkyPilot's child; machines and launches under way go on."""
        if isinstance(self._skypilot, SkyPilotProcess):
            self._skypilot.close()

    def _start(self, starting: Future[SkyPilot]) -> None:
        try:
            if self._skypilot is None:
                python = skypilot_python(_say)
                environment = child_environment(self._folder, python)
                self._skypilot = SkyPilotProcess(python, self._folder, environment)
            self._skypilot.begin("start", _say).result(START_S)
        except FutureTimeout:
            starting.set_exception(NotYet(f"SkyPilot has not started in {START_S:g} s", "it is tried again"))
        except BaseException as problem:  # noqa: BLE001 whoever asks is told, whatever it is
            starting.set_exception(problem)
        else:
            starting.set_result(self._skypilot)


def _say(line: str) -> None:
    event(log, "skypilot.said", line=line)
