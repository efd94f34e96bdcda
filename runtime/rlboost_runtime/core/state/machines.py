"""Spot machines: requested, launched, ended, and never forgotten until the provider reports them gone.

A machine is billed; it carries one or more instances. Names are `spot-0`, `spot-1`, ... and never reused.
What is gone for good is forgotten after a while; should the provider accept such a launch after all, the
machine is known again and ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from rlboost_runtime.core.base.messages import Command, LaunchMachine, LossCause, TerminateMachine
from rlboost_runtime.core.base.state_machine import StateMachine
from rlboost_runtime.core.base.timers import MACHINE_TIMERS, Timer, Timers
from rlboost_runtime.core.base.token_cost import MachineKind, PlaceRecord

TERMINATE_AGAIN_S = 5.0
"""Pause between two requests to end a machine: long against a provider call, short against a bill."""
NOTICE_SLACK_S = 5.0
"""How long after its notice ran out a machine may still be there before we end it ourselves: clouds are not
punctual, and a notice that came to nothing would otherwise leave an idle machine running."""
RELAUNCH_PAUSE_S = 1.0
"""Pause after a machine that went before any agent of it dialled in, so that a broken image is not launched
in a tight loop."""
REJOIN_S = 10.0
"""Seconds a machine may be without instances, after the last was dropped for its silence or a reset, until it
is ended: its agents may live and register again (longer: a machine in trouble is waited for, billed and not
replaced). An agent notices by itself within 15 s that its heartbeats do not arrive, of which the lease takes
6. Machines that are truly gone do not wait: the provider reports it within a second or two."""
FORGET_AFTER_S = 600.0
"""Seconds for which a machine that is gone stays known, counted at the next launch: late events about it have
arrived by then. A run of weeks would otherwise keep, and look at every second, all that it ever had."""
PREFIX = "spot-"


def first_free_number(names: Iterable[str]) -> int:
    """Return the number after the largest of the machines named so."""
    digits = (name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX))
    return max((int(each) + 1 for each in digits if each.isdecimal()), default=0)


class MachineState(StrEnum):
    """Where a machine is in its life."""

    REQUESTED = "requested"
    """The provider was asked for it."""
    LAUNCHED = "launched"
    """The provider accepted the launch: money runs."""
    TERMINATING = "terminating"
    """We asked for its end, and it has not been reported gone."""
    GONE = "gone"
    """The provider reports that it does not exist, or never did."""


LEGAL = {
    MachineState.REQUESTED: frozenset({MachineState.LAUNCHED, MachineState.TERMINATING, MachineState.GONE}),
    MachineState.LAUNCHED: frozenset({MachineState.TERMINATING, MachineState.GONE}),
    MachineState.TERMINATING: frozenset({MachineState.GONE}),
    # A launch accepted after it was reported as failed or gone: it must be ended again.
    MachineState.GONE: frozenset({MachineState.TERMINATING}),
}


@dataclass(slots=True, eq=False)
class Machine:
    """One machine."""

    machine: str
    number: int
    lifecycle: StateMachine[MachineState]
    instances: dict[str, None] = field(default_factory=dict)
    """Its live instances."""
    has_joined: bool = False
    """An agent of it has dialled in at some time."""
    was_accepted: bool = False
    """Its launch was accepted at some time, so only the provider's report ends it."""
    is_leaving: bool = False
    """It will go (preemption notice): a replacement is due already."""
    reason: str = ""
    """Why it is being ended."""
    moved_at: float = 0.0
    """When it came into its present state, in seconds of the run."""
    kind: MachineKind | None = None
    """What was bought; None: not known."""
    launched_at: float | None = None
    """When the launch was accepted; None: not yet."""
    serves: bool = False
    """An agent of it has served a version at some time."""

    @property
    def state(self) -> MachineState:
        """Where it is in its life."""
        return self.lifecycle.state

    @property
    def is_alive(self) -> bool:
        """True if it may still exist."""
        return self.state is not MachineState.GONE

    @property
    def is_requested(self) -> bool:
        """True if the provider has not answered its launch yet."""
        return self.state is MachineState.REQUESTED

    @property
    def is_launched(self) -> bool:
        """True if it may be billed: launched, or being ended and not known to be gone."""
        return self.state in (MachineState.LAUNCHED, MachineState.TERMINATING)

    @property
    def counts(self) -> bool:
        """True if it counts towards the machines that we want."""
        return self.state in (MachineState.REQUESTED, MachineState.LAUNCHED) and not self.is_leaving


class MachineTable:
    """All spot machines of the run. `out` takes the commands, in order."""

    def __init__(
        self, boot_deadline_s: float, timers: Timers, out: Callable[[Command], None], per_machine: int = 1
    ) -> None:
        """`per_machine`: instances of a machine of which nothing is known yet."""
        self.machines: dict[str, Machine] = {}
        self._per_machine = per_machine
        self._num_instances = 0
        self._places: dict[str, PlaceRecord] = {}
        self._next_number = 0
        self._boot_deadline_s = boot_deadline_s
        self._timers = timers
        self._out = out
        self._not_before = 0.0
        self._num_counted = 0
        self._gone_machines: deque[Machine] = deque()
        """Machines that are gone, in the order of their going; one that was ended again is there twice."""

    @property
    def num_counted(self) -> int:
        """Machines asked for or launched that are not about to go."""
        return self._num_counted

    @property
    def num_instances(self) -> int:
        """Instances that those machines have once all are there."""
        return self._num_instances

    def instances_of(self, machine: Machine) -> int:
        """Return how many instances a machine has once all are there."""
        return self._per_machine if machine.kind is None else machine.kind.engines

    def places(self, at: float) -> dict[str, PlaceRecord]:
        """Return what machines have shown by place, those that are there until `at`."""
        found = dict(self._places)
        for machine in self.machines.values():
            if machine.kind is not None and machine.state is MachineState.LAUNCHED:
                place = machine.kind.place
                found[place] = _lived(found.get(place, PlaceRecord()), machine, at)
        return found

    # --- what we want -------------------------------------------------------------------------------------

    def grow(self, useful: int, most: int, at: float) -> None:
        """Ask for machines until they have `useful` instances or `most` count, unless a pause after a failure
        is on."""
        while self._num_instances < useful and self._num_counted < most:
            if at < self._not_before:
                self._timers.set(Timer.LAUNCH, "", self._not_before)
                return
            self._request(at)

    def superfluous(self, useful: int, most: int, work: Callable[[Machine], int]) -> list[Machine]:
        """Return launched machines without which the others have `useful` instances, or that are more than
        `most`: those with the least work first, the newest among equals."""
        launched = [m for m in self.machines.values() if m.counts and not m.is_requested]
        instances, found = self._num_instances, list[Machine]()
        for machine in sorted(launched, key=lambda m: (work(m), -m.number)):
            left = instances - self.instances_of(machine)
            if left >= useful or self._num_counted - len(found) > most:
                instances = left
                found.append(machine)
        return found

    def terminate(self, machine: Machine, reason: str, at: float) -> None:
        """End a machine that is not being ended yet; asked again until it is gone."""
        if machine.state is MachineState.TERMINATING:
            return
        machine.reason = reason
        self._move(machine, MachineState.TERMINATING, reason, at)
        self._timers.cancel_all(MACHINE_TIMERS, machine.machine)
        self.ask_for_end(machine, at)

    def ask_for_end(self, machine: Machine, at: float) -> None:
        """Ask the provider to end a terminating machine, now and again later."""
        if machine.state is MachineState.TERMINATING:
            self._out(TerminateMachine(machine.machine, machine.reason))
            self._timers.set(Timer.TERMINATE, machine.machine, at + TERMINATE_AGAIN_S)

    def notice(self, machine: Machine, seconds: float, at: float) -> None:
        """The cloud will take the machine in `seconds`."""
        if machine.counts:
            self._num_counted -= 1
            self._num_instances -= self.instances_of(machine)
            machine.is_leaving = True
            self._timers.set(Timer.NOTICE, machine.machine, at + max(0.0, seconds) + NOTICE_SLACK_S)

    # --- what the provider reports ------------------------------------------------------------------------

    def launched(self, machine: Machine, at: float, kind: MachineKind | None = None) -> bool:
        """The launch was accepted. Returns False if that was known."""
        if kind is not None and machine.kind is None:
            more = kind.engines - self._per_machine
            self._num_instances += more if machine.counts else 0
            machine.kind = kind
        match machine.state:
            case MachineState.REQUESTED:
                self._accept(machine, "launch accepted", at)
            case MachineState.GONE:
                self._accept_late(machine, at)
            case MachineState.TERMINATING if not machine.was_accepted:
                machine.was_accepted = True
            case _:
                return False
        return True

    def launched_unknown(self, name: str, at: float) -> bool:
        """A launch that was given up and forgotten was accepted after all: end it. Returns False if `name` is
        not one that this run gave."""
        digits = name.removeprefix(PREFIX)
        if not digits.isdecimal() or name != f"{PREFIX}{int(digits)}" or int(digits) >= self._next_number:
            return False
        machine = self._add(int(digits), MachineState.GONE, at)
        self._accept_late(machine, at)
        return True

    def failed(self, machine: Machine, problem: str, retry_after_s: float, at: float) -> bool:
        """The launch did not happen: forget the machine, and pause before the next. Returns False if that was
        known."""
        if not machine.is_alive or machine.was_accepted:
            return False
        self._move(machine, MachineState.GONE, f"launch failed: {problem}", at)
        self._timers.cancel_all(MACHINE_TIMERS, machine.machine)
        del self.machines[machine.machine]
        self._not_before = max(self._not_before, at + retry_after_s)
        return True

    def gone(self, machine: Machine, at: float) -> bool:
        """The provider reports that the machine does not exist. Returns False if that was known."""
        if not machine.is_alive:
            return False
        self._learn_life(machine, at)
        self._move(machine, MachineState.GONE, "the provider says so", at)
        self._timers.cancel_all(MACHINE_TIMERS, machine.machine)
        if not machine.has_joined:
            self._not_before = max(self._not_before, at + RELAUNCH_PAUSE_S)
        return True

    def restarted(self, at: float, num_named: int) -> None:
        """The coordinator was away: agents could not dial in meanwhile, and launches may not have been
        made. `num_named`: the first number that no machine ever had, so far as the books know."""
        self._next_number = max(self._next_number, num_named)
        for machine in self.machines.values():
            if machine.is_requested:
                self._out(LaunchMachine(machine.machine))
            if machine.counts and not machine.has_joined:
                self._timers.set(Timer.BOOT, machine.machine, at + self._boot_deadline_s)
            if self._timers.due(Timer.REJOIN, machine.machine) is not None:
                self._timers.set(Timer.REJOIN, machine.machine, at + REJOIN_S)

    # --- its instances ------------------------------------------------------------------------------------

    def serving(self, machine: Machine, at: float, *, had_waited: bool) -> None:
        """One of its agents serves a version. `had_waited`: there was none when it dialled in."""
        if machine.serves:
            return
        machine.serves = True
        if machine.kind is not None and machine.launched_at is not None and not had_waited:
            place = machine.kind.place
            known = self._places.get(place, PlaceRecord())
            boot_s = known.boot_s + at - machine.launched_at
            self._places[place] = replace(known, boots=known.boots + 1, boot_s=boot_s)

    def joined(self, machine: Machine, instance: str, at: float) -> None:
        """One of its agents dialled in."""
        if machine.is_requested:
            self._accept(machine, f"{instance} dialled in", at)
        machine.instances[instance] = None
        machine.has_joined = True
        self._timers.cancel(Timer.BOOT, machine.machine)
        self._timers.cancel(Timer.REJOIN, machine.machine)

    def lost(self, machine: Machine, instance: str, cause: LossCause, at: float) -> None:
        """One of its instances was lost; without any, the machine is of no use, unless one may come back."""
        machine.instances.pop(instance, None)
        if machine.instances or not machine.is_alive:
            return
        if machine.state is MachineState.LAUNCHED and cause in (LossCause.RESET, LossCause.SILENT):
            self._timers.set(Timer.REJOIN, machine.machine, at + REJOIN_S)
        else:
            self.terminate(machine, f"its last instance is lost: {cause}", at)

    def give_up_waiting(self, machine: Machine, at: float) -> None:
        """The time to dial in again is over: end a machine that is still without instances."""
        if machine.state is MachineState.LAUNCHED and not machine.instances:
            self.terminate(machine, f"its last instance is lost and did not come back in {REJOIN_S:g} s", at)

    def check(self) -> None:
        """Assert that counts and deadlines agree with the states."""
        counted = [m.machine for m in self.machines.values() if m.counts]
        assert self._num_counted == len(counted), (
            f"{self._num_counted} machines counted, these count: {counted}"
        )
        instances = sum(self.instances_of(self.machines[name]) for name in counted)
        assert self._num_instances == instances, f"{self._num_instances} instances counted, of {instances}"
        for machine in self.machines.values():
            timeline = machine.lifecycle
            terminating = machine.state is MachineState.TERMINATING
            assert terminating == (self._timers.due(Timer.TERMINATE, machine.machine) is not None), timeline
            booting = machine.counts and not machine.has_joined
            assert booting <= (self._timers.due(Timer.BOOT, machine.machine) is not None), timeline
            deserted = machine.state is MachineState.LAUNCHED and machine.has_joined and not machine.instances
            assert deserted == (self._timers.due(Timer.REJOIN, machine.machine) is not None), timeline
            assert machine.number < self._next_number, f"its number will be used again, {timeline}"

    # --- helpers ------------------------------------------------------------------------------------------

    def _request(self, at: float) -> None:
        self._forget_gone(at)
        machine = self._add(self._next_number, MachineState.REQUESTED, at)
        self._next_number += 1
        self._num_counted += 1
        self._num_instances += self._per_machine
        self._timers.set(Timer.BOOT, machine.machine, at + self._boot_deadline_s)
        self._out(LaunchMachine(machine.machine))

    def _add(self, number: int, state: MachineState, at: float) -> Machine:
        name = f"{PREFIX}{number}"
        machine = Machine(name, number, StateMachine(f"machine {name}", state, LEGAL, at), moved_at=at)
        self.machines[name] = machine
        return machine

    def _forget_gone(self, at: float) -> None:
        """Forget what has been gone for long and has no instance left."""
        for _ in range(len(self._gone_machines)):
            machine = self._gone_machines[0]
            if at - machine.moved_at < FORGET_AFTER_S and not machine.is_alive:
                return
            self._gone_machines.popleft()
            if machine.is_alive or self.machines.get(machine.machine) is not machine:
                continue  # it goes again later, or is forgotten already
            if machine.instances:
                self._gone_machines.append(machine)
            else:
                del self.machines[machine.machine]

    def _accept_late(self, machine: Machine, at: float) -> None:
        machine.was_accepted = True
        self.terminate(machine, "launched after it had been given up", at)

    def _accept(self, machine: Machine, why: str, at: float) -> None:
        machine.was_accepted = True
        machine.launched_at = at
        self._move(machine, MachineState.LAUNCHED, why, at)
        self._timers.set(Timer.BOOT, machine.machine, at + self._boot_deadline_s)

    def _move(self, machine: Machine, to: MachineState, why: str, at: float) -> None:
        self._count(machine, -machine.counts)
        machine.lifecycle.move(to, why, at)
        machine.moved_at = at
        self._count(machine, machine.counts)
        if to is MachineState.GONE:
            self._gone_machines.append(machine)

    def _count(self, machine: Machine, number: int) -> None:
        self._num_counted += number
        self._num_instances += number * self.instances_of(machine)

    def _learn_life(self, machine: Machine, at: float) -> None:
        """A machine goes: its cloud took it, unless we ended it without having been told that it would."""
        if machine.kind is None or machine.launched_at is None:
            return
        place, ended_by_us = machine.kind.place, machine.state is MachineState.TERMINATING
        lived = _lived(self._places.get(place, PlaceRecord()), machine, at)
        was_taken = machine.is_leaving or not ended_by_us
        self._places[place] = replace(lived, preemptions=lived.preemptions + was_taken)


def _lived(record: PlaceRecord, machine: Machine, at: float) -> PlaceRecord:
    since = at if machine.launched_at is None else machine.launched_at
    return replace(record, machine_s=record.machine_s + at - since)
