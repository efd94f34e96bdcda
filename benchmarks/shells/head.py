"""The head's machine: processes by number, as the real supervisor starts, adopts, watches and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from benchmarks.shells.loop import Process, VirtualLoop
from rlboost_providers.base import terminate
from rlboost_runtime.billing import books
from rlboost_runtime.job import Job
from rlboost_runtime.processes import ROLE_TAG
from rlboost_runtime.run.folder import RunFolder, restore_outcome
from rlboost_runtime.seams import Clock
from rlboost_runtime.supervisor import machines as fleet
from rlboost_runtime.supervisor import supervisor, watched
from rlboost_runtime.supervisor.machines import end_machines
from rlboost_runtime.supervisor.roles import roles_of

SUPERVISOR = "supervisor"
FIRST_PID = 300
"""After each boot numbers are given again."""
NOTICED_S = (0.5, 20.0)
"""Until somebody starts a supervisor that is gone."""
BOOT_S = (5.0, 20.0)
MOST_KILLS = 15
"""Of one role: the supervisor gives up after twenty in a row without progress, and is right."""

Program = Callable[[Process], Coroutine[Any, Any, int]]
"""What a process runs; returns its exit status."""


@dataclass
class _Entry:
    """A process of the head's table."""

    role: str
    process: Process
    start: float
    """Seconds since the boot."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    status: int = -int(signal.SIGKILL)


class Head:
    """See the module. `on_end(process, silently)` is told of each end, silently: with the machine's power;
    `on_broken` takes what a supervisor must never do."""

    def __init__(
        self,
        run: RunFolder,
        job: Job,
        clock: Clock,
        programs: Mapping[str, Program],
        on_end: Callable[[Process, bool], None],
        on_broken: Callable[[str], None],
        later: Callable[[Callable[[], None], tuple[float, float]], None],
    ) -> None:
        self._run, self._job, self._clock = run, job, clock
        self._programs = programs
        self._on_end, self._on_broken, self._later = on_end, on_broken, later
        self._table: dict[int, _Entry] = {}
        self._pids = itertools.count(FIRST_PID)
        self._booted_at = clock.now()
        self._num_kills: dict[str, int] = {}
        self._supervisor: Process | None = None
        self.has_power = True
        self.is_over = False
        """The run is over, and its supervisor has left."""
        self.num_boots = 1
        self.crash: BaseException | None = None

    # --- what there is ------------------------------------------------------------------------------------

    @property
    def processes(self) -> list[Process]:
        """All that live, the supervisor first."""
        alive = [] if self._supervisor is None else [self._supervisor]
        return [each for each in (*alive, *(e.process for e in self._table.values())) if each.is_alive]

    def process(self, role: str) -> Process | None:
        """Return the living process of a role."""
        return next((each for each in self.processes if each.name == role), None)

    # --- life and death -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the supervisor, unless one lives, as `rlboost launch` or the machine's boot does."""
        is_there = self._supervisor is not None and self._supervisor.is_alive
        if self.has_power and not is_there and not self.is_over:
            self._supervisor = process = Process(SUPERVISOR)
            process.start(self._supervise(process))

    async def _supervise(self, process: Process) -> None:
        try:
            restore_outcome(self._run)
            roles = roles_of(self._job, self._run)
            await supervisor.Supervisor(self._run, roles, lambda: end_machines(self._job, self._run)).serve()
        except Exception as problem:  # noqa: BLE001 - judged by whoever waits
            self.crash = problem
        process.kill()
        self.is_over = self._run.outcome.exists()
        if not self.is_over:
            self._later(self.start, NOTICED_S)

    def kill(self, role: str) -> bool:
        """SIGKILL the process of a role; return False where there is none, or there were too many."""
        process = self.process(role)
        if process is None or self.is_over or self._num_kills.get(role, 0) >= MOST_KILLS:
            return False
        self._num_kills[role] = self._num_kills.get(role, 0) + 1
        self._end(process, -int(signal.SIGKILL), silently=False)
        if role == SUPERVISOR:
            self._later(self.start, NOTICED_S)
        return True

    def cut_power(self) -> bool:
        """End everything at once; the machine boots later."""
        if not self.has_power or self.is_over:
            return False
        self.has_power = False
        for process in self.processes:
            self._end(process, -int(signal.SIGKILL), silently=True)
        self._later(self._boot, BOOT_S)
        return True

    def _boot(self) -> None:
        self.has_power = True
        self.num_boots += 1
        self._booted_at = self._clock.now()
        self._table.clear()
        self._pids = itertools.count(FIRST_PID)
        self.start()

    def _end(self, process: Process, status: int, *, silently: bool) -> None:
        process.kill()
        for entry in self._table.values():
            if entry.process is process:
                entry.status = status
                entry.ended.set()
        self._on_end(process, silently)

    async def _live(self, entry: _Entry, work: Coroutine[Any, Any, int]) -> None:
        status = await work
        self._end(entry.process, status, silently=False)

    # --- what the supervisor calls instead of the system --------------------------------------------------

    def _start_session(self, _: object, environment: Mapping[str, str], *__: Path) -> SimpleNamespace:
        role = environment[ROLE_TAG]
        if self.process(role) is not None:
            self._on_broken(f"a second {role} was started beside the first")
        pid = next(self._pids)
        process = Process(role)
        self._table[pid] = entry = _Entry(role, process, self._clock.now() - self._booted_at)
        process.start(self._live(entry, self._programs[role](process)))
        return SimpleNamespace(pid=pid)

    def _identify(self, pid: int, start: float, _: Path) -> SimpleNamespace | None:
        entry = self._table.get(pid)
        is_it = entry is not None and entry.process.is_alive and entry.start == start
        return SimpleNamespace(pid=pid) if is_it else None

    def _process_start(self, pid: int) -> float:
        return self._table[pid].start

    def _process_age(self, start: float) -> float:
        return self._clock.now() - self._booted_at - start

    def _kill_tagged(self, _: Path, *, role: str) -> int:
        left = self.process(role)
        if left is None:
            return 0
        self._on_broken(f"a supervisor killed a living {role}")
        self._end(left, -int(signal.SIGKILL), silently=False)
        return 1

    def _end_all(self, *_: object) -> list[int]:
        alive = [pid for pid, entry in self._table.items() if entry.process.is_alive]
        for pid in alive:
            self._end(self._table[pid].process, -int(signal.SIGTERM), silently=False)
        return alive

    async def _wait(self, process: watched.Watched) -> int | None:
        entry = self._table[process.pid]
        await entry.ended.wait()
        return None if process.child is None else entry.status

    @contextlib.contextmanager
    def played(self, provider: object, post_stop: Callable[..., bool], loop: VirtualLoop) -> Iterator[None]:
        """Put this machine into the place of the real one, and `provider` into that of the clouds."""
        head = self

        async def wait(process: watched.Watched) -> int | None:
            return await head._wait(process)

        clocks = SimpleNamespace(time=self._clock.wall, monotonic=self._clock.now, sleep=loop.pass_blocked)
        with contextlib.ExitStack() as stack:
            for where, name, stand_in in (
                (watched, "start_session", self._start_session),
                (watched, "identify", self._identify),
                (watched, "process_start", self._process_start),
                (watched, "process_age", self._process_age),
                (watched, "time", clocks),
                (watched.Watched, "wait", wait),
                (supervisor, "kill_tagged", self._kill_tagged),
                (supervisor, "end_all", self._end_all),
                (supervisor, "time", clocks),
                (supervisor, "_post_stop", post_stop),
                (fleet, "provider_for", lambda *_: provider),
                (terminate, "time", clocks),
                (terminate, "ThreadPoolExecutor", InlinePool),
                (books, "time", clocks),
            ):
                stack.enter_context(mock.patch.object(where, name, stand_in))
            yield


class InlinePool:
    """A pool of threads that does everything at once, on the thread that asks."""

    def __init__(self, _: int) -> None:
        pass

    def __enter__(self) -> InlinePool:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, act: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call it."""
        done: Future[Any] = Future()
        try:
            done.set_result(act(*arguments))
        except Exception as problem:  # noqa: BLE001 - it is the caller's
            done.set_exception(problem)
        return done
