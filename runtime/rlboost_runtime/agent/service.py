"""The agent: one per engine, between it and the coordinator. Everything it holds may be lost.

`Agent.run` owns everything here through one task group: the connection (`link`), the engine and its version
(`engine_host`), what is not yet acknowledged (`outbox`), the heartbeat, and the watch for notices. It ends

- with 0 when the coordinator sends `Stop` or refuses it because the run ends, or after a preemption notice
  once everything is handed over,
- with 1 when the engine keeps dying, or the coordinator sent nothing for a quarter of an hour,
- with 3 when the coordinator refuses it for good.
"""

from __future__ import annotations

import array
import asyncio
import hashlib
import logging
import os
import secrets
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

import msgspec

from rlboost_runtime.agent.bootstrap import Bootstrap, ProcessAge, age_of_this_process
from rlboost_runtime.agent.engine_host import EngineHost, EngineKeepsDying, make_engine
from rlboost_runtime.agent.notice import PreemptionNotice, wait_for_notice
from rlboost_runtime.agent.outbox import Outbox
from rlboost_runtime.agent.weight_children import PeerServer, Puller
from rlboost_runtime.core.base.messages import LossCause, ReleaseReason
from rlboost_runtime.engines.base import Engine, EngineOutput, EngineSpec, Request, devices_of
from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.fit.gpus import ask_driver, require_gpus
from rlboost_runtime.logs import event
from rlboost_runtime.protocol.messages import (
    SCHEMA,
    AbortMessage,
    Ack,
    AgentCommand,
    AgentHello,
    AssignMessage,
    Goodbye,
    HeartbeatMessage,
    LoadVersionMessage,
    Message,
    NoticeReceivedMessage,
    PeerListening,
    Refused,
    SleepMessage,
    Stop,
    WakeMessage,
    Welcome,
    WorkItem,
    agent_command_decoder,
)
from rlboost_runtime.protocol.session import Conversation, CoordinatorSession, RunIsOver
from rlboost_runtime.protocol.transport import connect
from rlboost_runtime.run import in_memory
from rlboost_runtime.seams import Clock, SystemClock, Transport
from rlboost_runtime.weights.child_pipe import PullRequest, PullSource, SourceKind, TransferSettings

log = logging.getLogger(__name__)

SELF_DESTRUCT_S = 900.0
"""Silence of the coordinator after which an agent ends: a machine that nobody reaches should not wait."""
SEND_TIMEOUT_S = 10.0
"""A coordinator that reads nothing for this long is taken for gone."""
QUIET_S = 15.0
"""Silence after which the agent dials anew: a living coordinator answers every beat, a second apart."""
DEFAULT_FLUSH_S = 0.05
DEFAULT_BEAT_S = 1.0
RATE_WINDOW_BEATS = 5
QUIET_BEFORE_GOODBYE_S = 1.0
"""After a notice: with no request held and nothing unacknowledged for this long, all is handed over."""
NOTICE_RESERVE_S = 1.0
"""An agent under notice leaves this long before its machine does."""
GOODBYE_TIMEOUT_S = 1.0


class ExitCode(IntEnum):
    """How the agent's process ends."""

    DONE = 0
    FAILED = 1
    REFUSED = 3
    GPU_MISSING = 78
    """EX_CONFIG: a restart would not help."""


class _AgentEnd(Exception):
    """Ends the agent's task group."""

    def __init__(self, code: ExitCode) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True, slots=True)
class Seams:
    """The agent's connections to the outside world."""

    dial: Callable[[], Awaitable[Transport]]
    make_engine: Callable[[EngineSpec], Engine]
    puller: Puller
    clock: Clock
    peers: PeerServer | None = None
    """The server that peers of the zone pull from, if they do."""
    process_age: ProcessAge = field(default_factory=ProcessAge)
    devices: tuple[str, ...] = ()
    """The engine's GPUs (`engines.base.devices_of`)."""


class Agent:
    """One instance. `folder` is the machine's working folder."""

    def __init__(self, bootstrap: Bootstrap, instance: str, folder: Path, seams: Seams) -> None:
        self._bootstrap = bootstrap
        self._instance = instance
        self._folder = folder
        self._seams = seams
        self._clock = seams.clock
        self._process_id = secrets.token_hex(8)
        self._outbox = Outbox()
        self._host = EngineHost(self._make_engine, seams.puller.pull, self, self._clock)
        self._link = CoordinatorSession(
            seams.dial,
            Conversation(Welcome, agent_command_decoder, self.hello, self.welcomed, self.received),
            self._clock,
            send_timeout_s=SEND_TIMEOUT_S,
            quiet_s=QUIET_S,
        )
        self._epoch: int | None = None
        self._beat_s, self._flush_s = DEFAULT_BEAT_S, DEFAULT_FLUSH_S
        self._notice: PreemptionNotice | None = None
        self._listening: PeerListening | None = None
        self._owing = asyncio.Event()
        self._awaited: set[int] = set()
        """Assignments of requests from outside a step whose first token has not come."""
        self._room = asyncio.Event()
        self._room.set()
        self._over: asyncio.Queue[ExitCode] = asyncio.Queue()
        self._aborts: asyncio.Queue[tuple[int, ...] | None] = asyncio.Queue()  # None: everything
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self, terminated: asyncio.Event) -> ExitCode:
        """Work until the end; `terminated` is set by SIGTERM. Children have ended when this returns."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._end_on_stop())
                tasks.create_task(self._link.run())
                tasks.create_task(self._host.run())
                tasks.create_task(self._flush_frames())
                tasks.create_task(self._send_heartbeats())
                tasks.create_task(self._run_aborts())
                tasks.create_task(self._leave_on_notice(terminated))
                tasks.create_task(self._end_if_abandoned())
                tasks.create_task(self._serve_peers())
        except ExceptionGroup as group:
            return _exit_code(group)
        raise AssertionError("the agent's tasks run until one of them raises")

    # --- what the link calls -------------------------------------------------------------------------------

    def hello(self) -> AgentHello:
        """Return our introduction, with what we still hold."""
        engine = self._bootstrap.engine
        return AgentHello(
            schema=SCHEMA,
            run=self._bootstrap.run,
            instance=self._instance,
            machine=self._bootstrap.machine,
            pool=self._bootstrap.pool,
            max_running=engine.most_running(),
            kv_tokens=engine.most_running() * engine.max_context_tokens,
            engine=engine.kind,
            epoch=self._epoch,
            assignments=self._outbox.held,
            install_s=self._seams.process_age.install_s,
            age_s=round(self._seams.process_age.age_s(self._clock.now()), 3),
        )

    def welcomed(self, welcome: Welcome) -> list[Message]:
        """Take up a connection: resend what is owed, or drop everything if it is void."""
        self._epoch = welcome.epoch
        self._beat_s, self._flush_s = welcome.beat_s, welcome.flush_s
        self._seams.puller.weights_url = welcome.weights_url
        event(log, "agent.welcomed", epoch=welcome.epoch, resumed=welcome.resumed)
        repeated: list[Message] = []
        if welcome.resumed:
            repeated += self._host.facts
        else:
            self._outbox.void()
            self._awaited.clear()
            self._host.require_proof()
            self._aborts.put_nowait(None)
        self._check_room()
        if self._listening is not None:
            repeated.append(self._listening)
        if self._notice is not None:
            repeated.append(NoticeReceivedMessage(self._notice.seconds, self._notice.source))
        return [*self._outbox.unacked(), *repeated, *self._outbox.cut()]

    def received(self, command: AgentCommand) -> None:
        """Carry out one command; what takes time goes to a task of its own."""
        match command:
            case Ack(seq=seq):
                self._outbox.ack(seq)
                self._check_room()
            case AssignMessage(items=items):
                self._begin(items)
            case AbortMessage(assignments=assignments):
                self._aborts.put_nowait(assignments)
            case LoadVersionMessage(version=version):
                self._seams.puller.note_order(command, serves=self._host.served is not None)
                self._host.request_version(version)
            case SleepMessage():
                self._host.sleep()
            case WakeMessage():
                self._host.wake()
            case Stop(reason=reason):
                event(log, "agent.stopped", reason=reason)
                self._over.put_nowait(ExitCode.DONE)
            case Welcome() | Refused():
                event(log, "coordinator.confused", level=logging.WARNING, message=type(command).__name__)

    # --- what the engine host calls ------------------------------------------------------------------------

    def output(self, output: EngineOutput) -> None:
        """Send this to the coordinator soon; at once the endings that it waits for, and the first tokens that
        a client waits for."""
        self._outbox.add(output)
        self._owing.set()
        awaited = self._awaited.intersection(output.request_ids)
        self._awaited -= awaited.union(ended.request_id for ended in output.ended)
        if awaited or any(end.reason == "aborted" for end in output.ended):
            self._flush()
        if self._outbox.is_full:
            self._room.clear()

    async def room(self) -> None:
        """Return once the coordinator has acknowledged enough."""
        await self._room.wait()

    def engine_died(self, problem: str) -> None:
        """Hand back everything, with the tokens that came before."""
        for assignment in self._outbox.open:
            self._outbox.end(assignment, ReleaseReason.ENGINE_FAILED, problem)
        self._flush()

    def post(self, message: Message) -> None:
        """Send to the coordinator, if it is connected, after the tokens that came before."""
        self._flush()
        self._link.post(message)

    # --- tasks --------------------------------------------------------------------------------------------

    async def _end_on_stop(self) -> None:
        raise _AgentEnd(await self._over.get())

    async def _flush_frames(self) -> None:
        while True:
            await self._owing.wait()
            self._owing.clear()
            self._flush()
            await self._clock.sleep(self._flush_s)

    async def _send_heartbeats(self) -> None:
        generated = [0]
        while True:
            progress = self._host.progress()
            generated = [*generated[-RATE_WINDOW_BEATS:], progress.tokens_generated]
            seconds = self._beat_s * (len(generated) - 1)
            self._link.post(
                HeartbeatMessage(
                    engine_progress=progress.counter,
                    running=progress.running,
                    waiting=progress.waiting,
                    tokens_per_s=(generated[-1] - generated[0]) / seconds,
                    pulling=self._seams.puller.progress,
                    preempted=progress.preempted,
                    kv_free_tokens=progress.kv_free_tokens,
                )
            )
            await self._clock.sleep(self._beat_s)

    async def _run_aborts(self) -> None:
        while True:
            assignments = await self._aborts.get()
            if assignments is None:
                await self._host.abort_all()
            else:
                await self._host.abort(assignments)

    async def _leave_on_notice(self, terminated: asyncio.Event) -> None:
        """Report that the machine will go, hand over what is held, leave."""
        notice = self._notice = await wait_for_notice(self._folder, terminated, self._bootstrap.cloud)
        began = self._clock.now()
        event(log, "agent.noticed", seconds=notice.seconds, source=notice.source)
        self._link.post(NoticeReceivedMessage(notice.seconds, notice.source))
        self._flush()
        quiet_since = began
        while self._clock.now() < began + notice.seconds - NOTICE_RESERVE_S:
            if not (self._host.is_idle and self._outbox.is_clear):
                quiet_since = self._clock.now()
            if self._clock.now() >= quiet_since + QUIET_BEFORE_GOODBYE_S:
                break
            await self._clock.sleep(self._flush_s)
        self._flush()
        self._link.post(Goodbye(LossCause.NOTICED))
        await self._link.drain(GOODBYE_TIMEOUT_S)
        raise _AgentEnd(ExitCode.DONE)

    async def _serve_peers(self) -> None:
        if self._seams.peers is None:
            return
        async for listening in self._seams.peers.keep():
            self._listening = listening
            self._link.post(listening)

    async def _end_if_abandoned(self) -> None:
        while (left_s := self._link.last_received_at + SELF_DESTRUCT_S - self._clock.now()) > 0:
            await self._clock.sleep(left_s)
        event(log, "agent.abandoned", level=logging.ERROR, silent_s=SELF_DESTRUCT_S)
        raise _AgentEnd(ExitCode.FAILED)

    # --- helpers ------------------------------------------------------------------------------------------

    def _begin(self, items: tuple[WorkItem, ...]) -> None:
        requests = []
        for item in items:
            if item.policy_version != self._host.served:
                problem = f"asked for version {item.policy_version}, serving {self._host.served}"
                self._outbox.refuse(item.assignment, item.policy_version, problem)
                self._owing.set()
                continue
            self._outbox.begin(item.assignment, item.offset, item.policy_version)
            if item.sampling is not None:  # a request from outside a step
                self._awaited.add(item.assignment)
            requests.append(
                Request(
                    item.assignment,
                    _int32s(item.token_ids),
                    item.max_new_tokens,
                    priority=-item.offset,  # a response nearer to its end has a more valuable cache
                    sampling=item.sampling,
                )
            )
        if requests:
            self._host.submit(requests)

    def _flush(self) -> None:
        """Send what is not sent yet; without a connection it is kept until there is one."""
        if self._link.is_up:
            for frame in self._outbox.cut():
                self._link.post(frame)

    def _check_room(self) -> None:
        if not self._outbox.is_full:
            self._room.set()

    def _make_engine(self, start: int) -> Engine:
        settings = self._bootstrap.engine
        number = self._instance.rpartition("/")[2]
        ours = {
            "seed": own_seed(settings.seed, self._instance, self._process_id, start),
            "log": self._folder / f"engine-{number}.log",
            "side_file": self._folder / f"engine-{number}.tokens" if settings.count_tokens else None,
            "devices": self._seams.devices,
        }
        return self._seams.make_engine(EngineSpec(**msgspec.structs.asdict(settings) | ours))


def own_seed(seed: int, instance: str, process_id: str, start: int) -> int:
    """Return a seed unique in the run: equal ones would give siblings equal responses."""
    text = f"{seed}/{instance}/{process_id}/{start}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "big")


def system_seams(bootstrap: Bootstrap, instance: str, folder: Path) -> Seams:
    """Return the live network, engines, puller and clock. Raises `ConfigError` where too few GPUs are visible
    for its engines, `GpuMissing` where the machine has fewer than were paid for."""
    if promised := bootstrap.engine.promised_gpus * len(bootstrap.instances):
        driver = ask_driver()
        require_gpus(promised, driver.num_gpus, driver)
    url = bootstrap.coordinator_url.rstrip("/") + "/v1/agent"
    weights = _weights(folder, instance)
    in_memory.sweep(in_memory.roots(bootstrap.weights_in))
    in_memory.drop_dead_link(weights)
    weights.mkdir(parents=True, exist_ok=True)

    def dial() -> Awaitable[Transport]:
        return connect(url, bootstrap.token, bootstrap.certificate, timeout_s=DIAL_S)

    puller = Puller(pull_template(bootstrap, instance, folder), folder / f"puller-{weights.name}.log")
    peers = None
    if bootstrap.weight_peers:
        log_path = folder / f"peer-{weights.name}.log"
        peers = PeerServer(weights, bootstrap.coordinator_url, log_path)
    clock = SystemClock()
    devices = devices_of(
        bootstrap.instances.index(instance),
        len(bootstrap.instances),
        bootstrap.engine.tensor_parallel,
        os.environ,
    )
    return Seams(dial, make_engine, puller, clock, peers, age_of_this_process(clock), devices)


def pull_template(bootstrap: Bootstrap, instance: str, folder: Path) -> PullRequest:
    """Return what all pulls of an engine of this machine have in common."""
    bucket = bootstrap.weight_bucket
    others = (other for other in bootstrap.instances if other != instance)
    return PullRequest(
        url="",
        version=-1,
        folder=str(_weights(folder, instance)),
        token=bootstrap.token,
        certificate=bootstrap.certificate,
        streams=bootstrap.weight_streams,
        extra_sources=(PullSource("bucket", SourceKind.BUCKET, bucket),) if bucket else (),
        store=bootstrap.weight_store,
        keep_in=bootstrap.weights_in,
        siblings=tuple(str(_weights(folder, other)) for other in others),
        transfer=TransferSettings(bootstrap.weight_transfer),
        usd_per_gb=bootstrap.egress_usd_per_gb,
        usd_per_hour=bootstrap.price_usd_per_hour,
        receiver=instance,
    )


def _weights(folder: Path, instance: str) -> Path:
    """Return where an engine of this machine keeps its versions."""
    return folder / "weights" / instance.rpartition("/")[2]


DIAL_S = 8.0
"""Longest wait for TCP, TLS and WebSocket together."""


def _int32s(data: bytes) -> list[int]:
    values = array.array("i", data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def _exit_code(group: ExceptionGroup[Exception]) -> ExitCode:
    """Return how the process ends; raise what is not one of the expected ends."""
    reasons, others = group.split((_AgentEnd, ProtocolError, EngineKeepsDying))
    if others is not None:
        raise others
    assert reasons is not None
    match reasons.exceptions[0]:
        case _AgentEnd(code=code):
            return code
        case RunIsOver() as over:
            event(log, "agent.stopped", reason=over.problem)
            return ExitCode.DONE
        case ProtocolError() as refusal:
            event(log, "agent.refused", level=logging.ERROR, problem=refusal.problem)
            return ExitCode.REFUSED
        case reason:
            event(log, "agent.failed", level=logging.ERROR, problem=str(reason))
            return ExitCode.FAILED
