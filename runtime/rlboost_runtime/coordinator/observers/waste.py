"""Billed machine time that made nothing, by cause: metered while the run goes on, kept in the ledger.

A machine does one thing at a time: it boots, idles or works. What it does changes at events of the core (a
launch, a first readiness, a loss, a step) and is looked at once a second besides, because work comes and
goes in between. *Working*: one of its instances holds a response; the reserved machine also while the
trainer holds its GPUs. Of the other seconds,

- `boot` are those until an agent of it had proved its first policy version; on the reserved machine, those
  until the first step began (making the model, its warm-up, the first publication), and in a run that was
  resumed until its next step began, which may be one that was open before;
- `idle` are those later: waiting for weights, for the end of others' work, for work at all, for the
  provider to end it. On the reserved machine also the trainer's wait for responses, as it reports it.

Some work comes to nothing. It is taken from the seconds worked, and never from more than these:

- `lost`: an instance that held responses was lost. From the last tokens that came from it (or, if none did
  since, from when it was given the work) to the moment it was given up, it generated what was not received,
  or was dead without our knowing. The instances of a machine count equally.
- `redone`, prefill: a response was given to an instance although one had had it before. From then to the
  first token that the instance adds, divided by the responses that it holds at that moment (and by the
  machine's instances). An upper bound: waiting for a decode slot, the decoding of that token and up to 70 ms
  of gathering are in it. Not counted where the instance itself had the response last.
- `redone`, steps: the trainer went back to an earlier checkpoint, so that a step was opened anew under
  another version. All work since that step, of the last `KEPT_STEPS`, that is not counted above.

Not seen, and therefore counted as useful: the time while no coordinator runs, up to `WRITE_EVERY_S` before
one is killed, work for responses that were cancelled or quarantined, and training that a restarted trainer
repeats within a step.
"""

from __future__ import annotations

import logging
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from rlboost_runtime.billing.accounts import WasteKind
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.coordinator.driver.ingest import Arrived
from rlboost_runtime.coordinator.driver.totals import RunTotals
from rlboost_runtime.coordinator.storage.token_store import AcceptedOfSteps
from rlboost_runtime.core.base.messages import (
    Assign,
    Command,
    Event,
    Finished,
    GrantLease,
    InstanceReady,
    LeaseReturned,
    MachineGone,
    MachineLaunched,
    RecallLease,
    Released,
    StepStarted,
    StepTrained,
    TrainerLost,
)
from rlboost_runtime.core.core import Core
from rlboost_runtime.core.lease_controller import LeaseState
from rlboost_runtime.core.state.instances import Instance
from rlboost_runtime.logs import event as log_event
from rlboost_runtime.run.reserved import RESERVED_MACHINE, is_reserved

log = logging.getLogger(__name__)

WRITE_EVERY_S = 5.0
"""Metered seconds reach the ledger in batches: each write is a commit."""
KEPT_STEPS = 64
"""Steps of which it is remembered who worked how long: a trainer goes back no further than a checkpoint."""


class Doing(Enum):
    """What a billed machine does."""

    BOOTING = WasteKind.BOOT
    IDLING = WasteKind.IDLE
    WORKING = None


@dataclass(slots=True)
class _Attempt:
    """A response on an instance."""

    assignment: int
    holder: Instance
    at: float
    is_again: bool
    """An attempt at this response came before, and this one has not added a token yet."""


class WasteMeter:
    """Observes every event and every batch of accepted tokens. Call `advance` about once a second besides."""

    def __init__(
        self,
        ledger: Ledger,
        core: Core,
        totals: RunTotals,
        engines_on: Callable[[str], int] | None = None,
    ) -> None:
        """`engines_on`: how many engines share a machine; None: as many as the core counts with."""
        self._engines_on = engines_on or self._configured_engines
        self._ledger = ledger
        self._core = core
        self._totals = totals
        self._at: float | None = None
        self._written_at = 0.0
        self._doing: dict[str, Doing] = {}
        self._has_served: set[str] = set()  # machines
        self._has_stepped = False
        """The reserved machine has begun a step since it was launched last."""
        self._wasted: dict[tuple[WasteKind, str], float] = defaultdict(float)
        self._claims: dict[tuple[WasteKind, str], float] = defaultdict(float)
        """Work that came to nothing, to be taken from time worked once that is metered."""
        self._worked: dict[int, dict[str, float]] = {}
        """Seconds of work that were not wasted, by step, oldest first, and machine."""
        self._step: tuple[int, int] | None = None  # with its policy version
        self._attempts: dict[int, _Attempt] = {}  # by response
        self._response_of: dict[int, int] = {}  # by assignment
        self._last_tokens_at: dict[str, float] = {}
        self._num_losses = core.counters.losses.total()
        self._recover()

    def _recover(self) -> None:
        """After a restart: attempts go on, but what they did before is not known."""
        core = self._core
        if core.step is not None:
            self._step = (core.step.step, core.step.policy_version)
            resumed_ns = max((end for _, end in self._ledger.spending().pauses_ns()), default=None)
            self._has_stepped = RESERVED_MACHINE in self._ledger.running_machines() and (
                resumed_ns is None or any(step.ended_ns > resumed_ns for step in self._ledger.steps())
            )
        self._has_served = {i.machine for i in core.instances.values() if i.has_served}
        for assignment, response, name in core.assignments():
            self._begin(assignment, response, name, core.now, False)

    # --- what happens -------------------------------------------------------------------------------------

    def observe(self, event: Event, commands: Sequence[Command], core: Core) -> None:
        """Take in one event, and the commands that followed from it, after the core and the totals did."""
        num_losses = self._core.counters.losses.total()
        if num_losses != self._num_losses:
            self._num_losses = num_losses
            self.advance(event.at)
            self._claim_lost(event.at)
        match event:
            case Finished(response=response):
                self._end(response)
            case Released(assignment=assignment):
                self._end(self._response_of.get(assignment))
            case StepStarted(step=step) if self._core.step is None or self._core.step.step <= step:
                self._open(event)
            case StepTrained(wait_s=wait_s):
                self._begin_stepping(event.at)
                self.advance(event.at)
                for machine in filter(is_reserved, self._ledger.running_machines()):
                    self._claims[WasteKind.IDLE, machine] += wait_s
            case InstanceReady(instance=name):
                self._serve(name, event.at)
            case MachineLaunched() | MachineGone() | LeaseReturned() | TrainerLost():
                self.advance(event.at)
            case _:
                pass
        for command in commands:  # of which a step may bring tens of thousands at once
            if isinstance(command, Assign):
                is_again = self._totals.assigned[command.response] > 1
                self._begin(command.assignment, command.response, command.instance, event.at, is_again)
            elif isinstance(command, (GrantLease, RecallLease)):
                self.advance(event.at)

    def observe_tokens(self, batch: Sequence[Arrived], accepted: AcceptedOfSteps, at: float) -> None:
        """Take in who sent tokens, and which responses continued."""
        for sender, frame in batch:
            if frame.counts:
                self._last_tokens_at[sender.instance] = at
        for response, _, name in accepted.openings:
            attempt = self._attempts.get(response)
            if attempt is None or attempt.holder.instance != name or not attempt.is_again:
                continue
            attempt.is_again = False
            holder = attempt.holder
            self._claim(WasteKind.REDONE, holder, (at - attempt.at) / max(1, holder.num_assigned))

    def _begin(self, assignment: int, response: int, name: str, at: float, is_again: bool) -> None:
        if response in self._attempts:
            self._end(response)
        holder = self._core.instances.get(name)
        if holder is not None:  # else lost by the same event
            self._attempts[response] = _Attempt(assignment, holder, at, is_again)
            self._response_of[assignment] = response

    def _claim(self, kind: WasteKind, holder: Instance, seconds: float) -> None:
        """Claim an instance's time; those of a machine share it equally."""
        self._claims[kind, holder.machine] += max(0.0, seconds) / max(1, self._engines_on(holder.machine))

    def _end(self, response: int | None) -> None:
        attempt = None if response is None else self._attempts.pop(response, None)
        if attempt is not None:
            self._response_of.pop(attempt.assignment, None)

    def _serve(self, name: str, at: float) -> None:
        instance = self._core.instances.get(name)
        if instance is not None and instance.has_served and instance.machine not in self._has_served:
            self.advance(at)
            self._has_served.add(instance.machine)
            self._look()

    def _open(self, event: StepStarted) -> None:
        """A step is opened. One that was opened before, or an earlier one, undoes what was done since."""
        step = (event.step, event.policy_version)
        self._begin_stepping(event.at)
        if step == self._step:
            return
        self.advance(event.at)
        for undone in [number for number in self._worked if number >= step[0]]:
            for machine, seconds in self._worked.pop(undone).items():
                self._wasted[WasteKind.REDONE, machine] += seconds
        self._step = step
        if event.open_from in (None, event.step):  # no earlier step stays open
            self._attempts.clear()
            self._response_of.clear()
        while len(self._worked) > KEPT_STEPS:
            del self._worked[next(iter(self._worked))]

    def _begin_stepping(self, at: float) -> None:
        if not self._has_stepped:
            self.advance(at)
            self._has_stepped = True
            self._look()

    def _claim_lost(self, at: float) -> None:
        """Claim what instances did since they last sent tokens, of those that are gone with work in hand."""
        instances = self._core.instances
        lost: dict[str, _Attempt] = {}  # the oldest attempt of each
        for response, attempt in list(self._attempts.items()):
            name = attempt.holder.instance
            if instances.get(name) is not attempt.holder:
                lost[name] = min(attempt, lost.get(name, attempt), key=lambda each: each.at)
                self._end(response)
        for name, attempt in lost.items():
            since = max(attempt.at, self._last_tokens_at.pop(name, 0.0))
            self._claim(WasteKind.LOST, attempt.holder, at - since)

    # --- time ---------------------------------------------------------------------------------------------

    def advance(self, at: float) -> None:
        """Charge the time since the last call to what each machine did; find out what each does now."""
        elapsed = 0.0 if self._at is None else max(0.0, at - self._at)
        self._at = at
        worked = self._worked.setdefault(-1 if self._step is None else self._step[0], defaultdict(float))
        for machine, doing in self._doing.items():
            if doing is Doing.WORKING:
                worked[machine] += elapsed
            else:
                self._wasted[WasteKind(doing.value), machine] += elapsed
        self._look()
        self._settle_claims()
        if at - self._written_at >= WRITE_EVERY_S:
            self._written_at = at
            self.flush()

    def _look(self) -> None:
        core = self._core
        on_machine: dict[str, list[Instance]] = defaultdict(list)
        for instance in core.instances.values():
            on_machine[instance.machine].append(instance)
        running = self._ledger.running_machines()
        self._doing = {
            name: self._reserved(on_machine[name])
            if name == RESERVED_MACHINE
            else self._node(on_machine[name])
            if is_reserved(name)
            else self._spot(name, on_machine[name])
            for name in running
            if is_reserved(name) or name in core.machines
        }
        self._has_served &= running

    def _spot(self, machine: str, instances: Sequence[Instance]) -> Doing:
        if machine not in self._has_served:
            return Doing.BOOTING
        return Doing.WORKING if any(i.num_assigned for i in instances) else Doing.IDLING

    def _reserved(self, instances: Sequence[Instance]) -> Doing:
        if self._core.config.autoscaling is not None:
            return self._serving_head(instances)
        if self._core.step is None or not self._has_stepped:
            return Doing.BOOTING
        trains = self._core.lease in (LeaseState.TRAINER, LeaseState.RECALLING)
        return Doing.WORKING if trains or any(i.num_assigned for i in instances) else Doing.IDLING

    def _node(self, instances: Sequence[Instance]) -> Doing:
        """Return what a further node of the trainer does: until its engines are there, it boots."""
        return self._reserved(instances) if instances else Doing.BOOTING

    def _configured_engines(self, machine: str) -> int:
        config = self._core.config
        return config.reserved_instances if is_reserved(machine) else config.instances_per_machine

    def _serving_head(self, instances: Sequence[Instance]) -> Doing:
        """Return what the head of a run does that only serves: without engines, it serves those elsewhere."""
        if self._core.newest_version is None or (instances and not any(i.has_served for i in instances)):
            return Doing.BOOTING
        work = any(i.num_assigned for i in instances) if instances else bool(self._core.open_requests)
        return Doing.WORKING if work else Doing.IDLING

    def _settle_claims(self) -> None:
        """Take what was claimed from the time worked, the latest first; what a machine that still runs does
        not have yet is claimed again later."""
        claims, self._claims = self._claims, defaultdict(float)
        for (kind, machine), seconds in claims.items():
            left = seconds
            for worked in reversed(self._worked.values()):
                taken = min(left, worked.get(machine, 0.0))
                if taken > 0:
                    worked[machine] -= taken
                    left -= taken
            if seconds > left:
                self._wasted[kind, machine] += seconds - left
            if left > 0 and machine in self._doing:
                self._claims[kind, machine] += left

    def flush(self) -> None:
        """Write what was metered. A failed write is logged and repeated the next time."""
        wasted = {what: seconds for what, seconds in self._wasted.items() if seconds > 0}
        if not wasted:
            return
        try:
            self._ledger.add_wastes(wasted)
        except sqlite3.Error as problem:
            log_event(log, "waste.write_failed", problem=str(problem))
            return
        self._wasted.clear()
