"""How each spot machine came into service: seconds by phase, from its request to its first token.

Phases follow one another, so that they add up to the whole:

    request       we requested it -> its cloud granted it
    boot          -> our installation began: the machine's start, and what a launcher like SkyPilot does there
    install       -> installed; a machine whose image has everything, and one of this computer, has none
    dial_in       -> its first agent is registered
    wait          -> there is a policy version for it
    weights       -> that version is on the machine; the engine starts meanwhile
    engine        -> the engine serves it
    first_token   -> its first token has arrived; where there is no work, this lasts until there is

Durations within the machine are the machine's own, so that its clock need not agree with ours. A machine with
several agents counts by the first of them. A coordinator that was started again goes on with what the former
one had kept in the ledger: all of it but its last second.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Mapping, Sequence

import msgspec

from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.coordinator.driver.ingest import Arrived
from rlboost_runtime.coordinator.storage.token_store import AcceptedOfSteps
from rlboost_runtime.core.state.machines import Machine, MachineState
from rlboost_runtime.logs import event as log_event
from rlboost_runtime.protocol.messages import AgentHello, InstanceReadyMessage

log = logging.getLogger(__name__)


class _Boot(msgspec.Struct, omit_defaults=True):
    """Times in seconds of the run."""

    requested_at: float
    launched_at: float
    joined_at: float
    install_s: float
    age_s: float
    load_at: float | None = msgspec.field(default=None, name="told_at")  # as earlier ledgers have it
    ready_at: float | None = None
    ready_instance: str = ""
    pull_s: float = 0.0
    first_token_at: float | None = None


class BootTimes:
    """Of all spot machines that have dialled in; for the others, `machines` returns the core's record."""

    def __init__(self, machines: Callable[[], Mapping[str, Machine]]) -> None:
        self._machines = machines
        self._boot_times: dict[str, _Boot] = {}
        self._load_at: dict[str, float] = {}
        """Of machines whose registration is not recorded yet: the core commands a load at once."""
        self._tokenless: dict[str, str] = {}
        """Machine of each instance that serves and has not sent a token yet."""
        self._unkept: set[str] = set()

    def recall(self, book: Ledger) -> None:
        """Go on with what a former coordinator kept."""
        for machine, kept in book.kept_boots().items():
            boot = self._boot_times[machine] = msgspec.json.decode(kept, type=_Boot)
            if boot.ready_at is not None and boot.first_token_at is None:
                self._tokenless[boot.ready_instance] = machine

    def keep(self, book: Ledger) -> None:
        """Keep what is new. A failed write is logged and repeated the next time."""
        if not self._unkept:
            return
        try:
            book.keep_boots(
                {name: msgspec.json.encode(self._boot_times[name]).decode() for name in self._unkept}
            )
        except sqlite3.Error as problem:
            log_event(log, "boots.write_failed", problem=str(problem))
            return
        self._unkept.clear()

    def joined(self, hello: AgentHello, at: float) -> None:
        """Record that an agent was registered; the first of its machine counts."""
        machine = self._machines().get(hello.machine)
        if machine is None or hello.machine in self._boot_times:
            return
        install_s = sum(hello.install_s.values())
        requested_at = _first(machine, MachineState.REQUESTED)
        launched_at = _first(machine, MachineState.LAUNCHED)
        load_at = self._load_at.pop(hello.machine, None)
        self._boot_times[hello.machine] = _Boot(
            requested_at, launched_at, at, install_s, hello.age_s, load_at
        )
        self._unkept.add(hello.machine)

    def load_sent(self, machine: str, at: float) -> None:
        """Record that an instance was sent the command to load a version; the first of its machine counts."""
        boot = self._boot_times.get(machine)
        if boot is None:
            self._load_at.setdefault(machine, at)
        elif boot.load_at is None:
            boot.load_at = at
            self._unkept.add(machine)

    def ready(self, instance: str, machine: str, message: InstanceReadyMessage, at: float) -> None:
        """Record that an instance serves a version; the first of its machine counts."""
        boot = self._boot_times.get(machine)
        if boot is not None and boot.ready_at is None:
            boot.ready_at, boot.ready_instance, boot.pull_s = at, instance, message.pull_s
            self._tokenless[instance] = machine
            self._unkept.add(machine)

    def observe_tokens(self, batch: Sequence[Arrived], accepted: AcceptedOfSteps, at: float) -> None:
        """Record who sent tokens."""
        if not self._tokenless:
            return
        for sender, frame in batch:
            machine = self._tokenless.pop(sender.instance, None) if frame.counts else None
            if machine is not None and self._boot_times[machine].first_token_at is None:
                self._boot_times[machine].first_token_at = at
                self._unkept.add(machine)

    def phases(self, machine: str) -> dict[str, float]:
        """Return the phases that have ended, in their order; {} if nothing is known."""
        boot = self._boot_times.get(machine)
        if boot is None:
            known = self._machines().get(machine)
            return {} if known is None or not known.was_accepted else _rounded({"request": _request_s(known)})
        inside_s = min(boot.joined_at - boot.launched_at, boot.install_s + boot.age_s)
        dial_in_s = min(boot.age_s, inside_s)
        phases = {"request": boot.launched_at - boot.requested_at}
        phases["boot"] = boot.joined_at - boot.launched_at - inside_s
        phases |= {"install": inside_s - dial_in_s, "dial_in": dial_in_s}
        if boot.ready_at is not None:
            load_at = boot.joined_at if boot.load_at is None else max(boot.joined_at, boot.load_at)
            load_at = min(load_at, boot.ready_at)
            weights_s = min(boot.pull_s, boot.ready_at - load_at)
            phases |= {"wait": load_at - boot.joined_at, "weights": weights_s}
            phases["engine"] = boot.ready_at - load_at - weights_s
            if boot.first_token_at is not None:
                phases["first_token"] = boot.first_token_at - boot.ready_at
        return _rounded(phases)


def _first(machine: Machine, state: MachineState) -> float:
    """Return when the machine first entered `state`; if its history does not say, when the history begins."""
    return next(
        (at for at, reached, _ in machine.lifecycle.history if reached is state),
        machine.lifecycle.history[0][0],
    )


def _request_s(machine: Machine) -> float:
    return _first(machine, MachineState.LAUNCHED) - _first(machine, MachineState.REQUESTED)


def _rounded(phases: Mapping[str, float]) -> dict[str, float]:
    return {name: round(took, 3) for name, took in phases.items()}
