"""The spot market of a trace: nodes come and go, launches take a free one, removals kill what runs on it.

A machine is billed from the launch's acceptance until it is gone. A launch while no node is
free fails and is tried again later. Nodes take the preset's kinds of machine in turn, in the order of
their coming.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rlboost_runtime.core.base.messages import Event, LaunchFailed, MachineGone, MachineLaunched
from rlboost_runtime.core.base.token_cost import MachineKind
from rlboost_runtime.sim.clock import Agenda
from rlboost_runtime.sim.presets import MachineShape
from rlboost_runtime.traces import Trace, TraceEvent

GONE_AFTER_S = 1.5
"""Until the provider reports that a machine is gone."""


@dataclass(slots=True, eq=False)
class RentedMachine:
    """A node that is ours."""

    machine: str
    node: str
    shape: MachineShape
    since_s: float


class CloudHost(Protocol):
    """What the market needs of the world."""

    agenda: Agenda

    def send(self, event: Event) -> None:
        """Send the core an event."""

    def usd_per_token(self, shape: MachineShape) -> float:
        """Return what the tokens of a machine cost, for all that is known now."""

    def kind_of(self, shape: MachineShape) -> MachineKind:
        """Return what the core is told of a machine."""

    def machine_begins(self, rented: RentedMachine) -> None:
        """A machine is there: it boots."""

    def machine_noticed(self, machine: str, seconds: float) -> None:
        """A machine will be taken."""

    def machine_dies(self, rented: RentedMachine, *, by_cloud: bool, was_noticed: bool) -> None:
        """A machine ends in this moment; `by_cloud`: taken away, else ended by us."""


class SimCloud:
    """Free and rented nodes."""

    def __init__(
        self, host: CloudHost, trace: Trace, shapes: tuple[MachineShape, ...], retry_s: float
    ) -> None:
        self._host = host
        self._trace = trace
        self._shapes = shapes
        self._retry_s = retry_s
        self._free: dict[str, MachineShape] = {}
        self._rented: dict[str, RentedMachine] = {}
        self._machine_of: dict[str, str] = {}
        self._noticed: set[str] = set()
        self._known: dict[str, MachineShape] = {}
        self._billed_usd = 0.0
        self._billed_s = 0.0

    def begin(self) -> None:
        """Put the trace on the agenda. Call before anything else is on it at time 0."""
        for event in self._trace.events:
            self._host.agenda.at(event.at_s, self._handler(event))

    def launch(self, machine: str) -> None:
        """Take the free node whose tokens cost least, if there is one."""
        now = self._host.agenda.now
        free = [node for node in self._free if node not in self._noticed]
        cost = {shape: self._host.usd_per_token(shape) for shape in {self._free[node] for node in free}}
        node = min(free, key=lambda node: cost[self._free[node]], default=None)
        if node is None:
            self._host.send(LaunchFailed(now, machine, "no spot capacity", self._retry_s))
            return
        rented = RentedMachine(machine, node, self._free.pop(node), now)
        self._rented[machine] = rented
        self._machine_of[node] = machine
        self._host.send(MachineLaunched(now, machine, self._host.kind_of(rented.shape)))
        self._host.machine_begins(rented)

    def terminate(self, machine: str) -> None:
        """End a machine of ours; asking again is fine."""
        rented = self._rented.get(machine)
        if rented is not None:
            self._end(rented, by_cloud=False)
            self._free[rented.node] = rented.shape

    def take(self, machine: str) -> None:
        """Take a machine of ours without notice. Its node is free again at once, as if it were another."""
        rented = self._rented[machine]
        self._end(rented, by_cloud=True)
        self._free[rented.node] = rented.shape

    def shape_of(self, machine: str) -> MachineShape | None:
        """Return what kind of machine it is; None for one that is not there."""
        rented = self._rented.get(machine)
        return None if rented is None else rented.shape

    def billed(self) -> tuple[float, float]:
        """Return dollars and machine-seconds until now."""
        now = self._host.agenda.now
        usd = sum(_usd(r, now) for r in self._rented.values())
        seconds = sum(now - r.since_s for r in self._rented.values())
        return self._billed_usd + usd, self._billed_s + seconds

    def _handler(self, event: TraceEvent) -> Callable[[], None]:
        return lambda: self._handle(event)

    def _handle(self, event: TraceEvent) -> None:
        match event.kind:
            case "add":
                shape = self._known.get(event.node)
                if shape is None:
                    shape = self._known[event.node] = self._shapes[len(self._known) % len(self._shapes)]
                self._free[event.node] = shape
            case "notice":
                self._noticed.add(event.node)
                if event.node in self._machine_of:
                    self._host.machine_noticed(self._machine_of[event.node], self._seconds_left(event))
            case "remove":
                self._free.pop(event.node, None)
                machine = self._machine_of.get(event.node)
                if machine is not None:
                    self._end(self._rented[machine], by_cloud=True)
                self._noticed.discard(event.node)

    def _seconds_left(self, notice: TraceEvent) -> float:
        for event in self._trace.events:
            if event.node == notice.node and event.kind == "remove" and event.at_s >= notice.at_s:
                return event.at_s - notice.at_s
        return self._trace.duration_s - notice.at_s

    def _end(self, rented: RentedMachine, *, by_cloud: bool) -> None:
        now = self._host.agenda.now
        del self._rented[rented.machine], self._machine_of[rented.node]
        self._billed_usd += _usd(rented, now)
        self._billed_s += now - rented.since_s
        self._host.machine_dies(rented, by_cloud=by_cloud, was_noticed=rented.node in self._noticed)
        self._host.agenda.after(GONE_AFTER_S, lambda: self._report_gone(rented.machine))

    def _report_gone(self, machine: str) -> None:
        self._host.send(MachineGone(self._host.agenda.now, machine))


def _usd(rented: RentedMachine, now: float) -> float:
    return rented.shape.usd_per_hour * (now - rented.since_s) / 3600.0
