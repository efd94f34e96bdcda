"""A trainer's conversation with the coordinator: ask for a step, take its groups as they finish, hold the GPU
lease.

Usable by any trainer, ours is `loop.py`::

    with StepStream.for_run(run) as stream:
        stream.attach(on_recall=move_everything_off_the_gpu)
        stream.publish(Published(0, digest, num_bytes, seconds))
        stream.request_step(0, 0, prompts, group_size=8, max_response_tokens=4096)
        while groups := stream.next_groups(min_responses=16):   # [] once all groups were returned
            stream.hold_lease()                                 # blocks while others have the GPU
            train(groups)
            stream.answer_recall()
        stream.trained(Trained(...))

Guarantees, while the coordinator may restart at any moment:

- training code stays synchronous: the connection lives in a thread of its own, started by `with` and ended by
  it;
- every group of the requested step is returned exactly once, in the order of first arrival;
- after a reconnect, what the coordinator may not know yet is said again, in order: the newest `Published`,
  the last `Trained` and `Checkpointed`, the current `StepRequest`, and how the run ended; all of these are
  idempotent there;
- `lease`: from `LeaseGranted` until `request_step` or until a recall is answered. A recall is answered by
  whichever blocking call the trainer is in, or by `answer_recall`: `on_recall` first (in the training
  thread), then `LeaseReleased`. A lost connection alone does not end the lease; the hello says that we hold
  it.

Waits are timed (`Waits`), those for groups separately with and without the lease: the first is what the
trainer loses for want of responses (t_train^wait of the paper's Algorithm 1).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import msgspec

from rlboost_runtime import security, transport
from rlboost_runtime.errors import ConfigError, ProtocolError, RLBoostError, RuntimeFault
from rlboost_runtime.logs import event
from rlboost_runtime.run_folder import RunFolder, read_json
from rlboost_runtime.seams import Transport
from rlboost_runtime.wire import (
    SCHEMA,
    Checkpointed,
    GroupDone,
    LeaseGranted,
    LeaseRecalled,
    LeaseReleased,
    Message,
    PromptSpec,
    Published,
    Refused,
    RunFailed,
    RunFinished,
    StepRequest,
    Trained,
    TrainerCommand,
    TrainerHello,
    TrainerWelcome,
    encode,
    trainer_command_decoder,
)

log = logging.getLogger(__name__)

DIAL_TIMEOUT_S = 10.0
HELLO_TIMEOUT_S = 10.0
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
CLOSE_TIMEOUT_S = 5.0


class Connect(Protocol):
    """`rlboost_runtime.transport.connect`, or a scripted one in tests."""

    def __call__(
        self, url: str, token: str, certificate_pem: str, *, timeout_s: float
    ) -> Awaitable[Transport]:
        """Open a connection."""


@dataclass(slots=True)
class Waits:
    """Seconds that the trainer waited since the last `request_step`."""

    with_lease_s: float = 0.0
    """For groups, while it held the GPU."""
    without_lease_s: float = 0.0
    """For groups, while others had the GPU."""
    for_lease_s: float = 0.0
    """For the GPU, with groups at hand."""

    def __add__(self, other: Waits) -> Waits:
        return Waits(
            self.with_lease_s + other.with_lease_s,
            self.without_lease_s + other.without_lease_s,
            self.for_lease_s + other.for_lease_s,
        )

    def __sub__(self, other: Waits) -> Waits:
        return Waits(
            self.with_lease_s - other.with_lease_s,
            self.without_lease_s - other.without_lease_s,
            self.for_lease_s - other.for_lease_s,
        )


class StepStream:
    """See the module. Public methods belong to one training thread; only the callbacks' threads are said
    otherwise."""

    def __init__(
        self,
        run: str,
        token: str,
        certificate_pem: str,
        url: Callable[[], str | None],
        *,
        connect: Connect = transport.connect,
    ) -> None:
        """`url` is asked before each dial for the coordinator's URL; None: not known yet."""
        self.waits = Waits()
        self._run = run
        self._token = token
        self._certificate = certificate_pem
        self._url = url
        self._connect = connect
        self._boot_id = secrets.token_hex(8)
        self._on_group: Callable[[GroupDone], None] | None = None
        self._on_recall: Callable[[], None] | None = None

        self._changed = threading.Condition()  # guards everything below
        self._groups: deque[GroupDone] = deque()
        self._seen: set[int] = set()
        self._num_returned = 0
        self._lease = False
        self._recalled = False
        self._problem: BaseException | None = None
        self._closing = False
        self._connected = False
        self._known_version: int | None = None
        self._outbox: deque[Message] = deque()
        self._num_unsent = 0
        self._published: Published | None = None
        self._trained: Trained | None = None
        self._checkpointed: Checkpointed | None = None
        self._request: StepRequest | None = None
        self._next_request: StepRequest | None = None  # its version is being published
        self._final: RunFinished | RunFailed | None = None

        self._loop = asyncio.new_event_loop()
        self._wake = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run_loop, name="step-stream")

    @classmethod
    def for_run(cls, run: RunFolder) -> StepStream:
        """Return the stream of a run on this machine: URL, token and certificate from its folder."""

        def url() -> str | None:
            endpoint = read_json(run.endpoint)
            return None if endpoint is None else f"{endpoint['url']}/v1/trainer"

        return cls(run.name, security.read_token(run), run.certificate.read_text(), url)

    def attach(
        self,
        *,
        on_group: Callable[[GroupDone], None] | None = None,
        on_recall: Callable[[], None] | None = None,
    ) -> None:
        """Set the callbacks; before the first `request_step`.

        `on_group` is called once per group as soon as it arrives, on the stream's own thread, and must be
        quick. `on_recall` is called on the training thread and returns once the GPU is free.
        """
        self._on_group, self._on_recall = on_group, on_recall

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- what the training thread says ---------------------------------------------------------------------

    def request_step(
        self,
        step: int,
        policy_version: int,
        prompts: Sequence[PromptSpec],
        *,
        group_size: int,
        max_response_tokens: int,
        stop_token_ids: Sequence[int] = (),
        keep_lease: bool = False,
        once_published: bool = False,
    ) -> None:
        """Ask for a step's groups and give the lease back: the GPU must be free when this is called.

        With `keep_lease` the lease stays ours, if it is ours, and the GPU need not be free: an earlier step
        is trained meanwhile, all of whose groups have arrived. A recall stays to be answered.

        With `once_published` the version may still be on its way into the store: all stays as it is until
        `publish` says that it is there.
        """
        request = StepRequest(
            step, policy_version, tuple(prompts), group_size, max_response_tokens, tuple(stop_token_ids),
            keep_lease,
        )  # fmt: skip
        with self._changed:
            self.waits = Waits()
            if once_published and not self._has_published(policy_version):
                self._next_request = request
            else:
                self._open(request)

    def _open(self, request: StepRequest) -> None:
        """Turn to another step. Holds the lock."""
        self._next_request = None
        self._lease = request.keeps_lease and self._lease
        self._recalled = self._recalled and self._lease
        self._request = msgspec.structs.replace(request, keeps_lease=self._lease)
        self._groups.clear()
        self._seen.clear()
        self._num_returned = 0
        self._say(self._request)

    def _has_published(self, version: int) -> bool:
        return self._published is not None and self._published.version >= version

    def publish(self, published: Published) -> None:
        """Say that a version lies complete in the store. From any thread."""
        with self._changed:
            self._published = published
            if self._known_version is None or self._known_version < published.version:
                self._say(published)
            waiting = self._next_request
            if waiting is not None and self._has_published(waiting.policy_version):
                self._open(waiting)

    def trained(self, trained: Trained) -> None:
        """Say that the step is trained and checkpointed."""
        with self._changed:
            self._trained = trained
            if self._request is not None and self._request.step <= trained.step:
                self._request = None
            self._say(trained)

    def checkpointed(self, step: int) -> None:
        """Say that a trained step's checkpoint is durable, where `trained` could not say so yet. From any
        thread."""
        with self._changed:
            self._checkpointed = Checkpointed(step)
            self._say(self._checkpointed)

    def finished(self, model_path: str, *, timeout_s: float = 60.0) -> bool:
        """Say that all steps are trained; return whether it could be said within `timeout_s`."""
        return self._end(RunFinished(model_path), timeout_s)

    def failed(self, problem: str, remedy: str, exit_code: int = 1, *, timeout_s: float = 10.0) -> bool:
        """Say that the run cannot go on; return whether it could be said within `timeout_s`."""
        return self._end(RunFailed(problem, remedy, exit_code), timeout_s)

    def _end(self, final: RunFinished | RunFailed, timeout_s: float) -> bool:
        with self._changed:
            self._final = final
            self._say(final)
            return self._changed.wait_for(
                lambda: self._problem is not None or (self._connected and self._num_unsent == 0), timeout_s
            ) and (self._problem is None)

    # --- what the training thread waits for ----------------------------------------------------------------

    @property
    def holds_lease(self) -> bool:
        """Whether the GPU is ours, recalled or not."""
        with self._changed:
            return self._lease

    def next_groups(self, min_responses: int = 1) -> list[GroupDone]:
        """Return everything that arrived, once that is at least `min_responses` or the rest of the step.

        Returns [] only when all groups of the step have been returned. Answers recalls meanwhile. Raises
        what ended the stream.
        """

        def enough() -> bool:
            arrived = sum(len(group.responses) for group in self._groups)
            return arrived >= min_responses or self._num_returned + len(self._groups) >= self._num_groups()

        self._wait(enough, for_lease=False)
        with self._changed:
            groups = list(self._groups)
            self._groups.clear()
            self._num_returned += len(groups)
        return groups

    def hold_lease(self) -> None:
        """Return once the GPU is ours and nobody asked for it back. Raises what ended the stream."""
        self._wait(lambda: self._lease, for_lease=True)

    def answer_recall(self) -> None:
        """Free the GPU if it was asked back; call between micro-batches. Never waits for the coordinator."""
        with self._changed:
            recalled = self._lease and self._recalled
        if not recalled:
            return
        if self._on_recall is not None:
            self._on_recall()
        with self._changed:
            if not (self._lease and self._recalled):
                return
            self._lease = self._recalled = False
            self._say(LeaseReleased())

    def _wait(self, done: Callable[[], bool], *, for_lease: bool) -> None:
        """Wait for `done` (asked under the lock), answering recalls first."""
        while True:
            self.answer_recall()
            with self._changed:
                self._raise_problem()
                if self._lease and self._recalled:
                    continue
                if done():
                    return
                started, lease = time.monotonic(), self._lease
                self._changed.wait()
                self._count(time.monotonic() - started, lease, for_lease)

    def _count(self, waited_s: float, lease: bool, for_lease: bool) -> None:
        if for_lease:
            self.waits.for_lease_s += waited_s
        elif lease:
            self.waits.with_lease_s += waited_s
        else:
            self.waits.without_lease_s += waited_s

    def _num_groups(self) -> int:
        return 0 if self._request is None else len(self._request.prompts)

    def _raise_problem(self) -> None:
        if isinstance(self._problem, RLBoostError):
            raise self._problem
        if self._problem is not None:
            raise RuntimeFault(f"the step stream broke: {self._problem!r}", "see the trainer's log") from (
                self._problem
            )
        if self._closing:
            raise RuntimeFault("the step stream is closed", "open a new one")

    # --- the connection's thread ---------------------------------------------------------------------------

    def close(self) -> None:
        """Say goodbye and end the thread; what was not sent yet gets `CLOSE_TIMEOUT_S`. Idempotent."""
        if not self._thread.is_alive():
            if not self._loop.is_closed():
                self._loop.close()
            return
        with self._changed:
            self._changed.wait_for(lambda: self._num_unsent == 0 or not self._connected, CLOSE_TIMEOUT_S)
            self._closing = True
            self._changed.notify_all()
        with contextlib.suppress(RuntimeError):  # the loop has just ended by itself
            self._loop.call_soon_threadsafe(self._stop)
        self._thread.join()

    def _stop(self) -> None:
        """End the connection's task: a connected one by itself, one that is still dialling at once."""
        self._wake.set()
        if self._serving is not None and not self._connected:
            self._serving.cancel()

    def _say(self, message: Message) -> None:
        """Queue a message if connected; otherwise the next connection begins with what matters. Holds the
        lock."""
        if not self._connected:
            return
        self._outbox.append(message)
        self._num_unsent += 1
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wake.set)

    def _run_loop(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except asyncio.CancelledError:
            assert self._closing
        except BaseException as exc:  # noqa: BLE001 - the thread's edge: told to whoever waits
            event(log, "stream.failed", level=logging.ERROR, exc_info=True)
            self._end_with(exc)

    def _end_with(self, problem: BaseException) -> None:
        with self._changed:
            self._problem = problem
            self._changed.notify_all()

    async def _serve(self) -> None:
        """Connect again and again until closed or told never to come back."""
        self._serving = asyncio.current_task()
        backoff_s = FIRST_BACKOFF_S
        while not self._closing:
            try:
                if await self._connect_once():
                    backoff_s = FIRST_BACKOFF_S
            except (ConfigError, ProtocolError) as exc:
                self._end_with(exc)
                return
            if not self._closing:
                await self._pause(backoff_s * (0.5 + random.random()))  # noqa: S311 - jitter
                backoff_s = min(MAX_BACKOFF_S, 2 * backoff_s)

    async def _pause(self, seconds: float) -> None:
        """Sleep, but no longer than until the stream is closed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._closing:
                    await self._wake.wait()
                    self._wake.clear()

    async def _connect_once(self) -> bool:
        """Hold one connection until it ends; whether it was welcomed."""
        url = self._url()
        if url is None:
            return False
        try:
            connection = await self._connect(url, self._token, self._certificate, timeout_s=DIAL_TIMEOUT_S)
        except ConnectionError:
            return False
        try:
            return await self._converse(connection)
        finally:
            await connection.close()

    async def _converse(self, connection: Transport) -> bool:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                await connection.send(
                    encode(TrainerHello(SCHEMA, self._run, self._boot_id, holds_lease=self.holds_lease))
                )
                answer = trainer_command_decoder.decode(await connection.receive())
        except (ConnectionError, TimeoutError, msgspec.DecodeError) as exc:
            event(log, "stream.not_welcomed", level=logging.WARNING, problem=repr(exc))
            return False
        if isinstance(answer, Refused):
            if answer.retry:
                return False
            raise ProtocolError(
                f"the coordinator refused us: {answer.problem}", "install one version of rlboost"
            )
        if not isinstance(answer, TrainerWelcome):
            event(log, "stream.not_welcomed", level=logging.WARNING, problem=type(answer).__name__)
            return False
        self._welcomed(answer)
        event(log, "stream.connected", published_version=answer.published_version)
        try:
            await self._until_closed(connection)
        finally:
            self._disconnected()
        return True

    async def _until_closed(self, connection: Transport) -> None:
        reading = asyncio.create_task(self._read(connection))
        writing = asyncio.create_task(self._write(connection))
        try:
            await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()
            writing.cancel()
            results = await asyncio.gather(reading, writing, return_exceptions=True)
        for result in results:
            if isinstance(result, ConnectionError | msgspec.DecodeError):
                event(log, "stream.disconnected", level=logging.WARNING, problem=repr(result))
            elif isinstance(result, Exception):
                raise result

    def _welcomed(self, welcome: TrainerWelcome) -> None:
        """Begin the connection with everything that the coordinator may not know."""
        with self._changed:
            known = self._known_version = welcome.published_version
            messages: list[Message] = []
            if self._published is not None and (known is None or known < self._published.version):
                messages.append(self._published)
            rest = (self._trained, self._checkpointed, self._request, self._final)
            messages += [message for message in rest if message is not None]
            self._outbox = deque(messages)
            self._num_unsent = len(messages)
            self._connected = True
            self._wake.set()
            self._changed.notify_all()

    def _disconnected(self) -> None:
        with self._changed:
            self._connected = False
            self._outbox.clear()
            self._num_unsent = 0
            self._changed.notify_all()

    async def _write(self, connection: Transport) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (message := self._next_message()) is not None:
                await connection.send(encode(message))
                with self._changed:
                    self._num_unsent -= 1
                    self._changed.notify_all()
            if self._closing:
                return

    def _next_message(self) -> Message | None:
        with self._changed:
            return self._outbox.popleft() if self._outbox else None

    async def _read(self, connection: Transport) -> None:
        while True:
            self._handle(trainer_command_decoder.decode(await connection.receive()))

    def _handle(self, command: TrainerCommand) -> None:
        match command:
            case GroupDone():
                self._on_group_done(command)
            case LeaseGranted(step=step):
                with self._changed:
                    if self._is_current(step):
                        self._lease, self._recalled = True, False
                        self._changed.notify_all()
            case LeaseRecalled(step=step):
                with self._changed:
                    if self._is_current(step) and self._lease:
                        self._recalled = True
                        self._changed.notify_all()
            case Refused(problem=problem):
                raise ProtocolError(f"the coordinator refused us: {problem}", "see the coordinator's log")
            case TrainerWelcome():
                raise ProtocolError("the coordinator welcomed us twice", "see the coordinator's log")

    def _on_group_done(self, group: GroupDone) -> None:
        with self._changed:
            if not self._is_current(group.step) or group.group in self._seen:
                return
            if not 0 <= group.group < self._num_groups():
                raise ProtocolError(
                    f"step {group.step} has no group {group.group}", "see the coordinator's log"
                )
            self._seen.add(group.group)
        if self._on_group is not None:
            self._on_group(group)
        with self._changed:
            if self._is_current(group.step):  # `request_step` may have come meanwhile
                self._groups.append(group)
                self._changed.notify_all()

    def _is_current(self, step: int) -> bool:
        """Whether the coordinator speaks of the step that we asked for; it then has all that came before."""
        if self._request is None or self._request.step != step:
            return False
        if self._trained is not None and self._trained.step < step:
            self._trained = None
        return True
