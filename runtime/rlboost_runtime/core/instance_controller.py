"""The instances' part of the core: handles what each of them reports, and decides when it is given up.

Guarantees: an event under a former epoch changes nothing; a lost instance's work goes back to the queue in
the same event; an instance that does not answer, makes no progress or cannot load is given up, never waited
for without end. What may happen to an instance in which state is the table in `state.instance_states`.
"""

from __future__ import annotations

from rlboost_runtime.core.base.messages import (
    Abort,
    Disconnected,
    Evict,
    FinishReason,
    Heartbeat,
    InstanceJoined,
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
    VersionRefused,
    Wake,
)
from rlboost_runtime.core.base.timers import INSTANCE_TIMERS, Context, Timer
from rlboost_runtime.core.dispatch.assignments import Assignments
from rlboost_runtime.core.state.instance_states import InstanceEvent, InstanceState
from rlboost_runtime.core.state.instances import Instance, InstanceTable
from rlboost_runtime.core.state.machines import Machine, MachineState, MachineTable

FAILED_LOADS_BEFORE_EVICTION = 3
"""Failed loads in a row: one may be a broken transfer, three are a broken instance."""
RELOAD_AFTER_S = 1.0
"""Pause before a refused version is loaded again; doubles with each refusal in a row."""
ENGINE_PAUSE_S = 2.0
"""Pause before an instance whose engine failed gets work again; doubles with each failure in a row, or a
dead engine, being the emptiest, would draw and drop the whole queue."""
ENGINE_FAILURES_BEFORE_EVICTION = 5
"""Such pauses in a row, nothing finished in between: about half a minute, time enough to restart an
engine."""


class InstanceController:
    """All instances: handlers of their events, and orders to them."""

    def __init__(
        self, context: Context, instance_table: InstanceTable, work: Assignments, fleet: MachineTable
    ) -> None:
        self._context = context
        self._instance_table = instance_table
        self._work = work
        self._fleet = fleet
        self.changed: dict[str, None] = {}
        """Instances whose eligibility may have changed since `EligibleSet` was last refreshed."""
        self.target: int | None = None
        """The version that instances should serve."""
        self._awaits_order: dict[str, None] = {}
        """Instances that may have to be ordered to load the target version."""

    # --- coming and going ---------------------------------------------------------------------------------

    def joined(self, event: InstanceJoined) -> None:
        """A registration: a new life."""
        if not self._instance_table.is_new(event):
            self._context.counters.duplicates += 1
            return
        former = self._instance_table.instances.get(event.instance)
        machine = self._fleet.machines.get(event.machine) if event.pool is Pool.SPOT else None
        if former is not None:
            same_place = (former.machine, former.pool) == (event.machine, event.pool)
            self.lose(former, LossCause.REPLACED, keeps_machine=same_place)
        if machine is not None:
            self._fleet.joined(machine, event.instance, event.at)
        instance = self._instance_table.join(event)
        if machine is not None and machine.is_leaving:
            instance.apply(InstanceEvent.NOTICED, event.at)
        elif machine is not None and not machine.counts:
            instance.apply(InstanceEvent.DRAINED, event.at)
        self._renew(instance)
        if self._context.config.policy.loads_any_time or not self._work.steps.num_unfinished:
            self._awaits_order[instance.instance] = None
        self.changed[instance.instance] = None

    def disconnected(self, instance: Instance, event: Disconnected) -> None:
        """Its connection closed: it has a grace period to come back."""
        if not instance.is_connected:
            self._context.counters.duplicates += 1
            return
        self._disconnect(instance, LossCause.RESET, self._context.config.reset_grace_s)

    def coordinator_restarted(self) -> None:
        """Every connection is gone, through no fault of the instances: each gets a fresh lease."""
        for instance in self._instance_table.instances.values():
            self._disconnect(instance, LossCause.SILENT, self._context.config.lease_s)
            self._renew(instance)

    def reconnected(self, instance: Instance, event: Reconnected) -> None:
        """It is back in the same life: reconcile what it holds, and repeat orders that may be lost."""
        self._context.timers.cancel(Timer.GRACE, instance.instance)
        instance.apply(InstanceEvent.RECONNECTED, event.at)
        self.changed[instance.instance] = None
        self._renew(instance)
        held = dict.fromkeys(event.assignments)
        for assignment, response in list(instance.assignments.items()):
            if assignment not in held:
                self._work.take_back(response, "not held any more after a reconnect")
        for assignment in held:
            if assignment not in instance.assignments:
                self._context.emit(Abort(instance.instance, instance.epoch, assignment))
            elif assignment in instance.aborting:
                self._work.abort(instance, assignment)
        self._work.expect_progress(instance)
        self._repeat_orders(instance)

    def noticed(self, instance: Instance, event: NoticeReceived) -> None:
        """Its machine will be taken: everything on it drains at once."""
        machine = self._fleet.machines.get(instance.machine) if instance.pool is Pool.SPOT else None
        if machine is not None:
            self._fleet.notice(machine, event.seconds, event.at)
        doomed = [instance] if machine is None else self.on_machine(machine)
        for each in doomed:
            each.apply(InstanceEvent.NOTICED, event.at)
            self.drain(each)

    def lose(
        self, instance: Instance, cause: LossCause, *, evict: bool = False, keeps_machine: bool = False
    ) -> None:
        """End an instance's life; what it held goes back to the queue.

        `keeps_machine`: it begins a new life on the same machine at once, so the machine is not empty.
        """
        machine = self._fleet.machines.get(instance.machine) if instance.pool is Pool.SPOT else None
        cause = LossCause.STOPPED if self._context.is_ending else _true_cause(instance, machine, cause)
        self._work.take_back_all(instance, f"{instance.instance} is lost: {cause}")
        instance.apply(InstanceEvent.LOST, self._context.now, cause)
        self._instance_table.remove(instance)
        self._awaits_order.pop(instance.instance, None)
        self._context.timers.cancel_all(INSTANCE_TIMERS, instance.instance)
        self._context.counters.losses[cause] += 1
        self.changed[instance.instance] = None
        if evict:
            self._context.emit(Evict(instance.instance, instance.epoch, cause))
        if machine is not None and not keeps_machine:
            self._fleet.lost(machine, instance.instance, cause, self._context.now)
            if not machine.instances:
                self._context.counters.preemptions[cause] += 1

    # --- what instances report ----------------------------------------------------------------------------

    def ready(self, instance: Instance, event: InstanceReady) -> None:
        """It proved that it serves a version. One that was ordered to sleep meanwhile serves nothing."""
        self._renew(instance)
        if not instance.accepts(InstanceEvent.PROVED):
            return
        instance.kv_tokens = event.kv_tokens or instance.kv_tokens
        instance.kv_block_tokens = event.kv_block_tokens or instance.kv_block_tokens
        if event.max_running:
            instance.max_running = max(event.max_running, instance.num_assigned)
        instance.apply(InstanceEvent.PROVED, event.at, f"version {event.version}", version=event.version)
        self._context.timers.cancel(Timer.PAUSE, instance.instance)
        self._context.timers.cancel(Timer.RELOAD, instance.instance)
        self.changed[instance.instance] = None
        self._work.touch(instance)
        book = self._work.steps.first_unfinished
        if not (event.version == self.target if book is None else book.takes(event.version)):
            self._work.abort_all(instance)
        if self.target is not None and event.version != self.target:
            self._awaits_order[instance.instance] = None
            if event.version > self.target:  # it loaded past what is asked for: a step was rolled back
                instance.apply(InstanceEvent.ORDER_VOIDED, event.at)

    def fetched(self, instance: Instance, event: VersionFetched) -> None:
        """It has a version's files: in a step with in-flight updates it hands over what it runs, and loads.

        Until then it is given work under its older version, so no token waits for a pull.
        """
        self._renew(instance)
        book = self._work.steps.first_unfinished
        is_wanted = (
            book is not None and book.in_flight_updates and event.version == self.target != instance.version
        )
        if not is_wanted or not instance.accepts(InstanceEvent.SWAP_BEGUN):
            return
        instance.apply(InstanceEvent.SWAP_BEGUN, event.at, f"version {event.version}")
        self.changed[instance.instance] = None
        self._work.abort_all(instance)

    def refused(self, instance: Instance, event: VersionRefused) -> None:
        """It could not load a version, so it serves nothing; order it again a few times."""
        self._renew(instance)
        was_ready = instance.state is InstanceState.READY
        reload_due = self._context.timers.due(Timer.RELOAD, instance.instance)
        # It counts unless it is of an older version or a repetition.
        counts = event.version == instance.ordered_version and reload_due is None
        what = InstanceEvent.LOAD_FAILED if counts else InstanceEvent.REFUSED
        instance.apply(what, event.at, f"refused version {event.version}")
        if was_ready:
            self._work.abort_all(instance)
            self.changed[instance.instance] = None
        if not counts:
            return
        if instance.failed_loads >= FAILED_LOADS_BEFORE_EVICTION:
            self.lose(instance, LossCause.HUNG, evict=True)
            return
        pause_s = RELOAD_AFTER_S * 2 ** (instance.failed_loads - 1)
        self._context.timers.set(Timer.RELOAD, instance.instance, event.at + pause_s)

    def slept(self, instance: Instance, event: Slept) -> None:
        """Its GPU memory is free. At most one Sleep is out at a time, so this answers it."""
        self._renew(instance)
        if not instance.accepts(InstanceEvent.SLEPT):
            self._context.counters.stale_events += 1
            return
        instance.apply(InstanceEvent.SLEPT, event.at)
        self._context.timers.cancel(Timer.ANSWER, instance.instance)

    def beat(self, instance: Instance, event: Heartbeat) -> bool:
        """Renew its lease, and take in its engine's progress and estimates of token counts.

        Returns True if the reported queue length changed, so that an instance may be given work now.
        """
        self._renew(instance)
        if event.engine_progress != instance.progress:
            instance.progress = event.engine_progress
            if instance.is_connected:
                self._work.expect_progress(instance)
        if event.tokens:
            self._count_tokens(instance, event)
        if event.num_queued is None:
            return False
        former = instance.num_queued
        instance.reported_queue = min(event.num_queued, instance.num_assigned)
        self._work.touch(instance)
        return former != instance.num_queued

    def released(self, event: Released) -> None:
        """It let go of an assignment; one that is not current is ignored."""
        response = self._work.current.get(event.assignment)
        if response is None or response.holder != event.instance:
            self._context.counters.stale_events += 1
            return
        instance = self._instance_table.instances[event.instance]
        response.num_tokens = event.num_tokens
        if event.num_tokens >= response.request.max_tokens:  # at its limit: finished by us, never resumed
            self._work.finish(response, event.num_tokens, FinishReason.LENGTH)
            return
        match event.reason:
            case ReleaseReason.RESPONSE_FAILED:
                self._work.fail_on(instance, response)
            case ReleaseReason.ENGINE_FAILED:
                self._work.take_back(response, f"the engine of {instance.instance} failed")
                self._pause(instance)
            case ReleaseReason.ABORTED:
                self._work.take_back(response, f"released by {instance.instance}")

    def finished_on(self, name: str | None) -> None:
        """A response finished on the instance: its engine works."""
        instance = None if name is None else self._instance_table.instances.get(name)
        if instance is not None and instance.engine_failures:
            instance.apply(InstanceEvent.WORKED, self._context.now)

    # --- orders -------------------------------------------------------------------------------------------

    def drain(self, instance: Instance) -> None:
        """Give it no more work and take back what it holds."""
        instance.apply(InstanceEvent.DRAINED, self._context.now)
        self.changed[instance.instance] = None
        self._work.abort_all(instance)

    def wake(self, instance: Instance) -> None:
        """Let a sleeping reserved instance have GPU memory again."""
        instance.apply(InstanceEvent.WOKEN, self._context.now)
        self._context.emit(Wake(instance.instance, instance.epoch))

    def sleep(self, instance: Instance) -> None:
        """Take an idle reserved instance's GPU memory."""
        assert not instance.assignments
        instance.apply(InstanceEvent.SLEEP_ORDERED, self._context.now)
        self.changed[instance.instance] = None
        self._context.emit(Sleep(instance.instance, instance.epoch))
        self._work.expect_answer(instance)

    def set_target(self, target: int | None) -> None:
        """Order the instances that do not have the order yet to load the version `target`."""
        if target != self.target:
            self.target = target
            for name, instance in self._instance_table.instances.items():
                self._awaits_order[name] = None
                self._context.timers.cancel(Timer.RELOAD, name)
                if instance.is_swapping:
                    instance.apply(InstanceEvent.SWAP_VOIDED, self._context.now)
                    self.changed[name] = None
        names, self._awaits_order = self._awaits_order, {}
        for name in names:
            self._order_load(self._instance_table.instances[name])

    def on_machine(self, machine: Machine) -> list[Instance]:
        """Return the live instances of a machine."""
        return [self._instance_table.instances[name] for name in machine.instances]

    # --- deadlines ----------------------------------------------------------------------------------------

    def on_deadline(self, timer: Timer, name: str) -> None:
        """One of an instance's deadlines has passed."""
        instance = self._instance_table.instances.get(name)
        if instance is None:
            return
        match timer:
            case Timer.LEASE:
                self.lose(instance, LossCause.SILENT, evict=True)
            case Timer.GRACE:
                self.lose(instance, instance.loss_cause, evict=True)
            case Timer.HANG | Timer.ANSWER:
                self.lose(instance, LossCause.HUNG, evict=True)
            case Timer.RELOAD:
                instance.apply(InstanceEvent.ORDER_VOIDED, self._context.now)
                self._awaits_order[name] = None
            case Timer.PAUSE:
                instance.apply(InstanceEvent.PAUSE_ENDED, self._context.now)
                self.changed[instance.instance] = None
            case _:
                pass

    # --- helpers ------------------------------------------------------------------------------------------

    def _count_tokens(self, instance: Instance, event: Heartbeat) -> None:
        """Take in token counts of what it runs: estimates for booking, and its speed at that batch size."""
        gained = kv_tokens = batch = 0
        steady: list[int] = []
        estimate = self._work.dispatcher.kv_estimate
        for number, num_tokens in event.tokens:
            response = self._work.response(number)
            if response is not None and response.holder == instance.instance:
                gain = num_tokens - response.num_tokens
                batch, gained = batch + 1, gained + gain
                if response.counted_for == response.assignment:
                    steady.append(gain)
                response.counted_for = response.assignment
                kv_tokens += response.request.prompt_tokens + num_tokens
                response.num_tokens = num_tokens
                instance.rebook(response, estimate(response))
        self._work.touch(instance)
        since, instance.measured_at = instance.measured_at, event.at
        if since is not None and event.at > since and gained > 0:
            seconds = event.at - since
            self._work.balancer.learn(instance, batch, gained, seconds)
            if steady:
                self._work.balancer.learn_step_time(instance, kv_tokens, seconds, steady)
            if instance.pool is Pool.SPOT:
                self._work.pace.learn(instance.share, gained, seconds)

    def _renew(self, instance: Instance) -> None:
        due = self._context.now + self._context.config.lease_s
        self._context.timers.set(Timer.LEASE, instance.instance, due)

    def _disconnect(self, instance: Instance, cause: LossCause, grace_s: float) -> None:
        instance.apply(InstanceEvent.DISCONNECTED, self._context.now, cause=cause)
        self.changed[instance.instance] = None
        timers, name = self._context.timers, instance.instance
        timers.set(Timer.GRACE, name, self._context.now + grace_s)
        timers.cancel(Timer.HANG, name)
        timers.cancel(Timer.ANSWER, name)

    def _order_load(self, instance: Instance) -> None:
        if self.target is None or self.target == instance.ordered_version or self._context.is_ending:
            return
        if not instance.accepts(InstanceEvent.LOAD_ORDERED):
            return  # it is disconnected or draining
        instance.apply(InstanceEvent.LOAD_ORDERED, self._context.now, version=self.target)
        if instance.version != self.target:
            self._context.emit(LoadVersion(instance.instance, instance.epoch, self.target))
            self._work.abort_requests(instance)

    def _repeat_orders(self, instance: Instance) -> None:
        if instance.state is InstanceState.SLEEPING:
            self._context.emit(Sleep(instance.instance, instance.epoch))
            self._work.expect_answer(instance)
        if instance.state is InstanceState.WAKING:
            self._context.emit(Wake(instance.instance, instance.epoch))
        reload_due = self._context.timers.due(Timer.RELOAD, instance.instance)
        if instance.version != self.target and reload_due is None:
            instance.apply(InstanceEvent.ORDER_VOIDED, self._context.now)
        self._awaits_order[instance.instance] = None

    def _pause(self, instance: Instance) -> None:
        if instance.is_paused:
            return  # the same failure: it lets go of everything that it held
        instance.apply(InstanceEvent.ENGINE_FAILED, self._context.now)
        if instance.engine_failures >= ENGINE_FAILURES_BEFORE_EVICTION:
            self.lose(instance, LossCause.HUNG, evict=True)
            return
        self.changed[instance.instance] = None
        pause_s = ENGINE_PAUSE_S * 2 ** (instance.engine_failures - 1)
        self._context.timers.set(Timer.PAUSE, instance.instance, self._context.now + pause_s)


def _true_cause(instance: Instance, machine: Machine | None, cause: LossCause) -> LossCause:
    """Return what a loss is counted as: `noticed` if it was announced, `stopped` if we asked for it."""
    if cause in (LossCause.REPLACED, LossCause.HUNG):
        return cause
    if instance.is_noticed:
        return LossCause.NOTICED
    if machine is not None and machine.state is MachineState.TERMINATING:
        return LossCause.STOPPED
    return cause
