"""Sends a run's notices to the webhooks and commands of its job, beside the supervisor's other work.

Guarantees:

- a notice goes to each target at most once, through a SIGKILL of coordinator or supervisor and a power cut:
  the record says "sending", durably, before the first byte leaves. One that a kill interrupts there is
  "unclear", is logged, and is not sent again: neither Slack nor a command can tell a repetition from news.
  Everything else is taken up again by the next supervisor;
- what was surely refused is tried again, `TRIES` times at most: no connection, an answer of 429 or 5xx, a
  command's exit status. An answer that does not come within `DEADLINE_S` is unclear, and final;
- nothing here delays or ends the run. The supervisor sends, so that the end of a run whose coordinator
  crashes is told, too; it looks at what the coordinator writes;
- no URL, and no value of a secret, is logged or kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import msgspec

from rlboost_runtime.job import Job
from rlboost_runtime.job.notify import VARIABLE, CommandTarget, NotifyTarget, WebhookTarget
from rlboost_runtime.logs import event
from rlboost_runtime.processes import untagged
from rlboost_runtime.protocol.status import Status, read_status
from rlboost_runtime.run.folder import RunFolder, read_json
from rlboost_runtime.supervisor.notices import Delivery, Notice, NoticeLog, NoticeRecord, RunView, due

log = logging.getLogger(__name__)

DEADLINE_S = 10.0
"""Longest time of one try."""
TRIES = 4
END_WAIT_S = 60.0
"""Longest time for which an ended run's supervisor waits for what is still to be sent."""


class NotAcceptedError(Exception):
    """The target has surely not taken the notice."""

    def __init__(self, problem: str, *, is_final: bool = False) -> None:
        super().__init__(problem)
        self.is_final = is_final
        """True if no further try would change that."""


class UnclearError(Exception):
    """Whether the target has taken the notice is not known."""


@dataclass(slots=True)
class Notifier:
    """Looks at one run and sends what is due."""

    run: RunFolder
    targets: Mapping[str, NotifyTarget]
    look_s: float = 1.0
    pause_s: float = 2.0
    """Before the second try; each further pause is four times as long."""
    deadline_s: float = DEADLINE_S
    log: NoticeLog = field(default_factory=NoticeLog)
    _since: float = field(default_factory=time.time)
    _sending: set[asyncio.Task[None]] = field(default_factory=set)
    _seen: dict[str, float] = field(default_factory=dict)

    def recall(self) -> None:
        """Go on with what a former supervisor left."""
        self.log = NoticeLog.read(self.run.notified)
        if not self.run.outcome.exists() and self.log.notices.pop("ended", None) is not None:
            self._keep()  # it was resumed: its next end is news
        self._seen = dict(self.log.seen)
        for key, notice in self.log.notices.items():
            for target, state in notice.targets.items():
                if state == "sending":
                    self._mark(key, target, "unclear")
                elif state == "waiting" and target in self.targets:
                    self._begin(key, target)

    async def serve(self) -> None:
        """Look and send until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(self.look_s)

    def look(self) -> None:
        """Begin to send what is due; never raises."""
        try:
            for notice in due(self._view(), self.log):
                self._add(notice)
            if self.log.seen != self._seen:
                self._seen = dict(self.log.seen)
                self._keep()
        except Exception:  # noqa: BLE001 - no mistake here is worth a run
            event(log, "notifications.look_failed", level=logging.ERROR, exc_info=True)

    async def finish(self) -> None:
        """Send what is left: within `END_WAIT_S` if the run has ended by itself, else what is on its way now.

        Returns at once where the run is resumed: the next supervisor goes on with the rest.
        """
        self.look()
        outcome = read_json(self.run.outcome)
        by_itself = outcome is not None and (outcome.get("state"), outcome.get("exit_code")) != ("stopped", 0)
        deadline = time.monotonic() + (END_WAIT_S if by_itself else self.deadline_s)
        while self._sending and time.monotonic() < deadline:
            if outcome is not None and not self.run.outcome.exists():
                break
            await asyncio.wait(self._sending, timeout=0.2)
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)

    def _view(self) -> RunView:
        wanted = read_json(self.run.wanted) or {}
        try:
            status = read_status(read_json(self.run.status) or {})
        except msgspec.ValidationError:
            status = Status()
        return RunView(
            self.run.name,
            time.time(),
            self._since,
            status,
            read_json(self.run.outcome),
            bool(wanted.get("train")),
        )

    def _add(self, notice: Notice) -> None:
        chosen = [name for name, target in self.targets.items() if notice.kind in target.on]
        self.log.notices[notice.key] = NoticeRecord(
            notice.kind, notice.text, time.time(), dict.fromkeys(chosen, "waiting")
        )
        self._keep()
        for target in chosen:
            self._begin(notice.key, target)

    def _begin(self, key: str, target: str) -> None:
        task = asyncio.create_task(self._deliver(key, target))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _deliver(self, key: str, target: str) -> None:
        notice = self.log.notices[key]
        while (tries := notice.tries.get(target, 0)) < TRIES:
            if tries:
                await asyncio.sleep(self.pause_s * 4 ** (tries - 1))
            notice.tries[target] = tries + 1
            self._mark(key, target, "sending")
            try:
                await _send(self.targets[target], notice, self.run, self.deadline_s)
            except NotAcceptedError as problem:
                self._mark(key, target, "failed" if problem.is_final else "waiting", str(problem))
                if problem.is_final:
                    return
            except UnclearError as problem:
                self._mark(key, target, "unclear", str(problem))
                return
            else:
                self._mark(key, target, "sent")
                return
        self._mark(key, target, "failed", f"given up after {TRIES} tries")

    def _mark(self, key: str, target: str, state: Delivery, problem: str = "") -> None:
        notice = self.log.notices[key]
        notice.targets[target] = state
        level = logging.INFO if state in ("sending", "sent") else logging.WARNING
        known = list(self.targets)
        place = known.index(target) if target in known else None
        event(
            log, f"notification.{state}", level=level, kind=notice.kind, target=place,
            tries=notice.tries.get(target, 0), problem=problem,
        )  # fmt: skip
        self._keep()

    def _keep(self) -> None:
        """Write the record; on a full disk the notice is sent all the same, and a restart may repeat it."""
        try:
            self.log.write(self.run.notified)
        except OSError as problem:
            event(log, "notifications.not_recorded", level=logging.WARNING, problem=str(problem))


@contextlib.asynccontextmanager
async def notifying(job: Job, run: RunFolder) -> AsyncIterator[None]:
    """Tell the job's targets what happens to the run; at the end, wait for what is still to be sent."""
    if not job.notify:
        yield
        return
    notifier = Notifier(run, {_identity(target): target for target in job.notify})
    notifier.recall()
    looking = asyncio.create_task(notifier.serve())
    try:
        yield
    finally:
        looking.cancel()
        await notifier.finish()


def _identity(target: NotifyTarget) -> str:
    """Return a name of the target that reveals nothing of its URL."""
    return hashlib.sha256(target.model_dump_json().encode()).hexdigest()[:12]


async def _send(target: NotifyTarget, notice: NoticeRecord, run: RunFolder, deadline_s: float) -> None:
    """Send once. Raises `NotAcceptedError` and `UnclearError`."""
    if isinstance(target, WebhookTarget):
        await _post(target, notice, deadline_s)
    else:
        await _call(target, notice, run, deadline_s)


async def _post(target: WebhookTarget, notice: NoticeRecord, deadline_s: float) -> None:
    import aiohttp

    url = VARIABLE.sub(lambda found: os.environ.get(found[1], ""), target.webhook)
    timeout = aiohttp.ClientTimeout(total=deadline_s, sock_connect=deadline_s / 2)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=True) as session,
            session.post(url, json={"text": slack_text(notice.text)}, allow_redirects=False) as answer,
        ):
            status = answer.status
    except aiohttp.InvalidURL:  # what these exceptions say has the URL: only their names are told
        raise NotAcceptedError("no valid URL", is_final=True) from None
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as problem:
        raise NotAcceptedError(type(problem).__name__) from None
    except (TimeoutError, aiohttp.ClientError, OSError) as problem:
        raise UnclearError(type(problem).__name__) from None
    if not 200 <= status < 300:
        raise NotAcceptedError(f"HTTP {status}", is_final=status != 429 and status < 500)


def slack_text(text: str) -> str:
    """Return `text` with the three signs escaped that have a meaning to Slack."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


async def _call(target: CommandTarget, notice: NoticeRecord, run: RunFolder, deadline_s: float) -> None:
    told = {"RLBOOST_NOTIFY_KIND": notice.kind, "RLBOOST_NOTIFY_TEXT": notice.text}
    try:
        process = await asyncio.create_subprocess_exec(
            *target.command,
            cwd=run.files if run.files.is_dir() else run.path,
            env=untagged(os.environ) | told,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
    except (OSError, ValueError) as problem:
        raise NotAcceptedError(f"cannot be started: {problem}", is_final=True) from None
    try:
        async with asyncio.timeout(deadline_s):
            await process.communicate(notice.text.encode())
    except TimeoutError:
        raise UnclearError(f"no end within {deadline_s:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise NotAcceptedError(f"exit status {process.returncode}")
