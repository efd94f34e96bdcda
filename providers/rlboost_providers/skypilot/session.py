"""SkyPilot's child process as seen from ours: installed and started when it is first needed, then asked.

Guarantees: every `ask` ends by its deadline; a child that died, or whose output cannot be parsed, is started
again by the next `ask`, and whoever waited gets an error; a log line that cannot be handled is lost alone;
the child ends with us. SkyPilot keeps its own state, and its API server goes on without us. Nobody waits
longer than asked for an installation or the API server's start: `NotYet` is raised, and the work goes on for
the next caller.

SkyPilot's pins are narrow, so it has a venv of its own. `RLBOOST_SKYPILOT_PYTHON` names the Python of one
that has it; otherwise one is made in `$RLBOOST_HOME` at first use, from a locked list. Also here: the
machines that SkyPilot remembers, of any run of this home and of others, for `rlboost gc`.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rlboost_providers.base.provider import Owned
from rlboost_providers.base.tags import MACHINE, OWNER, RUN
from rlboost_providers.skypilot.errors import explained
from rlboost_runtime.errors import ConfigError, NotYet, ProviderError, RuntimeFault
from rlboost_runtime.logs import event
from rlboost_runtime.run.folder import home, locked, write_atomically
from rlboost_templates import shipped

log = logging.getLogger(__name__)

VARIABLE = "RLBOOST_SKYPILOT_PYTHON"
INSTALL_S = 900.0
_LOCK = "skypilot/lock.txt"
AWS_ROLE = "rlboost-worker"
"""The role (instance profile) of machines on AWS, unless the user's SkyPilot names another; docs/skypilot.md
says how to make one that may do nothing."""
CLOSE_S = 10.0
"""Longest end of the child."""
_CHILD = Path(__file__).with_name("child.py")
_RETRY = "see the end of its log, {log}; then try again"

Hear = Callable[[str], None]


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
        try:
            return self.begin(do, lambda line: None, **arguments).result(timeout_s)
        except FutureTimeout:
            raise ProviderError(
                f"SkyPilot did not answer `{do}` within {timeout_s:g} s", _RETRY.format(log=self.log)
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
                    [str(self._python), "-u", "-P", str(_CHILD)],  # -P: our modules' names hide none of its
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
            raise NotYet("SkyPilot is still starting", "wait; the request is retried") from None
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
            starting.set_exception(NotYet(f"SkyPilot has not started in {START_S:g} s", "it is retried"))
        except BaseException as problem:  # noqa: BLE001 whoever asks is told, whatever it is
            starting.set_exception(problem)
        else:
            starting.set_result(self._skypilot)


def _say(line: str) -> None:
    event(log, "skypilot.said", line=line)


STATUS_S = 120.0
DOWN_S = 300.0


class SkyPilotSweeper:
    """`CanSweep` of everything that SkyPilot's own memory has with our labels. `folder` holds its log."""

    def __init__(self, folder: Path, *, skypilot: SkyPilot | None = None) -> None:
        self._session = Session(folder, skypilot)

    def sweep(self) -> list[Owned]:
        """Return the clusters of ours. Raises `NotYet` while SkyPilot starts, and what it says."""
        rows = self._session.sky().ask("clusters", STATUS_S, names=None, force=False)
        return [_owned(row, row["labels"]) for row in rows if MACHINE in row.get("labels", {})]

    def end(self, owned: Owned) -> None:
        """Take down what `sweep` found; succeeds where it is gone."""
        self._session.sky().ask("down", DOWN_S, cluster=owned.handle, request="")

    def close(self) -> None:
        """End SkyPilot's child."""
        self._session.close()


def _owned(row: Mapping[str, Any], labels: Mapping[str, str]) -> Owned:
    owner, run = labels.get(OWNER, ""), labels.get(RUN, "")
    place = "/".join(str(row[key]) for key in ("cloud", "region", "zone") if row.get(key))
    return Owned(run, labels[MACHINE], "skypilot", place, owner, row.get("launched_at"), handle=row["name"])


# --- SkyPilot's own venv -----------------------------------------------------------------------------------


def skypilot_python(say: Callable[[str], None] = lambda text: None) -> Path:
    """Return the Python of SkyPilot's venv; makes the venv where there is none, which takes a minute or two.
    Raises `ConfigError` where the variable names no SkyPilot, `RuntimeFault` where it cannot be installed."""
    named = os.environ.get(VARIABLE)
    if named:
        if not (Path(named).parent / "sky").exists():
            raise ConfigError(
                f"{VARIABLE}={named}: no SkyPilot is installed there", "pip install skypilot there"
            )
        return Path(named)
    lock = shipped(_LOCK)
    folder = home() / f"skypilot-{hashlib.sha256(lock.encode()).hexdigest()[:12]}"
    python = folder / "bin" / "python"
    with locked(home() / ".skypilot.lock"):
        if not (folder / ".complete").exists():
            say("installing SkyPilot into a venv of its own (once)")
            _install(folder, lock)
    return python


def child_environment(folder: Path, python: Path) -> dict[str, str]:
    """Return what SkyPilot's child is started with; the configuration that it names is written by the child
    and lies over the user's own."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    configuration = folder / "skypilot.yaml"
    write_atomically(configuration, b"aws: {remote_identity: NO_UPLOAD}\n")
    return {
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "SKYPILOT_PROJECT_CONFIG": str(configuration),
        "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
    }


def _install(folder: Path, lock: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if uv is None:
        raise RuntimeFault("uv is missing, which makes SkyPilot's venv", "pip install 'rlboost[sky]'")
    listed = folder.with_suffix(".txt")
    write_atomically(listed, lock.encode())
    python = folder / "bin" / "python"
    _run([uv, "venv", "--quiet", "--python", "3.11", str(folder)])
    options = ["--quiet", "--compile-bytecode", "--python", str(python), "--requirement", str(listed)]
    _run([uv, "pip", "install", *options])
    (folder / ".complete").touch()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode:
        raise RuntimeFault(
            f"SkyPilot cannot be installed: {done.stderr.strip()[-800:]}", "correct that, then try again"
        )
