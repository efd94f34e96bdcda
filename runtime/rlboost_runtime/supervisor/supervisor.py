"""Keeps the processes of one run alive on the head: `python -m rlboost_runtime.supervisor RUN_FOLDER`.

Guarantees:

- one supervisor per run: a second one reports that and exits 0;
- every role of the run is one process, started again with growing pauses when it ends; a supervisor that
  takes over from a killed one adopts the living processes instead of starting second ones;
- whatever a role leaves behind (children in sessions of their own) is gone before it is started again;
- a role that no restart can help ends the run, with an outcome that states why;
- once it is decided how the run ends (`ending.json`), only the coordinator is started again, and no process
  changes that decision;
- once `outcome.json` exists, and also on SIGTERM (the run then stays open), no machine and no process of the
  run is left, and only then does the supervisor exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import os
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rlboost_providers.base.provider import MachineView
from rlboost_runtime.billing.books import close_books
from rlboost_runtime.errors import DISK_ERRNOS, RLBoostError, RuntimeFault
from rlboost_runtime.logs import Explanation, event, explain, last_explanation, last_line, setup
from rlboost_runtime.processes import end_all, kill_tagged, process_start
from rlboost_runtime.run import in_memory
from rlboost_runtime.run.create import kept
from rlboost_runtime.run.folder import (
    RunFolder,
    give_up_reserve,
    locked,
    read_json,
    reserve,
    restore_outcome,
    sweep_unfinished,
    write_json,
    write_outcome,
)
from rlboost_runtime.run.resolved import read_resolved
from rlboost_runtime.run.security import client_context, read_token, repair_secrets
from rlboost_runtime.supervisor.machines import end_machines, list_machines
from rlboost_runtime.supervisor.notify import notifying
from rlboost_runtime.supervisor.roles import Role, roles_of
from rlboost_runtime.supervisor.watched import (
    EX_CONFIG,
    EX_IOERR,
    EX_TEMPFAIL,
    Attempts,
    Tuning,
    Watched,
    adopt,
    start,
    write_identity,
)

log = logging.getLogger(__name__)


DEFAULT_TUNING = Tuning()
_MAX_LINE = 300  # characters of a log's last line that an outcome repeats


class Supervisor:
    """Runs `roles` until the run ends or `stop` is called."""

    def __init__(
        self,
        run: RunFolder,
        roles: Sequence[Role],
        end_machines: Callable[[], object],
        tuning: Tuning = DEFAULT_TUNING,
    ) -> None:
        self._run = run
        self._roles = roles
        self._end_machines = end_machines
        self._tuning = tuning
        self._stop = asyncio.Event()
        self._failed = False

    @property
    def has_unwritten_outcome(self) -> bool:
        """True if the run failed and its outcome could not be written."""
        return self._failed and not self._run.outcome.exists()

    def stop(self) -> None:
        """Take everything down; the run stays open."""
        self._stop.set()

    async def serve(self) -> None:
        """Keep the roles alive; returns once the run has ended or was stopped and nothing of it is left."""
        reserve(self._run)
        try:
            async with asyncio.TaskGroup() as group:
                keepers = [group.create_task(self._keep(role)) for role in self._roles]
                while not self._run.outcome.exists() and not self._stop.is_set():
                    in_memory.hold(self._run.weights)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._stop.wait(), self._tuning.look_s)
                for keeper in keepers:
                    keeper.cancel()
        finally:
            event(log, "teardown.started", ended=self._run.outcome.exists())
            await asyncio.to_thread(self._tear_down)

    # --- one role -----------------------------------------------------------------------------------------

    async def _keep(self, role: Role) -> None:
        """Keep one process of `role` alive."""
        attempts = Attempts(self._tuning, role.measures_progress, role.progress())
        process: Watched | int | None = adopt(role, self._run)
        if isinstance(process, Watched):
            event(log, "process.adopted", process=role.name, pid=process.pid)
        while True:
            if process is None:  # nothing to adopt, or ended
                process = await self._start(role)
            if process is None:
                return
            status, lived_s = await _end_of(process)
            event(log, "process.ended", process=role.name, status=status, lived_s=round(lived_s, 3))
            pause_s = attempts.ended(status, lived_s, role.progress())
            if self._is_over_for(role):
                return
            if attempts.is_hopeless(status):
                offset = process.log_offset if isinstance(process, Watched) else 0
                await self._fail(role, _why_hopeless(role, self._run, status, attempts, offset))
            process = None
            await asyncio.sleep(pause_s)

    def _is_over_for(self, role: Role) -> bool:
        """Return True if the run is ending and does not need `role` for that."""
        return role.name != "coordinator" and self._run.ending.exists()

    async def _start(self, role: Role) -> Watched | int | None:
        """Start `role` as soon as it may; what a former process of it left behind is ended first.

        If it could not be started, return the exit status that this amounts to; None: the run is ending.
        """
        while not role.may_start() and not self._is_over_for(role):  # noqa: ASYNC110 others' files
            await asyncio.sleep(self._tuning.look_s)
        if self._is_over_for(role):
            return None
        try:
            await asyncio.to_thread(kill_tagged, self._run.path, role=role.name)
            process = start(role, self._run)
        except (OSError, RLBoostError) as problem:
            event(log, "process.not_started", level=logging.ERROR, process=role.name, exc_info=True)
            wants_disk = isinstance(problem, OSError) and problem.errno in DISK_ERRNOS
            return EX_TEMPFAIL if wants_disk else 1
        event(log, "process.started", process=role.name, pid=process.pid)
        return process

    # --- failing ------------------------------------------------------------------------------------------

    async def _fail(self, role: Role, why: Explanation) -> None:
        """End the run as failed because of `role`: through the coordinator, or else without it.

        If even the outcome cannot be written, everything is ended all the same, and the run stays open.
        """
        if self._failed:
            return
        self._failed = True
        event(log, "run.failed", level=logging.ERROR, process=role.name, problem=why.problem)
        if role.name != "coordinator" and await asyncio.to_thread(ask_to_stop, self._run, *why):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._tuning.stop_timeout_s):
                    while not self._run.outcome.exists():  # noqa: ASYNC110 written by another process
                        await asyncio.sleep(self._tuning.look_s)
        if not self._run.outcome.exists() and not write_outcome(self._run, self._outcome(role, why)):
            self.stop()

    def _outcome(self, role: Role, why: Explanation) -> dict[str, object]:
        """Return how the run ended: as was decided, or else failed because `role` did."""
        decided: dict[str, object] | None = read_json(self._run.ending)
        if decided is None:
            return {"state": "failed", **why._asdict()}
        if decided["state"] == "budget":
            decided["state"] = "stopped"
        return decided | {"warning": why.problem} if role.name == "coordinator" else decided

    # --- the end ------------------------------------------------------------------------------------------

    def _tear_down(self) -> None:
        """End every machine and process of the run. Blocks for `grace_s` and a little more, and where a cloud
        does not answer for `base.terminate.PATIENCE_S`: machines that are not ended go on costing money."""
        self._try_to_end_machines()
        ended = end_all(self._run.path, self._tuning.grace_s)
        self._try_to_end_machines()  # one that the coordinator was launching when it was ended
        in_memory.free_run(self._run)
        if self._run.outcome.exists():
            self._close_books()
            give_up_reserve(self._run)
            self._report()
        for role in self._roles:
            role.identity(self._run).unlink(missing_ok=True)
        (self._run.processes / ".starting").unlink(missing_ok=True)
        event(log, "teardown.finished", processes=len(ended))

    def _try_to_end_machines(self) -> None:
        try:
            self._end_machines()
        except (RLBoostError, OSError) as error:
            event(log, "machines.end_failed", level=logging.ERROR, problem=str(error))

    def _close_books(self) -> None:
        """Close in the ledger what the coordinator had no time to close."""
        if not self._run.ledger.exists():
            return
        views: Sequence[MachineView] | None = None
        try:
            views = list_machines(read_resolved(self._run.job_json), self._run)
        except (RLBoostError, OSError, ValueError) as error:
            event(log, "machines.not_described", level=logging.ERROR, problem=str(error))
        try:
            close_books(self._run, views, "the run had ended")
        except (RLBoostError, OSError, sqlite3.Error) as error:
            event(log, "books.not_closed", level=logging.ERROR, problem=str(error))

    def _report(self) -> None:
        """Copy the report to the job's output, and record that all of it is safe there: a bought head then
        no longer waits to be fetched from. A failed copy keeps no run from ending."""
        try:
            job = read_resolved(self._run.job_json)
        except (RLBoostError, OSError, ValueError) as error:
            event(log, "report.no_job", level=logging.ERROR, problem=str(error))
            return
        if job.output is None:
            return
        from rlboost_runtime.backup.streamer import last_round
        from rlboost_runtime.trainer.artifacts.report import put_report

        if not last_round(self._run, job):
            return
        is_done = (read_json(self._run.outcome) or {}).get("state") == "done"  # its model has arrived then
        if put_report(self._run, job.output) and is_done and not job.output.startswith(("/", "file:")):
            with contextlib.suppress(OSError):
                write_json(self._run.safe, {"output": job.output})


async def _end_of(process: Watched | int) -> tuple[int | None, float]:
    """Wait for the end of a process; return its status and the seconds that it lived."""
    if not isinstance(process, Watched):
        return process, 0.0
    status = await process.wait()
    return status, time.monotonic() - process.began


def _why_hopeless(
    role: Role, run: RunFolder, status: int | None, attempts: Attempts, log_offset: int
) -> Explanation:
    """Return why the run fails with `role`: its own explanation, if its last process logged one."""
    path = role.log(run)
    if status in (EX_TEMPFAIL, EX_IOERR):
        free = shutil.disk_usage(run.path).free / 1e9
        return Explanation(
            f"the disk of {run.path} is full or fails: the {role.name} could not write for too long"
            f" ({free:.2f} GB free now)",
            f"make room there, then type rlboost launch {run.name} --resume: it continues from its"
            " last checkpoint",
        )
    if status == -signal.SIGKILL and not role.needs_memory:
        return Explanation(
            f"the {role.name} was killed {attempts.kills} times in a row without progress (SIGKILL); its log"
            f" is {path}",
            "check `dmesg` for a lack of memory, otherwise find out what kills it; then type"
            f" rlboost launch {run.name} --resume",
        )
    if status == -signal.SIGKILL:
        return Explanation(
            f"the {role.name} was killed {attempts.kills} times in a row without progress (SIGKILL, most"
            f" likely out of memory); its log is {path}",
            "free some memory, or lower algorithm.micro_batch_responses or rollout.engine_args.max_running,"
            f" then type rlboost launch {run.name} --resume",
        )
    explanation = last_explanation(path, log_offset)
    if explanation is not None:
        return explanation
    how = f"signal {-status}" if status is not None and status < 0 else f"exit status {status}"
    times = (
        "ended" if status == EX_CONFIG else f"ended {attempts.crashes} times in a row without progress, last"
    )
    line = last_line(path, log_offset)[:_MAX_LINE]
    return Explanation(
        f"the {role.name} {times} with {how}" + (f": {line}" if line else "") + f"; its log is {path}",
        f"see the end of that log for the cause, then type rlboost launch {run.name} --resume",
    )


def only_supervisor(run: RunFolder) -> contextlib.AbstractContextManager[bool]:
    """Hold the run's supervisor lock; True if this process got it."""
    return locked(run.processes / "supervisor.lock", waits=False)


async def serve(run: RunFolder) -> bool:
    """Supervise the run until it ends, or until SIGTERM or SIGINT.

    Returns False if it failed and the disk had no room for the outcome.
    """
    job = read_resolved(run.job_json)
    if freed := in_memory.sweep(in_memory.roots(job.weights.keep_in)):
        event(log, "memory.swept", num_bytes=freed)
    supervisor = Supervisor(run, roles_of(job, run), lambda: end_machines(job, run))
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, supervisor.stop)
    async with notifying(job, run):
        await supervisor.serve()
    return not supervisor.has_unwritten_outcome


def main() -> int:
    """Supervise the run in the folder given as the only argument; return the exit status."""
    setup("supervisor")
    run = RunFolder(Path(sys.argv[1]).absolute())
    try:
        return _supervise(run)
    except RLBoostError as error:
        explain(log, error)
        return EX_CONFIG if error.exit_code == 2 else 1
    except OSError as problem:
        if problem.errno not in DISK_ERRNOS:
            raise
        explain(log, RuntimeFault(f"the disk refuses: {problem}", f"make room for {run.path}"))
        return EX_TEMPFAIL


def _supervise(run: RunFolder) -> int:
    with only_supervisor(run) as alone:
        if not alone:
            print(f"run {run.name} has a supervisor already", file=sys.stderr)
            return 0
        identity = run.processes / "supervisor.json"
        write_identity(identity, os.getpid(), process_start(os.getpid()))
        sweep_unfinished(run)
        restore_outcome(run)
        repair_secrets(run)
        os.environ.update(kept(run))  # for the run's processes, which inherit it
        try:
            is_complete = asyncio.run(serve(run))
        finally:
            identity.unlink(missing_ok=True)
    return 0 if is_complete else EX_TEMPFAIL


_TIMEOUT_S = 5.0  # the coordinator is on this machine and only records the request


def ask_to_stop(run: RunFolder, problem: str, remedy: str, exit_code: int = 1) -> bool:
    """Ask the coordinator to end the run as failed; return True if it accepted. Blocks for seconds."""
    try:
        body = {"state": "failed", "problem": problem, "remedy": remedy, "exit_code": exit_code}
        return _post_stop(run, body)
    except (OSError, http.client.HTTPException, RLBoostError) as exc:
        event(log, "coordinator.unreachable", level=logging.WARNING, problem=repr(exc))
        return False


def _post_stop(run: RunFolder, body: dict[str, object]) -> bool:
    endpoint = read_json(run.endpoint)
    if endpoint is None:
        return False
    url = urlsplit(endpoint["url"])
    context = client_context(run.certificate.read_text())
    connection = http.client.HTTPSConnection(
        url.hostname or "127.0.0.1", url.port, timeout=_TIMEOUT_S, context=context
    )
    try:
        headers = {"Authorization": f"Bearer {read_token(run)}", "Content-Type": "application/json"}
        connection.request("POST", "/v1/stop", json.dumps(body), headers)
        return 200 <= connection.getresponse().status < 300
    finally:
        connection.close()
