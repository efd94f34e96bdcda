"""The GPU lease: whether the reserved GPUs belong to the reserved engines or to the trainer.

::

    ENGINES --window closes--> CLOSING --all asleep, GrantLease--> TRAINER --RecallLease--> RECALLING
       ^                          |                                   |                         |
       +------ StepStarted -------+------------ StepStarted ----------+-- StepStarted, LeaseReturned

A run begins in TRAINER: the trainer loads its model before it asks for the first step. One that only serves
(`CoreConfig.autoscaling`) is in ENGINES from its start to its end. `GpuLease` decides, `LeaseController`
orders engines and trainer.

Guarantees: the trainer is granted the GPUs only after every live reserved engine has reported that its memory
is free; an engine has one order at a time (a Wake waits for the answer to a Sleep, a Sleep for the release of
all work); an engine that is lost is waited for no longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rlboost_runtime.core.base.messages import GrantLease, RecallLease
from rlboost_runtime.core.base.state_machine import StateMachine
from rlboost_runtime.core.base.timers import Context, Timer
from rlboost_runtime.core.dispatch.assignments import Assignments
from rlboost_runtime.core.instance_controller import InstanceController
from rlboost_runtime.core.state.instance_states import InstanceState
from rlboost_runtime.core.state.instances import Instance, InstanceTable
from rlboost_runtime.core.state.responses import StepResponses
from rlboost_runtime.core.window.seeding_window import OpenWindow, SeedingWindow


class LeaseState(StrEnum):
    """Who holds the reserved GPUs."""

    ENGINES = "engines"
    """The reserved engines: the seeding window is open."""
    CLOSING = "closing"
    """The window is closed; engines hand their work over and go to sleep."""
    TRAINER = "trainer"
    """The trainer."""
    RECALLING = "recalling"
    """The trainer was asked to free them and has not answered yet."""


LEGAL = {
    LeaseState.ENGINES: frozenset({LeaseState.CLOSING}),
    LeaseState.CLOSING: frozenset({LeaseState.TRAINER, LeaseState.ENGINES}),
    LeaseState.TRAINER: frozenset({LeaseState.ENGINES, LeaseState.RECALLING}),
    LeaseState.RECALLING: frozenset({LeaseState.ENGINES}),
}


@dataclass(frozen=True, slots=True)
class LeaseInputs:
    """What the lease is decided on, as it is now. Times in seconds of the run."""

    now: float
    num_unfinished: int
    has_serving_spot: bool
    has_reserved: bool
    """Reserved instances are configured, or one has joined."""
    can_recall: bool
    """A recall is of use: a reserved instance is connected, and the trainer has no earlier step to train."""
    t_seed_s: float
    only_serves: bool = False
    """There is no trainer who would want the GPUs."""


class GpuLease:
    """Who holds the reserved GPUs, and since when the window is open or no instance serves."""

    def __init__(self) -> None:
        self._lifecycle = StateMachine("gpu lease", LeaseState.TRAINER, LEGAL, 0.0)
        self.opened_at = 0.0
        self.unserved_since: float | None = None
        """Since when the trainer holds the GPUs while work is left that no spot instance can do."""

    @property
    def state(self) -> LeaseState:
        """Who holds the GPUs."""
        return self._lifecycle.state

    def open(self, why: str, at: float) -> None:
        """The trainer has given the GPUs back: the window opens (again)."""
        if self.state is not LeaseState.ENGINES:
            self._lifecycle.move(LeaseState.ENGINES, why, at)
        self.opened_at = at
        self.unserved_since = None

    def close(self, why: str, at: float) -> None:
        """The window closes."""
        self._lifecycle.move(LeaseState.CLOSING, why, at)

    def grant(self, at: float) -> None:
        """The trainer gets the GPUs."""
        self._lifecycle.move(LeaseState.TRAINER, "all reserved engines asleep", at)
        self.unserved_since = None

    def recall(self, why: str, at: float) -> None:
        """The trainer is asked to give them back."""
        self._lifecycle.move(LeaseState.RECALLING, why, at)
        self.unserved_since = None

    def reason_to_close(self, inputs: LeaseInputs) -> str | None:
        """Return why the open window should close now, None to keep it open."""
        if self.state is not LeaseState.ENGINES or inputs.only_serves:
            return None
        if inputs.num_unfinished == 0:
            return "all responses are finished"
        if not inputs.has_reserved:
            return "there are no reserved engines"
        if inputs.has_serving_spot and inputs.now >= self.closes_at(inputs.t_seed_s):
            return f"open for {inputs.now - self.opened_at:.3f} s and a spot instance serves"
        return None

    def closes_at(self, t_seed_s: float) -> float:
        """Return when the window has lasted T_seed."""
        return self.opened_at + t_seed_s

    def watch_for_recall(self, inputs: LeaseInputs) -> float | None:
        """Note if an instance serves; return since when none does although work is left, else None."""
        unserved = (
            self.state is LeaseState.TRAINER
            and inputs.num_unfinished > 0
            and not inputs.has_serving_spot
            and inputs.can_recall
        )
        if not unserved:
            self.unserved_since = None
        elif self.unserved_since is None:
            self.unserved_since = inputs.now
        return self.unserved_since


LOADING_S = 120.0
"""Without a window, spot instances that still load a step's version are waited for so long after the step's
begin: a pull takes seconds. Later the reserved engines do the work, even if spot instances still load."""


class LeaseController:
    """Brings reserved engines, trainer and deadlines in line with the lease."""

    def __init__(
        self,
        context: Context,
        instance_table: InstanceTable,
        work: Assignments,
        controller: InstanceController,
        seeding: SeedingWindow,
    ) -> None:
        self.lease = GpuLease()
        self._context = context
        self._instance_table = instance_table
        self._work = work
        self._controller = controller
        self._seeding = seeding
        self._closed_at = 0.0
        self._has_woken = self._was_awake = False
        """A reserved engine has served in this window; in the last one."""

    def settle(self, num_serving: int, num_live: int) -> None:
        """Close the window, order engines, grant or recall the lease, as is due now.

        `num_serving` spot instances serve the open step's version, `num_live` are there, loading or not.
        """
        lease, now, book = self.lease, self._context.now, self._work.steps.first
        look_at, window = None, OpenWindow(now, lease.opened_at, num_live)
        if book is not None and lease.state is LeaseState.ENGINES:
            self._note_waking()
            look_at = self._seeding.look(window, book)
        waits_until = self._waits_until() if num_live and not num_serving else None
        inputs = self._inputs(num_serving > 0 or waits_until is not None)
        reason = lease.reason_to_close(inputs)
        if reason is not None:
            lease.close(reason, now)
            if book is not None:
                self._seeding.close(window, book)
            self._closed_at, self._has_woken = now, False
        for instance in self._instance_table.reserved.values():
            self._order(instance)
        asleep = all(i.state is InstanceState.ASLEEP for i in self._instance_table.reserved.values())
        if lease.state is LeaseState.CLOSING and asleep:
            lease.grant(now)
            if self._was_awake:
                self._seeding.asleep(now - self._closed_at)
            self._was_awake = False
            self._context.emit(GrantLease(self._step()))
        self._watch_window(inputs, look_at)
        self._watch_recall(inputs, waits_until)

    def trained_before(self, book: StepResponses, num_live: int) -> None:
        """The step before an open one is trained: the trainer would wait for the open one, holding the GPUs.
        They are recalled for the window that a step has at its start, unless there is to be none."""
        now = self._context.now
        book.is_ahead = False
        self._seeding.restart()
        can_help = any(i.is_connected for i in self._instance_table.reserved.values())
        if not book.num_unfinished or not can_help or self.lease.state is not LeaseState.TRAINER:
            return
        self._seeding.look(OpenWindow(now, now, num_live), book)
        if not self._seeding.skips_window:
            self._recall("the step before is trained")

    def _recall(self, why: str) -> None:
        self.lease.recall(why, self._context.now)
        self._context.emit(RecallLease(self._step()))

    def _waits_until(self) -> float | None:
        """Return until when loading spot instances are as good as serving ones; None: they are not."""
        book = self._work.steps.first
        if book is None or not self._seeding.skips_window:
            return None
        until = book.started_at + LOADING_S
        return until if self._context.now < until else None

    def _note_waking(self) -> None:
        if not self._has_woken and any(i.version is not None for i in self._instance_table.reserved.values()):
            self._has_woken = self._was_awake = True
            self._seeding.woken(self._context.now - self.lease.opened_at)

    def _inputs(self, has_serving_spot: bool) -> LeaseInputs:
        reserved, book = self._instance_table.reserved, self._work.steps.first
        has_work = book is not None and (book.is_ahead or not book.num_unfinished)
        return LeaseInputs(
            now=self._context.now,
            num_unfinished=self._work.steps.num_unfinished,
            has_serving_spot=has_serving_spot,
            has_reserved=self._context.config.reserved_instances > 0 or bool(reserved),
            can_recall=not has_work and any(i.is_connected for i in reserved.values()),
            t_seed_s=self._seeding.t_seed_s,
            only_serves=self._context.config.autoscaling is not None,
        )

    def _order(self, instance: Instance) -> None:
        if not instance.is_connected:
            return
        if self.lease.state is LeaseState.ENGINES:
            if instance.state is InstanceState.ASLEEP and not self._context.is_ending:
                self._controller.wake(instance)
        elif len(instance.aborting) < len(instance.assignments):
            self._work.abort_all(instance)
        elif instance.assignments:
            return  # asked for; its releases are on their way
        elif instance.is_awake:
            self._controller.sleep(instance)

    def _watch_window(self, inputs: LeaseInputs, look_at: float | None) -> None:
        closes_at = self.lease.closes_at(inputs.t_seed_s)
        is_open = self.lease.state is LeaseState.ENGINES and not inputs.only_serves
        if is_open and closes_at > inputs.now:
            due = closes_at if look_at is None else min(closes_at, look_at)
            self._context.timers.set(Timer.WINDOW, "", due)
        else:
            self._context.timers.cancel(Timer.WINDOW, "")

    def _watch_recall(self, inputs: LeaseInputs, waits_until: float | None) -> None:
        since = self.lease.watch_for_recall(inputs)
        if since is None:
            if waits_until is not None and self.lease.state is LeaseState.TRAINER:
                self._context.timers.set(Timer.RECALL, "", waits_until)
            else:
                self._context.timers.cancel(Timer.RECALL, "")
            return
        due = since + self._context.config.recall_after_s
        if inputs.now < due:
            self._context.timers.set(Timer.RECALL, "", due)
            return
        self._context.timers.cancel(Timer.RECALL, "")
        self._context.counters.recalls += 1
        self._recall("work is left and no spot instance serves")

    def _step(self) -> int:
        newest = self._work.steps.newest
        assert newest is not None, "the lease moves only for a step"
        return newest.step
