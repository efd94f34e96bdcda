"""The agents' side of the coordinator: registration, frames in, work out.

One `AgentLink` per open connection, one `AgentLinks` for all. Messages count only under the instance's
current epoch; a frame is acknowledged only once it is journalled; a connection whose peer stops reading is
closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from rlboost_runtime.coordinator.driver.core_driver import CoreDriver
from rlboost_runtime.coordinator.driver.ingest import GATHER_S, Ingest
from rlboost_runtime.coordinator.links.weights import WeightTracker
from rlboost_runtime.coordinator.observers.boot_times import BootTimes
from rlboost_runtime.core.base.messages import (
    Abort,
    Assign,
    Command,
    CoreConfig,
    Disconnected,
    Event,
    Evict,
    Heartbeat,
    InstanceJoined,
    InstanceLeft,
    InstanceReady,
    LoadVersion,
    LossCause,
    NoticeReceived,
    Pool,
    Reconnected,
    Sleep,
    Slept,
    VersionFetched,
    VersionRefused,
    Wake,
)
from rlboost_runtime.core.core import Core
from rlboost_runtime.deploy.bootstrap import instances_of
from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.logs import event as log_event
from rlboost_runtime.protocol import messages as wire
from rlboost_runtime.protocol.session import accept
from rlboost_runtime.run.head import url_seen_by
from rlboost_runtime.seams import Transport

log = logging.getLogger(__name__)

SEND_TIMEOUT_S = 10.0
"""A peer that reads nothing for so long is disconnected; its lease decides what becomes of it."""
ACK_AFTER_FRAMES = 8
"""Frames that one acknowledgement stands for while they come fast: each costs a message through TLS."""
ACK_AFTER_S = 0.2
"""A journalled frame is acknowledged after this long at the latest."""
TOKEN_COUNTS_EVERY_S = 5.0
"""Shortest time between two reports of an instance's token counts to the core: they steer balance only, and
fill the event log."""
TOKEN_COUNTS_S_PER_RESPONSE = 0.1
"""What each response that an instance holds adds to that time: a report costs in proportion."""


@dataclass(slots=True)
class LinkStats:
    """What status shows of an instance beyond what the core knows."""

    tokens_per_s: float = 0.0
    pull_s: float = 0.0
    apply_s: float = 0.0
    load_s: float = 0.0
    pause_s: float = 0.0
    start_s: dict[str, float] = field(default_factory=dict)
    counts_sent_at: float = -1e9
    kv_block_tokens: int = 0
    is_running_measured: bool = False
    beat: wire.HeartbeatMessage | None = None
    """The last heartbeat."""
    pulling: tuple[int, int, int] | None = None
    """As in the last heartbeat."""


UNANNOUNCED = (LossCause.RESET, LossCause.SILENT, LossCause.MACHINE_GONE, LossCause.HUNG)
"""Losses that take tokens with them."""


class InstanceStats:
    """The stats of all instances; forgets those that the core has lost."""

    def __init__(self, weights: WeightTracker, flush_s: float) -> None:
        self._weights = weights
        self._flush_s = flush_s
        self._of: dict[str, LinkStats] = {}
        self._num_lost = 0
        self.lost_estimate = 0
        """Tokens that lost instances had generated and not sent yet: their rate over one flush interval."""

    def get(self, instance: str) -> LinkStats | None:
        """Return the stats of an instance if there are any."""
        return self._of.get(instance)

    def of(self, instance: str) -> LinkStats:
        """Return the stats of an instance, new ones if need be."""
        return self._of.setdefault(instance, LinkStats())

    def reset(self, instance: str) -> None:
        """Start the stats of an instance anew."""
        self._of[instance] = LinkStats()

    def observe(self, event: Event, commands: Sequence[Command], core: Core) -> None:
        """Forget the instances that the core lost, and estimate what they had generated and not sent yet."""
        num_lost = sum(core.counters.losses[cause] for cause in UNANNOUNCED)
        gone = self._of.keys() - core.instances.keys() if num_lost or len(self._of) > 64 else ()
        for name in gone:
            stats = self._of.pop(name)
            self._weights.forget(name)
            if num_lost > self._num_lost:
                self.lost_estimate += round(stats.tokens_per_s * self._flush_s)
        self._num_lost = num_lost


class AgentLink:
    """One agent's open connection."""

    def __init__(self, hello: wire.AgentHello, epoch: int, transport: Transport) -> None:
        self.instance = hello.instance
        self.machine = hello.machine
        self.epoch = epoch
        self.closed = False
        self.failed = False
        """The peer broke the protocol."""
        self._transport = transport
        self._outgoing: deque[wire.Message] = deque()
        self._items: list[wire.WorkItem] = []
        self._aborts: list[int] = []
        self._ack = -1
        self._acked = -1
        self._has_sent = False
        self._ack_timer: asyncio.TimerHandle | None = None
        self._wake = asyncio.Event()

    def send(self, message: wire.Message) -> None:
        """Queue a message."""
        self._settle()
        self._outgoing.append(message)
        self._wake.set()

    def work(self, item: wire.WorkItem) -> None:
        """Queue work; items queued in one turn of the loop travel together."""
        if self._aborts:
            self._settle()
        self._items.append(item)
        self._wake.set()

    def abort(self, assignment: int) -> None:
        """Queue an abort; aborts queued in one turn of the loop travel together."""
        if self._items:
            self._settle()
        self._aborts.append(assignment)
        self._wake.set()

    def ack(self, seq: int) -> None:
        """Acknowledge all frames up to `seq`, soon; only the newest number travels."""
        self._ack = max(self._ack, seq)
        if self._ack - self._acked >= ACK_AFTER_FRAMES:
            self._wake.set()
        elif self._ack_timer is None:
            self._ack_timer = asyncio.get_running_loop().call_later(ACK_AFTER_S, self._wake.set)

    def answer(self) -> None:
        """Show the peer that we live: acknowledge again if nothing was sent since the last answer."""
        if not self._has_sent:
            self.send(wire.Ack(self._ack))
        self._has_sent = False

    async def write(self) -> None:
        """Send what is queued until cancelled. Raises `ConnectionError` or `TimeoutError`."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._settle()
            self._settle_ack()
            while self._outgoing:
                self._has_sent = True
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await self._transport.send(wire.encode(self._outgoing.popleft()))
            if self.closed:
                raise ConnectionError("closed by us")

    def fail(self, problem: ProtocolError) -> None:
        """Close the connection: the peer sent something that makes no sense."""
        log_event(log, "agent.protocol_error", instance=self.instance, problem=str(problem))
        self.failed = True
        self.close()

    def close(self) -> None:
        """Let the connection end once what is queued has been sent."""
        self.closed = True
        self._wake.set()

    def _settle_ack(self) -> None:
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None
        if self._ack > self._acked:
            self._acked = self._ack
            self._outgoing.appendleft(wire.Ack(self._ack))

    def _settle(self) -> None:
        if self._items:
            self._outgoing.append(wire.AssignMessage(tuple(self._items)))
            self._items = []
        if self._aborts:
            self._outgoing.append(wire.AbortMessage(tuple(self._aborts)))
            self._aborts = []


MAX_ENGINES = 64
"""Of one machine: what it registers beyond that is refused."""
FLUSH_S = 0.05
"""Between two frames of an agent."""
MAX_FRAMES_PER_S = 2_000
"""Of all agents: above that they flush less often. A frame costs some 70 us of the event loop."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The intervals that a `Welcome` gives to an agent, in seconds."""

    lease_s: float
    beat_s: float = 1.0
    flush_s: float = FLUSH_S

    @classmethod
    def of(cls, config: CoreConfig) -> Timing:
        """Return the intervals for a fleet of that size: a large one sends fewer, larger frames, as the
        coordinator's time goes by frames, not by tokens."""
        instances = config.max_spot_instances + config.reserved_instances
        return cls(config.lease_s, flush_s=max(FLUSH_S, instances / MAX_FRAMES_PER_S))


class AgentLinks:
    """All agents' connections."""

    def __init__(
        self,
        driver: CoreDriver,
        ingest: Ingest,
        weights: WeightTracker,
        boot_times: BootTimes,
        stats: InstanceStats,
        timing: Timing,
        reserved_machines: Container[str],
    ) -> None:
        """`stats` and `boot_times` must observe the core and the tokens respectively."""
        self._driver = driver
        self._timing = timing
        self._reserved = reserved_machines
        self.ingest = ingest
        self.weights = weights
        self.boot_times = boot_times
        self.stats = stats
        self.weights_endpoint: dict[str, str] = {}
        """Where weights are served (`run.head.endpoint`), once that is known."""
        self.links: dict[str, AgentLink] = {}
        self.stopping: str | None = None

    # --- commands out -------------------------------------------------------------------------------------

    def work(self, command: Assign, item: wire.WorkItem) -> None:
        """Send work to the instance."""
        link = self._link(command.instance, command.epoch)
        if link is not None:
            link.work(item)

    def carry_out(self, command: Abort | LoadVersion | Sleep | Wake | Evict) -> None:
        """Send a command to the instance; without a connection it is dropped."""
        link = self._link(command.instance, command.epoch)
        if link is None:
            return
        match command:
            case Abort(assignment=assignment):
                link.abort(assignment)
            case LoadVersion(version=version):
                self.boot_times.load_sent(link.machine, self._driver.now())
                link.send(self.weights.load(link.instance, link.machine, version))
            case Sleep():
                link.send(wire.SleepMessage())
            case Wake():
                link.send(wire.WakeMessage())
            case Evict(cause=cause):
                log_event(log, "instance.evicted", instance=command.instance, cause=str(cause))
                self._drop(link)

    def stop_all(self, reason: str) -> None:
        """Stop every agent, and refuse every later one."""
        self.stopping = reason
        for link in self.links.values():
            link.send(wire.Stop(reason))

    def _link(self, instance: str, epoch: int) -> AgentLink | None:
        link = self.links.get(instance)
        return link if link is not None and link.epoch == epoch and not link.closed else None

    def _drop(self, link: AgentLink) -> None:
        link.close()
        if self.links.get(link.instance) is link:
            del self.links[link.instance]

    # --- serving a connection -----------------------------------------------------------------------------

    async def serve(self, transport: Transport, machine: str | None = None) -> None:
        """Serve one connection until it ends. `machine`: whose agents its token is for; None: a connection
        within this process, which needed none."""
        run = self._driver.run.name

        def refusal_of(hello: wire.AgentHello) -> wire.Refused | None:
            if machine not in (None, hello.machine) or hello.instance not in _names(hello.machine):
                return wire.Refused(f"this token is not for instance {hello.instance} of {hello.machine}")
            return self._refusal(hello)

        hello = await accept(transport, wire.agent_message_decoder, wire.AgentHello, run, refusal_of)
        if hello is None:
            return
        link = self._register(hello, transport)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read(link, transport))
                tasks.create_task(link.write())
        except* (ConnectionError, TimeoutError) as group:
            log_event(log, "agent.disconnected", instance=link.instance, problem=repr(group.exceptions[0]))
        except* (ProtocolError, *wire.UNREADABLE) as group:
            link.fail(ProtocolError(str(group.exceptions[0]), "deploy the agent again"))
        finally:
            self.ingest.settle()
            if self.links.get(link.instance) is link:
                del self.links[link.instance]
                now = self._driver.now()
                if link.failed:  # resumed, it would send the same again
                    self._driver.apply(InstanceLeft(now, link.instance, link.epoch, LossCause.HUNG))
                else:
                    self._driver.apply(Disconnected(now, link.instance, link.epoch))

    def is_live(self, machine: str) -> bool:
        """Return True for a machine of the run that may still exist."""
        known = self._driver.core.machines.get(machine)
        return machine in self._reserved or (known is not None and known.is_alive)

    def _refusal(self, hello: wire.AgentHello) -> wire.Refused | None:
        if self.stopping is not None:
            return wire.Refused(f"the run is ending: {self.stopping}", is_run_over=True)
        if (hello.pool == Pool.RESERVED) != (hello.machine in self._reserved):
            return wire.Refused(f"machine {hello.machine} is not of pool {hello.pool}")
        if not self.is_live(hello.machine):
            return wire.Refused(f"machine {hello.machine} is not one of this run's, or was given up")
        return None

    def _register(self, hello: wire.AgentHello, transport: Transport) -> AgentLink:
        driver = self._driver
        known = driver.core.instances.get(hello.instance)
        former = self.links.pop(hello.instance, None)
        if former is not None:
            self._drop(former)
            driver.apply(Disconnected(driver.now(), hello.instance, former.epoch))
        resumed = known is not None and known.is_alive and known.epoch == hello.epoch
        epoch = known.epoch if resumed and known is not None else driver.totals.next_epoch
        link = AgentLink(hello, epoch, transport)
        self.links[hello.instance] = link
        link.send(
            wire.Welcome(
                epoch=epoch,
                resumed=resumed,
                lease_s=self._timing.lease_s,
                beat_s=self._timing.beat_s,
                flush_s=self._timing.flush_s,
                weights_url=self._weights_url(hello),
            )
        )
        if resumed:
            driver.apply(Reconnected(driver.now(), hello.instance, epoch, hello.assignments))
        else:
            self.stats.reset(hello.instance)
            at, pool = driver.now(), Pool(hello.pool)
            joined = InstanceJoined(
                at, hello.instance, hello.machine, pool, epoch, hello.max_running, hello.kv_tokens
            )
            driver.apply(joined)
            self.boot_times.joined(hello, at)
        log_event(log, "instance.joined", instance=hello.instance, epoch=epoch, resumed=resumed)
        return link

    def _weights_url(self, hello: wire.AgentHello) -> str:
        if not self.weights_endpoint:
            return ""
        return url_seen_by(hello.machine, self.weights_endpoint)

    async def _read(self, link: AgentLink, transport: Transport) -> None:
        while not link.closed:
            data = await transport.receive()
            if len(data) > wire.MAX_AGENT_MESSAGE_BYTES:
                raise ProtocolError(f"a message of {len(data)} bytes", "deploy the agent again")
            message = wire.agent_message_decoder.decode(data)
            if link.closed:
                break
            if isinstance(message, wire.Frame):
                self.ingest.take(link, message)
                while self.ingest.is_behind(link):  # noqa: ASYNC110 - rare, and a turn of 20 ms
                    await asyncio.sleep(GATHER_S)
                continue
            if isinstance(message, wire.HeartbeatMessage):
                self._on_beat(link, message)
                continue
            self.ingest.settle()  # the peer sent this after its frames
            match message:
                case wire.InstanceReadyMessage():
                    self._on_version_ready(link, message)
                case wire.VersionFetchedMessage(version=version):
                    self._driver.apply(VersionFetched(self._driver.now(), link.instance, link.epoch, version))
                case wire.VersionRefusedMessage(version=version, problem=problem):
                    log_event(log, "instance.version_refused", instance=link.instance, problem=problem)
                    self._driver.apply(
                        VersionRefused(self._driver.now(), link.instance, link.epoch, version, problem)
                    )
                case wire.PeerListening():
                    self.weights.listening(link.instance, link.machine, message)
                case wire.SleptMessage():
                    self._driver.apply(Slept(self._driver.now(), link.instance, link.epoch))
                case wire.NoticeReceivedMessage(seconds=seconds, source=source):
                    log_event(log, "instance.noticed", instance=link.instance, seconds=seconds, source=source)
                    is_assumed = source == wire.TIMELESS_NOTICE
                    self._driver.apply(
                        NoticeReceived(self._driver.now(), link.instance, link.epoch, seconds, is_assumed)
                    )
                case wire.Goodbye(reason=reason):
                    self._on_goodbye(link, reason)
                case wire.AgentHello():
                    raise ProtocolError("a second AgentHello on one connection", "deploy the agent again")
        raise ConnectionError("closed by us")

    def _on_beat(self, link: AgentLink, beat: wire.HeartbeatMessage) -> None:
        driver = self._driver
        stats = self.stats.of(link.instance)
        stats.tokens_per_s, stats.pulling, stats.beat = beat.tokens_per_s, beat.pulling, beat
        now = driver.now()
        counts: tuple[tuple[int, int], ...] = ()
        held = driver.core.responses_on(link.instance)
        pause_s = max(TOKEN_COUNTS_EVERY_S, TOKEN_COUNTS_S_PER_RESPONSE * len(held))
        if now - stats.counts_sent_at >= pause_s:
            stats.counts_sent_at = now
            counts = tuple((response, driver.length(response)) for response in held)
        driver.apply(Heartbeat(now, link.instance, link.epoch, beat.engine_progress, counts, beat.waiting))
        link.answer()

    def _on_version_ready(self, link: AgentLink, message: wire.InstanceReadyMessage) -> None:
        stats = self.stats.of(link.instance)
        stats.pull_s, stats.apply_s = message.pull_s, message.apply_s
        stats.load_s, stats.pause_s = message.load_s, message.pause_s
        stats.start_s = message.start_s or stats.start_s
        stats.kv_block_tokens = message.kv_block_tokens
        self.weights.ready(link.instance, link.machine, message)
        now = self._driver.now()
        self.boot_times.ready(link.instance, link.machine, message, now)
        stats.is_running_measured = message.max_running > 0
        kv = message.kv_tokens, message.kv_block_tokens, message.max_running
        self._driver.apply(InstanceReady(now, link.instance, link.epoch, message.version, *kv))

    def _on_goodbye(self, link: AgentLink, reason: str) -> None:
        log_event(log, "instance.left", instance=link.instance, reason=reason)
        cause = LossCause.NOTICED if reason == LossCause.NOTICED else LossCause.STOPPED
        self._drop(link)
        self._driver.apply(InstanceLeft(self._driver.now(), link.instance, link.epoch, cause))


def _names(machine: str) -> tuple[str, ...]:
    """Return the instances that a machine may register: so many that no machine has more GPUs."""
    return instances_of(machine, MAX_ENGINES)
