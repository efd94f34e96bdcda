"""The local cloud's machines on disk: one folder each, one lock, and the processes that a machine is.

A machine is every process whose environment carries both the run's and the machine's tag, whoever started it.
What is known about it lies in `cloud/machines/ID/machine.json`; the launcher, the market and a pending
reclaim change it only while they hold `cloud/lock`, so that a machine is reclaimed once and its end is
recorded once. Nothing depends on the process that launched it being alive.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import psutil

from rlboost_runtime.errors import ConfigError, ProviderError, RuntimeFault
from rlboost_runtime.processes import (
    ENGINE_SOCKET,
    identify,
    kill_tagged,
    process_start,
    room_for_tag,
    start_session,
    tagged,
    tagged_by_machine,
    tags,
)
from rlboost_runtime.run import in_memory
from rlboost_runtime.run.folder import RunFolder, locked, write_atomically, write_json

_MACHINE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

# What a machine inherits from its launcher: how to find programs and libraries, not what the launcher knows.
_INHERITED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TZ|TMPDIR|VIRTUAL_ENV|PYTHON\w+|LD_LIBRARY_PATH|DYLD_\w+"
    r"|\w+_NUM_THREADS|CUDA_\w+|NVIDIA_\w+|HF_\w+|TRANSFORMERS_\w+|TOKENIZERS_\w+|VLLM_\w+|RLBOOST_VLLM_PYTHON|RLBOOST_ENGINE"
)

_SECRETS = frozenset({"TOKEN", "KEY", "SECRET", "PASSWORD"})
"""Words in the names of variables that a machine does not inherit: it has its own token, in its bootstrap."""

_PRELOADED = "preloaded"
_LONGEST_SOCKET_PATH = 107  # bytes; Linux

_children: dict[
    int, subprocess.Popen[bytes]
] = {}  # of this process, to be reaped; whichever object began them


class Launched(msgspec.Struct, frozen=True):
    """The first process of one instance: its agent. `start`: `processes.process_start`."""

    instance: str
    pid: int
    start: float


class ReclaimRecord(msgspec.Struct, frozen=True):
    """The cloud takes the machine back. `by`: "market" or "person"; `number` counts the market's reclaims."""

    by: str
    at: float
    kill_at: float
    notice_s: float | None = None
    number: int | None = None


class LocalMachine(msgspec.Struct, frozen=True):
    """What is known of one machine. Times in seconds since the Unix epoch.

    `launched_at` None: intended, but the launch was not completed. `node`, `life` and `reclaim_at` are
    its market's (absent without one).
    """

    run: str
    machine: str
    zone: str
    instances: tuple[str, ...]
    intended_at: float
    launched_at: float | None = None
    processes: tuple[Launched, ...] = ()
    node: str | None = None
    life: int = 0
    reclaim_at: float | None = None
    reclaim_notice_s: float | None = None
    reclaim: ReclaimRecord | None = None
    ended_at: float | None = None
    detail: str = ""


class LocalMachines:
    """All local machines of one run. Methods that change something want `locked()` to be held."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self._ended: dict[str, LocalMachine] = {}  # these never change again

    def locked(self) -> contextlib.AbstractContextManager[bool]:
        """Hold the cloud's lock, against other threads and other processes; launches take some 10 ms."""
        return locked(self.run.cloud / "lock")

    def folder(self, machine: str) -> Path:
        """Return the machine's folder. Raises `ConfigError` for an id that is no plain name."""
        if not _MACHINE_ID.fullmatch(machine):
            raise ConfigError(
                f"machine id {machine!r} is no plain name", "use letters, digits, dots and dashes"
            )
        return self.run.cloud / "machines" / machine

    def logs(self, machine: str) -> Path:
        """Return the folder of the machine's logs."""
        return self.run.logs / "machines" / machine

    def read(self, machine: str) -> LocalMachine | None:
        """Return what is known of the machine, or None."""
        if machine in self._ended:
            return self._ended[machine]
        try:
            data = (self.folder(machine) / "machine.json").read_bytes()
        except FileNotFoundError:
            return None
        record = msgspec.json.decode(data, type=LocalMachine)
        if record.ended_at is not None:
            self._ended[machine] = record
        return record

    def all(self) -> list[LocalMachine]:
        """Return every machine that ever was, in the order of their intents."""
        with contextlib.suppress(FileNotFoundError):
            names = os.listdir(self.run.cloud / "machines")
            found = [self.read(name) for name in names]
            return sorted((r for r in found if r is not None), key=lambda r: (r.intended_at, r.machine))
        return []

    def write(self, record: LocalMachine) -> LocalMachine:
        """Replace the machine's record."""
        write_atomically(self.folder(record.machine) / "machine.json", msgspec.json.encode(record))
        return record

    def start(
        self, record: LocalMachine, commands: Mapping[str, list[str]], *, preload: bool = False
    ) -> tuple[Launched, ...]:
        """Start the machine's processes, one command per instance; all or, on `ProviderError`, none.

        `preload`: engines are forked from a process of the run that has everything imported.
        """
        folder, logs = self.folder(record.machine), self.logs(record.machine)
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        environment = {**inherited_environment(), **tags(self.run.path, machine=record.machine)}
        launched = []
        try:
            if preload and sys.platform == "linux":
                environment |= self._preloaded()
            for instance, command in commands.items():
                log = logs / f"agent-{instance.rpartition('/')[2]}.log"
                launched.append(Launched(instance, *start_detached(command, environment, folder, log)))
        except OSError as exc:
            self.kill(record.machine)
            raise ProviderError(
                f"cannot start {record.machine}: {exc}", "free some processes or memory"
            ) from exc
        return tuple(launched)

    def _preloaded(self) -> dict[str, str]:
        """Return how agents reach the process that forks engines; start it unless it lives."""
        path = self.run.cloud / "engine.sock"
        if len(os.fsencode(path)) > _LONGEST_SOCKET_PATH:
            return {}
        if not tagged(self.run.path, role=_PRELOADED):
            environment = {
                **inherited_environment(),
                **tags(self.run.path, role=_PRELOADED),
                **room_for_tag(),
            }
            command = [sys.executable, "-m", "rlboost_runtime.engines.transformers.preloaded", str(path)]
            start_detached(command, environment, self.run.cloud, self.run.logs / "preloaded.log")
        return {ENGINE_SOCKET: str(path)}

    def living(self) -> set[str]:
        """Return the machines of which a process lives."""
        reap()
        return set(tagged_by_machine(self.run.path))

    def lives(self, machine: str) -> bool:
        """Return True if a process of the machine lives."""
        reap()
        return bool(tagged(self.run.path, machine=machine))

    def kill(self, machine: str) -> bool:
        """SIGKILL every process of the machine; return whether there was one. Raises `ProviderError`."""
        try:
            return kill_tagged(self.run.path, machine=machine) > 0
        except RuntimeFault as exc:
            raise ProviderError(f"{machine} is still there: {exc.problem}", exc.remedy) from exc
        finally:
            reap()

    def end(self, record: LocalMachine, detail: str, at: float | None = None) -> LocalMachine:
        """Record that the machine is gone since `at` (default: now), unless that is recorded already.

        Its disk goes with it: weights, and the bootstrap with the run's token. Logs and token counts stay.
        """
        if record.ended_at is not None:
            return record
        ended_at = time.time() if at is None else at
        folder = self.folder(record.machine)
        (folder / "bootstrap.json").unlink(missing_ok=True)
        in_memory.free_below(folder / "weights")
        shutil.rmtree(folder / "weights", ignore_errors=True)
        return self.write(msgspec.structs.replace(record, ended_at=ended_at, detail=detail))

    def begin_reclaim(
        self, record: LocalMachine, by: str, notice_s: float | None, *, number: int | None = None
    ) -> LocalMachine:
        """Record that the machine is being taken back; `warn` and, when due, `finish_reclaim` follow."""
        now = time.time()
        reclaim = ReclaimRecord(by, now, now + (notice_s or 0.0), notice_s, number)
        return self.write(msgspec.structs.replace(record, reclaim=reclaim))

    def warn(self, record: LocalMachine, *, by_signal: bool) -> None:
        """Announce the reclaim: SIGTERM to the agents, or `notice.json` {"seconds"} in its folder."""
        assert record.reclaim is not None  # begun before it is announced
        seconds = record.reclaim.notice_s
        self._tell(record, "notice", seconds, record.reclaim.at)
        if not by_signal:
            write_json(self.folder(record.machine) / "notice.json", {"seconds": seconds})
            return
        for agent in record.processes:
            process = identify(agent.pid, agent.start, self.run.path)
            if process is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGTERM)

    def finish_reclaim(self, record: LocalMachine) -> LocalMachine:
        """SIGKILL the machine and record its end; a machine that left by itself before is only recorded."""
        at = time.time()
        if self.kill(record.machine):
            self._tell(record, "kill", None, at)
        return self.end(record, "reclaimed", at)

    def _tell(self, record: LocalMachine, kind: str, seconds: float | None, at: float | None = None) -> None:
        """Append to `market.jsonl` what the cloud did, for reports and tests."""
        assert record.reclaim is not None  # only reclaims are told
        line = {
            "at": time.time() if at is None else at,
            "machine": record.machine,
            "kind": kind,
            "seconds": seconds,
            "by": record.reclaim.by,
        }
        fd = os.open(self.run.cloud / "market.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(json.dumps(line).encode() + b"\n")


def inherited_environment() -> dict[str, str]:
    """Return what a new machine may know of this process's environment: nothing secret."""
    return {
        name: value
        for name, value in os.environ.items()
        if _INHERITED.fullmatch(name) and _SECRETS.isdisjoint(name.split("_"))
    }


def start_detached(
    command: list[str], environment: dict[str, str], cwd: Path, log: Path
) -> tuple[int, float]:
    """Start `command` so that it survives us, see `start_session`; return its pid and start time.

    It is reaped by `reap` as long as this process lives, by init afterwards. Raises `OSError`.
    """
    child = start_session(command, environment, cwd, log)
    start = process_start(child.pid)  # there, even if ended: not reaped yet
    _children[child.pid] = child
    return child.pid, start


def reap() -> None:
    """Collect ended children, so that none stays a zombie. Any thread may call it."""
    for pid, child in list(_children.items()):
        if child.poll() is not None:
            _children.pop(pid, None)
