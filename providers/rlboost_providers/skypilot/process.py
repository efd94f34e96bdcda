"""SkyPilot's child process, as seen from ours: requests out, answers and sayings back.

Guarantees: every `ask` ends by its deadline; a child that died, or that is not understood any more, is
started again by the next `ask`, and whoever waited is told; a saying that cannot be taken in is lost alone;
the child ends with us. SkyPilot keeps its own state, and its API server goes on
without us.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import subprocess
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import msgspec

from rlboost_providers.skypilot.errors import explained
from rlboost_runtime.errors import ProviderError
from rlboost_runtime.logs import event

log = logging.getLogger(__name__)

CLOSE_S = 10.0
"""Longest end of the child."""
_CHILD = Path(__file__).with_name("child.py")
_RETRY = "see the end of its log, {log}; then try again"

Hear = Callable[[str], None]


def _ignore(line: str) -> None:
    """Hear nothing."""


class SkyPilotProcess:
    """One child, shared by all threads of this process.

    `python` is that of SkyPilot's venv, `folder` holds the child's log and its configuration.
    """

    def __init__(self, python: Path, folder: Path, environment: Mapping[str, str]) -> None:
        self._python, self._folder, self._environment = python, folder, dict(environment)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._child: subprocess.Popen[bytes] | None = None
        self._waiting: dict[int, tuple[Future[Any], Hear]] = {}

    def ask(self, do: str, timeout_s: float, **arguments: object) -> Any:  # any JSON value
        """Return the answer. Raises what SkyPilot said as a `ProviderError`, also where it says nothing."""
        return self.wait(self.begin(do, _ignore, **arguments), timeout_s, do)

    def wait(self, answer: Future[Any], timeout_s: float, what: str) -> Any:  # any JSON value
        """Return what `begin` promised."""
        try:
            return answer.result(timeout_s)
        except FutureTimeout:
            raise ProviderError(
                f"SkyPilot did not answer `{what}` within {timeout_s:g} s", _RETRY.format(log=self.log)
            ) from None

    def begin(self, do: str, hear: Hear, **arguments: object) -> Future[Any]:
        """Send a request; `hear` is called with every line that SkyPilot says about it, in another thread."""
        answer: Future[Any] = Future()
        with self._lock:
            child = self._living()
            number = next(self._numbers)
            self._waiting[number] = (answer, hear)
            line = msgspec.json.encode({"id": number, "do": do, **arguments}) + b"\n"
            assert child.stdin is not None
            try:
                child.stdin.write(line)
                child.stdin.flush()
            except OSError:
                self._fail_all(child)
        return answer

    def close(self) -> None:
        """End the child; what it asked for goes on at the API server."""
        with self._lock:
            child, self._child = self._child, None
        if child is None or child.stdin is None:
            return
        child.stdin.close()
        try:
            child.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    @property
    def log(self) -> Path:
        """What SkyPilot prints."""
        return self._folder / "skypilot.log"

    def _living(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            if self._child is not None:
                self._fail_all(self._child)
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self.log.open("ab") as log:
                self._child = subprocess.Popen(
                    [
                        str(self._python),
                        "-u",
                        "-P",
                        str(_CHILD),
                    ],  # -P: our modules' names hide none of its own
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**os.environ, **self._environment},
                )
            # a daemon: it reads until the child ends, and the child ends with us
            threading.Thread(target=self._listen, args=(self._child,), daemon=True).start()
        return self._child

    def _listen(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        try:
            with child.stdout:
                for line in child.stdout:
                    self._hear(msgspec.json.decode(line))
        except Exception:  # noqa: BLE001 whatever it is, nobody would hear the child any more
            event(log, "skypilot.not_understood", level=logging.ERROR, exc_info=True)
        finally:
            child.kill()
            child.wait()
            with self._lock:
                self._fail_all(child)
                assert child.stdin is not None
                with contextlib.suppress(OSError):  # what it was still to be told
                    child.stdin.close()

    def _hear(self, line: dict[str, Any]) -> None:
        with self._lock:
            number = int(line["id"])
            waiting = self._waiting.get(number)
            if waiting is not None and "said" not in line:
                del self._waiting[number]
        if waiting is None:
            return
        answer, hear = waiting
        if "said" in line:
            try:
                hear(str(line["said"]))
            except Exception:  # noqa: BLE001 a full disk, say: the answer is to be heard all the same
                event(log, "skypilot.saying_lost", level=logging.WARNING, exc_info=True)
        elif "error" in line:
            answer.set_exception(explained(line["error"]["kind"], line["error"]["text"]))
        else:
            answer.set_result(line["ok"])

    def _fail_all(self, child: subprocess.Popen[bytes]) -> None:
        if self._child not in (child, None):
            return  # a newer one has its own requests
        waiting, self._waiting = self._waiting, {}
        for answer, _ in waiting.values():
            answer.set_exception(
                ProviderError("SkyPilot's process ended without an answer", _RETRY.format(log=self.log))
            )
