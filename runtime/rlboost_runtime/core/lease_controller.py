"""Carries out what the GPU lease decides, by orders to the reserved engines and the trainer.

Guarantees: the trainer is granted the GPUs only after every live reserved engine has reported that its memory
is free; an engine has one order at a time (a Wake waits for the answer to a Sleep, a Sleep for the release of
all work); an engine that is lost is waited for no longer.
"""

from __future__ import annotations

from rlboost_runtime.core.base.messages import GrantLease, RecallLease
from rlboost_runtime.core.base.timers import Context, Timer
from rlboost_runtime.core.dispatch.assignments import Assignments
from rlboost_runtime.core.instance_controller import InstanceController
from rlboost_runtime.core.state.instance_states import InstanceState
from rlboost_runtime.core.state.instances import Instance, InstanceTable
from rlboost_runtime.core.window.gpu_lease import GpuLease, LeaseInputs, LeaseState
from rlboost_runtime.core.window.seeding_window import OpenWindow, SeedingWindow

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
        lease, now, book = self.lease, self._context.now, self._work.book
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

    def _waits_until(self) -> float | None:
        """Return until when loading spot instances are as good as serving ones; None: they are not."""
        if self._work.book is None or not self._seeding.skips_window:
            return None
        until = self._work.book.started_at + LOADING_S
        return until if self._context.now < until else None

    def _note_waking(self) -> None:
        if not self._has_woken and any(i.version is not None for i in self._instance_table.reserved.values()):
            self._has_woken = self._was_awake = True
            self._seeding.woken(self._context.now - self.lease.opened_at)

    def _inputs(self, has_serving_spot: bool) -> LeaseInputs:
        reserved = self._instance_table.reserved
        return LeaseInputs(
            now=self._context.now,
            num_unfinished=self._work.num_unfinished,
            has_serving_spot=has_serving_spot,
            has_reserved=self._context.config.reserved_instances > 0 or bool(reserved),
            can_recall=any(i.is_connected for i in reserved.values()),
            t_seed_s=self._seeding.t_seed_s,
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
        if self.lease.state is LeaseState.ENGINES and closes_at > inputs.now:
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
        self.lease.recall(inputs.now)
        self._context.counters.recalls += 1
        self._context.emit(RecallLease(self._step()))

    def _step(self) -> int:
        assert self._work.book is not None, "the lease moves only for a step"
        return self._work.book.step
