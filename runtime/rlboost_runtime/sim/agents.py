"""The agent beside each simulated engine: executes the core's commands as a live one does.

It generates what it is assigned, releases what it is asked to, fetches versions over the shared link and
proves them once its engine holds no work, sleeps and wakes. A killed one reports nothing more; what it had
generated in the last moment had not reached the coordinator.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from rlboost_runtime.core.base.messages import (
    Abort,
    Assign,
    Command,
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
    Released,
    ReleaseReason,
    Sleep,
    Slept,
    VersionFetched,
    Wake,
)
from rlboost_runtime.sim.clock import Agenda, SharedLink, SimTransfer
from rlboost_runtime.sim.engine_model import EngineModel, EngineSpeed, Sequence
from rlboost_runtime.sim.responses import ResponseStore
from rlboost_runtime.sim.result import Activity

BEAT_S = 10.0
"""Seconds between two heartbeats with token counts. Live agents send more; the counts only steer
bookings."""
FLUSH_S = 0.05
"""Tokens of so long are lost when an agent is killed: it sends a frame at most every 50 ms."""


class Host(Protocol):
    """What an agent needs of the world."""

    agenda: Agenda
    link: SharedLink
    responses: ResponseStore

    def send(self, event: Event) -> None:
        """Send the core an event."""

    def queued_at_core(self, instance: str) -> int:
        """Return how many of the instance's assignments the core takes for queued."""

    def will_settle(self, agent: SimAgent) -> None:
        """Have `agent.settle` called once everything of this moment has happened."""

    def finished(self, response: int) -> None:
        """A response is complete."""

    def generated(self, tokens: int) -> None:
        """An engine has generated more tokens."""

    def pulled(self, machine: str, version: int, num_bytes: float) -> None:
        """An instance has a version, which weighs so much; to a machine it travels once."""

    def activity(self, agent: SimAgent, what: Activity) -> None:
        """The agent does something else now: boot, pull, rollout, idle."""


@dataclass(frozen=True, slots=True)
class AgentCosts:
    """Seconds and bytes of what is not decoding."""

    weight_bytes: float
    """On the wire; 0: the weights are on the machine (reserved engines)."""
    link_bytes_per_s: float
    apply_s: float
    sleep_s: float
    wake_s: float
    frozen_bytes: float = 0.0
    """What the first version brings besides."""


class SimAgent:
    """One instance's agent and engine."""

    def __init__(
        self,
        host: Host,
        instance: str,
        machine: str,
        pool: Pool,
        epoch: int,
        speed: EngineSpeed,
        costs: AgentCosts,
    ) -> None:
        self.instance = instance
        self.machine = machine
        self.pool = pool
        self.epoch = epoch
        self.engine = EngineModel(speed, host.agenda.now)
        self.is_dead = False
        self.is_loading = True
        """It has not proved the newest version that it was ordered to load."""
        self.version: int | None = None
        """The version that it proved and serves."""
        self.tokens_lost = 0
        self.is_cut = False
        """Its connection is gone: no command reaches it, and its events wait."""
        self._is_hung = False
        self._outbox: list[Event] = []
        self._host = host
        self.costs = costs
        self._is_awake = True
        self._is_new = True
        self._is_noticed = False
        self._ordered: int | None = None
        self._fetched: int | None = None
        self._transfer: SimTransfer | None = None
        self._life = 0
        """Grows with every order about sleep or weights: what an older one had planned is void."""
        self._is_applying = False
        self._planned: float | None = None

    # --- life ---------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Dial in and begin to beat."""
        now, speed = self._host.agenda.now, self.engine.speed
        self._report(
            InstanceJoined(
                now, self.instance, self.machine, self.pool, self.epoch, speed.max_running, speed.kv_tokens
            )
        )
        self._beat()

    def kill(self) -> None:
        """End without an event; tokens that were not sent yet are lost."""
        if self.is_dead:
            return
        self._advance()
        self.is_dead = True
        self._stop_transfer()
        unsent = int(FLUSH_S / self.engine.step_s()) if self.engine.num_running else 0
        for sequence in self.engine.sequences.values():
            tokens = self.engine.tokens_of(sequence)
            kept = max(sequence.received, tokens - unsent)
            self.tokens_lost += tokens - kept
            self._host.responses.tokens[sequence.response] = kept

    def notice(self, seconds: float) -> None:
        """The cloud announces that it takes the machine."""
        if not self.is_dead:
            self._is_noticed = True
            self._report(NoticeReceived(self._host.agenda.now, self.instance, self.epoch, seconds))
            self._host.will_settle(self)

    def execute(self, command: Command) -> None:
        """Carry out a command of the core."""
        if self.is_dead or (self.is_cut and not isinstance(command, Evict)):
            return
        match command:
            case Assign():
                self._begin(command)
            case Abort(assignment=assignment):
                self._release(assignment)
            case LoadVersion(version=version):
                self._load(version)
            case Sleep():
                self._sleep()
            case Wake():
                self._wake()
            case Evict():
                self.is_dead = True
                self._stop_transfer()
            case _:
                raise AssertionError(f"not for an agent: {command}")

    # --- faults -------------------------------------------------------------------------------------------

    def reset(self, back_after_s: float, *, reports: bool = True) -> None:
        """The connection breaks and is back after a while, if the core still waits for it then.

        `reports`: the core gets an event; not if the core itself was away.
        """
        if self.is_dead or self.is_cut:
            return
        if reports:
            self._report(Disconnected(self._host.agenda.now, self.instance, self.epoch))
        self.is_cut = True
        self._host.agenda.after(back_after_s, self._reconnect)

    def fall_silent(self) -> None:
        """Its connection hangs: nothing passes any more."""
        self.is_cut = True

    def hang(self) -> None:
        """The engine stops; the agent goes on beating."""
        self._advance()
        self._is_hung = True

    def crash_engine(self) -> None:
        """The engine dies with its KV cache and is there again at once."""
        self._advance()
        for assignment in list(self.engine.sequences):
            self._release(assignment, ReleaseReason.ENGINE_FAILED)

    def _reconnect(self) -> None:
        if self.is_dead:
            return
        self.is_cut = False
        self._report(
            Reconnected(self._host.agenda.now, self.instance, self.epoch, tuple(self.engine.sequences))
        )
        outbox, self._outbox = self._outbox, []
        for event in outbox:
            self._report(replace(event, at=self._host.agenda.now))
        self._host.will_settle(self)

    def _report(self, event: Event) -> None:
        if self.is_cut:
            self._outbox.append(event)
        else:
            self._host.send(event)

    # --- generating ---------------------------------------------------------------------------------------

    def _begin(self, command: Assign) -> None:
        self._advance()
        store, response = self._host.responses, command.response
        tokens = store.begin(response, command.keep_tokens)
        sequence = Sequence(
            key=command.assignment,
            response=response,
            prompt=store.prompt_of(response),
            tokens=tokens,
            received=tokens,
            goal=store.goal_of(response),
            session=store.session_of(response),
        )
        self.engine.submit(sequence)
        self._host.will_settle(self)

    def _release(self, assignment: int, reason: ReleaseReason = ReleaseReason.ABORTED) -> None:
        self._advance()
        sequence = self.engine.sequences.get(assignment)
        if sequence is None:
            return  # it has just ended, which is reported
        tokens = self.engine.abort(assignment)
        self._host.responses.tokens[sequence.response] = tokens
        now = self._host.agenda.now
        self._report(Released(now, self.instance, assignment, tokens, reason))
        self._host.will_settle(self)

    def _advance(self) -> None:
        if self.is_cut or self._is_hung:
            return
        before = self.engine.generated
        for sequence in self.engine.advance(self._host.agenda.now):
            self._host.finished(sequence.response)
            self._host.will_settle(self)
        if self.engine.generated != before:
            self._host.generated(self.engine.generated - before)

    def settle(self) -> None:
        """Everything of this moment has happened: admit, report the queue, plan the next look."""
        if self.is_dead or self.is_cut or self._is_hung:
            return
        self._advance()
        now, engine = self._host.agenda.now, self.engine
        if engine.num_waiting != self._host.queued_at_core(self.instance):
            self._report(self._short_beat())
        if not engine.sequences:
            if self._is_noticed:
                self._sign_off()
                return
            self._apply_if_fetched()
        if not self.is_loading:
            self._host.activity(self, "rollout" if engine.num_running else "idle")
        change = engine.next_change()
        if change is not None and change != self._planned:
            self._planned = change
            self._host.agenda.at(max(change, now), lambda: self._look(change))

    def _look(self, planned: float) -> None:
        if not self.is_dead and planned == self._planned:
            self._planned = None
            self._advance()
            self._host.will_settle(self)

    def _beat(self) -> None:
        if self.is_dead:
            return
        self._host.agenda.after(BEAT_S, self._beat)
        if self.is_cut:
            return
        self._advance()
        now, engine = self._host.agenda.now, self.engine
        tokens = tuple(engine.running_tokens())
        progress = 0 if self._is_hung else round(now * 1e3)
        self._report(Heartbeat(now, self.instance, self.epoch, progress, tokens, engine.num_waiting))

    def _short_beat(self) -> Heartbeat:
        now = self._host.agenda.now
        return Heartbeat(now, self.instance, self.epoch, round(now * 1e3), (), self.engine.num_waiting)

    def _sign_off(self) -> None:
        self.is_dead = True
        self._stop_transfer()
        self._report(InstanceLeft(self._host.agenda.now, self.instance, self.epoch, LossCause.NOTICED))

    # --- weights and memory -------------------------------------------------------------------------------

    def _load(self, version: int) -> None:
        self._stop_transfer()
        self._ordered = version
        self.is_loading = True
        if not self.costs.weight_bytes:
            self._has_fetched(version)
            return
        if not self.engine.sequences:
            self._host.activity(self, "pull")
        self._transfer = self._host.link.start(
            self._wire_bytes(), self.costs.link_bytes_per_s, lambda: self._fetch_done(version)
        )

    def _wire_bytes(self) -> float:
        return self.costs.weight_bytes + (self.costs.frozen_bytes if self._fetched is None else 0.0)

    def _fetch_done(self, version: int) -> None:
        wire_bytes = self._wire_bytes()
        self._transfer = None
        self._host.pulled(self.machine, version, wire_bytes)
        self._has_fetched(version)

    def _has_fetched(self, version: int) -> None:
        self._fetched = version
        self._report(VersionFetched(self._host.agenda.now, self.instance, self.epoch, version))
        self._host.will_settle(self)

    def _apply_if_fetched(self) -> None:
        """Apply a fetched version; a waking engine applies it by itself."""
        has_news = self.is_loading and self._ordered is not None and self._fetched == self._ordered
        if has_news and self._is_awake and not self._is_applying:
            self._prove_after(self.costs.apply_s)

    def _prove_after(self, seconds: float) -> None:
        self._life += 1
        self._is_applying = True
        life, version = self._life, self._fetched
        self._host.agenda.after(seconds, lambda: self._prove(version) if life == self._life else None)

    def _prove(self, version: int | None) -> None:
        if self.is_dead or version is None:
            return
        self._is_applying = False
        self.is_loading = version != self._ordered
        self.version = version
        self.engine.forget_prefixes()
        self._report(InstanceReady(self._host.agenda.now, self.instance, self.epoch, version))
        self._host.will_settle(self)

    def _sleep(self) -> None:
        self._life += 1
        self._is_awake = self._is_applying = False
        self.version = None
        life, seconds = self._life, 0.0 if self._is_new else self.costs.sleep_s
        self._is_new = False
        self._host.agenda.after(seconds, lambda: self._slept() if life == self._life else None)

    def _slept(self) -> None:
        if not self.is_dead:
            self._report(Slept(self._host.agenda.now, self.instance, self.epoch))

    def _wake(self) -> None:
        self._is_awake = True
        if self._fetched is not None:
            self._prove_after(self.costs.wake_s)

    def _stop_transfer(self) -> None:
        if self._transfer is not None:
            self._host.link.cancel(self._transfer)
            self._transfer = None
