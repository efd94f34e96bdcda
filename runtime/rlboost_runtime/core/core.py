"""The core: every scheduling decision of a run, as a pure function of events and their times.

`Core.handle` takes one event and returns the commands that follow from it. The live coordinator and the
simulator drive this same object; a log of events driven through a fresh core gives the same commands.
It reads no clock, opens nothing, draws no random number and logs nothing.

After every event, `check` holds. What it promises a run (design, section 4):

- every response that was asked for ends exactly once: finished, cancelled by another step, or withdrawn;
- work goes only to an instance that has proved, in its present life, the step's policy version, or a newer
  one where the step goes on under those;
- a response continues from the tokens it keeps on another instance whenever its own goes;
- with no spot instance the reserved engines do everything, and get the GPU back from the trainer if need be;
- a machine is asked to end until the provider reports that it is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import assert_never

from rlboost_runtime.core.base.messages import (
    Command,
    CoordinatorRestarted,
    CoreConfig,
    Disconnected,
    Event,
    EventsLost,
    Finished,
    Heartbeat,
    InstanceJoined,
    InstanceLeft,
    InstanceReady,
    LaunchFailed,
    LeaseReturned,
    LossCause,
    MachineGone,
    MachineLaunched,
    NoticeReceived,
    Pool,
    RecallLease,
    Reconnected,
    Released,
    RequestArrived,
    RequestWithdrawn,
    RunEnding,
    RunStarted,
    Slept,
    StepStarted,
    StepTrained,
    Tick,
    TokensLost,
    TrainerLost,
    VersionFetched,
    VersionPublished,
    VersionRefused,
)
from rlboost_runtime.core.base.prior import GpuPrior, Prior
from rlboost_runtime.core.base.timers import INSTANCE_TIMERS, Context, Counters, Timer
from rlboost_runtime.core.base.token_cost import Measured
from rlboost_runtime.core.check import check_core
from rlboost_runtime.core.dispatch.assignments import Assignments
from rlboost_runtime.core.instance_controller import InstanceController
from rlboost_runtime.core.lease_controller import LeaseController, LeaseState
from rlboost_runtime.core.rules import LIVE_RULES, Rules, named
from rlboost_runtime.core.scale_controller import ScaleController
from rlboost_runtime.core.state.eligible import EligibleSet, Terms
from rlboost_runtime.core.state.instances import Instance, InstanceTable
from rlboost_runtime.core.state.machines import Machine, MachineState, MachineTable
from rlboost_runtime.core.state.rates import ENOUGH, Lengths, spread
from rlboost_runtime.core.state.responses import Response, ResponseState, StepResponses
from rlboost_runtime.core.window.seeding_window import (
    CountMeter,
    SeedingWindow,
    StepObservation,
    SurplusWatch,
    desired_machines,
    worthwhile_instances,
)

InstanceMessage = (
    InstanceReady
    | VersionFetched
    | VersionRefused
    | Slept
    | Disconnected
    | Reconnected
    | NoticeReceived
    | InstanceLeft
)
MachineMessage = MachineLaunched | LaunchFailed | MachineGone


SIMILAR_STEPS = 4
"""Of steps that overlap, so many are averaged: one that ends late makes the next one look short."""


class Core:
    """All scheduling state of one run. Only `handle` changes it.

    `rules` has the implementations of the rules that the run's policy names.
    """

    def __init__(self, rules: Rules = LIVE_RULES) -> None:
        self._rules = rules
        self._has_started = False
        self._newest_version: int | None = None
        self._weight_bytes = 0
        self._whole_bytes = 0
        self._published_at: float | None = None
        self._trained_at: float | None = None
        self._finished_at = 0.0
        """When the step that was trained last had all its responses."""
        self._fleet_s: deque[float] = deque(maxlen=SIMILAR_STEPS)
        """Seconds of the fleet that the last steps took, where several are open at once."""
        self._step_s: float | None = None
        self._ahead: dict[int, tuple[StepResponses, float]] = {}
        """Steps that are rolled out and not trained while a later one is rolled out, and how many spot
        instances there were in the mean."""
        self._num_learned = self._num_prior_steps = 0
        self._rates: dict[str, tuple[float, float]] = {}
        self._presence = CountMeter()
        self._surplus = SurplusWatch()
        self._build(Context())

    def _build(self, context: Context) -> None:
        config = context.config
        self._context = context
        self._instance_table = InstanceTable()
        self._eligible = EligibleSet(self._instance_table)
        lengths = Lengths()
        eligible = self._eligible.eligible
        rules, policy = self._rules, config.policy
        dispatcher_of = named("dispatch", rules.dispatch, policy.dispatch)
        dispatcher = dispatcher_of(context, self._instance_table, eligible)
        balancer_of = named("balance", rules.balance, policy.balance)
        balancer = balancer_of(eligible, dispatcher.load_index, lengths, dispatcher.request_lengths)
        self._work = Assignments(context, self._instance_table, eligible, lengths, dispatcher, balancer)
        self._fleet = MachineTable(
            config.boot_deadline_s, context.timers, context.emit, max(1, config.instances_per_machine)
        )
        self._controller = InstanceController(context, self._instance_table, self._work, self._fleet)
        window_of = named("window", rules.windows, policy.window)
        self._step_times = balancer.step_times
        self._seeding = window_of(config, lengths, self._work.pace, balancer.step_times)
        self._lease_controller = LeaseController(
            context, self._instance_table, self._work, self._controller, self._seeding
        )
        self._lease = self._lease_controller.lease
        self._scale = ScaleController(context, eligible, self._work, self._fleet)
        self._worthwhile = worthwhile_instances(None, None, 0.0, config)

    # --- driving ------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Command]:
        """Take in one event; return the commands that follow from it, in order.

        Events that no longer mean anything are counted and ignored; one with a time before the last event's
        is taken to happen at that time. Raises `IllegalMove` only for a bug in the core.
        """
        context = self._context
        if event.at < context.now:
            event = replace(event, at=context.now)
        context.now = event.at
        context.commands.clear()
        if self._route(event):
            self._settle()
        return list(self._context.commands)

    def next_deadline(self) -> float | None:
        """Return when the next `Tick` is due, in seconds of the run; None if there is no deadline."""
        return self._context.timers.earliest()

    def check(self) -> None:
        """Assert every invariant. Slow, as it looks at everything: for tests and debugging."""
        check_core(self._instance_table, self._work, self._fleet, self._lease, self._context)
        self._refresh_eligible()
        self._eligible.check()
        eligible = self._eligible.eligible
        stalled = [r for r in self._work.dispatcher.queued() if not r.failed_on] if eligible else []
        may_stall = self._work.dispatcher.may_stall
        idle = [i for i in eligible.values() if not i.assignments]
        for response in [] if may_stall else stalled:
            free = [i.instance for i in idle if self._work.dispatcher.may_run(response, i)]
            assert not free, f"responses wait although {free} are empty"
        present = sum(i.is_present for i in self._instance_table.spot())
        assert present == self._presence.count, f"{present} spot instances, {self._presence.count} metered"

    # --- what status and shells read ----------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Time of the last event."""
        return self._context.now

    @property
    def config(self) -> CoreConfig:
        """The run's tunables."""
        return self._context.config

    @property
    def step(self) -> StepResponses | None:
        """The step that was asked for last; it stays open, all finished, until the next one."""
        return self._work.steps.newest

    @property
    def open_steps(self) -> list[StepResponses]:
        """All open steps, oldest first: several only with in-flight updates."""
        return list(self._work.steps)

    @property
    def open_requests(self) -> Mapping[int, Response]:
        """The requests outside a step that have not ended."""
        return MappingProxyType(self._work.requests.responses)

    @property
    def is_ending(self) -> bool:
        """True if the run is winding up: no step is opened any more."""
        return self._context.is_ending

    @property
    def newest_version(self) -> int | None:
        """The newest published version."""
        return self._newest_version

    @property
    def weight_bytes(self) -> int:
        """Bytes of the version published last, as an instance pulls it; 0: not known."""
        return self._weight_bytes

    @property
    def instances(self) -> Mapping[str, Instance]:
        """Live instances by name."""
        return MappingProxyType(self._instance_table.instances)

    @property
    def machines(self) -> Mapping[str, Machine]:
        """Spot machines of the run by name, also those that went within the last minutes."""
        return MappingProxyType(self._fleet.machines)

    @property
    def lease(self) -> LeaseState:
        """Who holds the reserved GPUs."""
        return self._lease.state

    @property
    def seeding(self) -> SeedingWindow:
        """The learned window, N_prem and memory."""
        return self._seeding

    @property
    def useful_instances(self) -> int:
        """Spot instances worth having; in a run that only serves, those that its load wants."""
        wanted = self._scale.wanted
        return self._worthwhile if wanted is None else wanted

    def measured(self) -> Measured:
        """Return what the run has shown of engines, places, steps and versions: offers are ranked by it."""
        return Measured(
            engine_tokens_per_s=dict(self._rates),
            places=self._fleet.places(self.now),
            step_s=self._step_s,
            version_bytes=self._weight_bytes,
            whole_bytes=self._whole_bytes,
        )

    def prior(self) -> Prior | None:
        """Return what the run hands on to the next one like it; None before it has learned from a step."""
        if not self._num_learned or not self._work.lengths.is_known:
            return None
        return Prior(
            num_steps=self._num_learned,
            window=self._seeding.prior(),
            lengths=spread(self._work.lengths.first, ENOUGH),
            engines=self._step_times.prior(),
            gpus=tuple(GpuPrior(gpu, *rate) for gpu, rate in self._rates.items()),
            step_s=self._step_s,
            version_bytes=self._weight_bytes,
            whole_bytes=self._whole_bytes,
        )

    @property
    def num_prior_steps(self) -> int:
        """Steps of a former run that this one began with what they showed; 0: it began with nothing."""
        return self._num_prior_steps

    @property
    def counters(self) -> Counters:
        """Counts since the run began."""
        return self._context.counters

    def observation(
        self, at: float, wait_s: float, busy_s: float, handover_s: float = 0.0
    ) -> StepObservation | None:
        """Return what was observed of the open step by `at`, given the trainer's times.

        None before its last response is finished, and for a step that was requested again, by a restarted
        trainer or for more prompts: its times span two processes, or two rollouts.
        """
        book = self._work.steps.newest
        if book is None:
            return None
        return self._observed(
            book, self._presence.mean(at), StepTrained(at, book.step, wait_s, busy_s, handover_s)
        )

    def _observed(self, book: StepResponses, n_prem: float, event: StepTrained) -> StepObservation | None:
        if book.last_finished_at is None or book.was_reopened:
            return None
        trained_at = book.started_at if self._trained_at is None else self._trained_at
        return StepObservation(
            n_prem=n_prem,
            n_hat=self._presence.count,
            t_train_wait=event.wait_s,
            t_remote_wait=event.at - book.last_finished_at,
            t_train=event.busy_s,
            t_remote=book.last_finished_at - book.started_at,
            num_tokens=sum(r.num_tokens for r in book.responses.values()),
            ended_at=event.at,
            t_handover=event.handover_s,
            t_before=max(0.0, trained_at - book.started_at),
        )

    def response(self, response: int) -> Response:
        """Return a response of an open step, or an open request. Raises `KeyError` for any other."""
        known = self._work.response(response)
        if known is None:
            raise KeyError(response)
        return known

    def complete_groups(self) -> list[int]:
        """Return the groups of the newest step whose responses are all finished, in order of completion."""
        return [] if self.step is None else list(self.step.complete_groups)

    def assignments(self) -> Iterator[tuple[int, int, str]]:
        """Yield the current assignments: assignment, response, instance."""
        for assignment, response in self._work.current.items():
            assert response.holder is not None
            yield assignment, response.response, response.holder

    def responses_on(self, instance: str) -> list[int]:
        """Return the responses that an instance holds; none for an unknown one."""
        known = self._instance_table.instances.get(instance)
        return [] if known is None else [r.response for r in known.assignments.values()]

    # --- events -------------------------------------------------------------------------------------------

    def _route(self, event: Event) -> bool:
        """Pass an event to its handler; return False if nothing can follow from it."""
        if isinstance(event, Heartbeat):  # first: nine of ten events of a long log, estimates and leases
            return self._on_heartbeat(event)
        if isinstance(event, InstanceMessage):
            self._on_instance_message(event)
            return True
        match event:
            case RunStarted():
                self._on_run_started(event)
            case CoordinatorRestarted():
                self._on_coordinator_restarted(event)
            case StepStarted():
                self._on_step_started(event)
            case RequestArrived():
                self._on_request(event)
            case RequestWithdrawn():
                self._on_withdrawn(event)
            case StepTrained():
                self._on_step_trained(event)
            case VersionPublished():
                self._on_version_published(event)
            case LeaseReturned():
                self._on_lease_returned(event)
            case TrainerLost():
                pass  # its work goes on; it gives the GPU back by asking for a step
            case InstanceJoined():
                self._controller.joined(event)
            case Finished():
                self._on_finished(event)
            case TokensLost():
                self._on_tokens_lost(event)
            case EventsLost():
                self._on_events_lost(event)
            case Released():
                self._controller.released(event)
            case MachineLaunched() | LaunchFailed() | MachineGone():
                self._on_machine_message(event)
            case RunEnding(reason=reason):
                self._on_run_ending(reason)
            case Tick():
                for timer, subject in self._context.timers.pop_due(event.at):
                    self._on_deadline(timer, subject)
            case _:
                assert_never(event)
        return True

    def _on_heartbeat(self, event: Heartbeat) -> bool:
        instance = self._instance_table.current(event.instance, event.epoch)
        if instance is None:
            self._context.counters.stale_events += 1
            return False
        return self._controller.beat(instance, event)

    def _on_instance_message(self, event: InstanceMessage) -> None:
        instance = self._instance_table.current(event.instance, event.epoch)
        if instance is None:
            self._context.counters.stale_events += 1
            return
        match event:
            case InstanceReady():
                self._controller.ready(instance, event)
                self._note_boot(instance, event.at)
            case VersionFetched():
                self._controller.fetched(instance, event)
            case VersionRefused():
                self._controller.refused(instance, event)
            case Slept():
                self._controller.slept(instance, event)
            case Disconnected():
                self._controller.disconnected(instance, event)
            case Reconnected():
                self._controller.reconnected(instance, event)
            case NoticeReceived():
                self._controller.noticed(instance, event)
            case InstanceLeft():
                self._controller.lose(instance, event.cause)
            case _:
                assert_never(event)

    def _on_run_started(self, event: RunStarted) -> None:
        if self._has_started:
            self._context.counters.duplicates += 1
            return
        self._has_started = True
        self._build(Context(now=event.at, config=event.config))
        if event.config.autoscaling is not None:
            self._lease.open("the run only serves", event.at)
        if event.prior is not None:
            self._begin_with(event.prior)

    def _begin_with(self, prior: Prior) -> None:
        self._num_prior_steps = prior.num_steps
        self._seeding.begin_with(prior.window)
        self._work.lengths.begin_with(prior.lengths)
        self._step_times.begin_with(prior.engines)
        self._rates = {known.gpu: (known.tokens_per_s, known.bandwidth) for known in prior.gpus}
        self._step_s = prior.step_s
        self._weight_bytes, self._whole_bytes = prior.version_bytes, prior.whole_bytes
        self._size_fleet()

    def _size_fleet(self) -> None:
        self._worthwhile = worthwhile_instances(
            self._seeding.n_prem, self._seeding.rates(), self._weight_bytes, self.config
        )

    def _on_coordinator_restarted(self, event: CoordinatorRestarted) -> None:
        self._controller.coordinator_restarted()
        self._fleet.restarted(event.at, event.num_named)
        self._lease.unserved_since = None
        self._context.is_ending = False  # an ended run that is started again goes on

    def _on_step_started(self, event: StepStarted) -> None:
        if self._context.is_ending:
            self._context.counters.stale_events += 1
            return
        book, state = self._work.steps.get(event.step), self._lease.state
        if book is not None and book.is_for(event):
            book.was_reopened = True
            is_first = self._work.steps.first is book  # with several open steps it is trained, or waited for
            book.is_ahead = event.keeps_lease if event.open_from is None else not is_first
            self._work.add(book, event)
            self._work.deliver_again(book)
        else:
            self._open(event)
        if event.keeps_lease and state in (LeaseState.TRAINER, LeaseState.RECALLING):
            if state is LeaseState.RECALLING:
                self._context.emit(RecallLease(event.step))  # the recall on its way was of another step
        elif not self._work.steps.earlier or state not in (LeaseState.ENGINES, LeaseState.CLOSING):
            self._lease.open(f"step {event.step} asked for", event.at)

    def _open(self, event: StepStarted) -> None:
        former = self._work.steps.newest
        is_ahead = former is not None and not former.trained and former.step < event.step
        is_ahead = (
            is_ahead
            and former is not None
            and (
                event.keeps_lease and not former.num_unfinished
                if event.open_from is None
                else event.open_from <= former.step
            )
        )
        if not is_ahead:
            self._ahead.clear()
            self._seeding.restart()
        elif former is not None:  # the window of the step that is trained is still to be learned from
            self._ahead[former.step] = former, self._presence.mean(event.at)
        self._work.open(event)
        if self._work.steps.newest is not None and self._work.steps.earlier:
            self._work.steps.newest.is_ahead = True
        self._presence.restart(event.at)

    def _on_request(self, event: RequestArrived) -> None:
        if self._context.is_ending:
            self._context.counters.stale_events += 1
        elif not self._work.request(event.request):
            self._context.counters.duplicates += 1

    def _on_withdrawn(self, event: RequestWithdrawn) -> None:
        response = self._work.requests.responses.get(event.response)
        if response is None:
            self._context.counters.stale_events += 1
        else:
            self._work.withdraw(response)

    def _on_step_trained(self, event: StepTrained) -> None:
        book = self._work.steps.newest
        if book is not None and event.step < book.step:
            self._on_trained_before(event)
            return
        if book is None or book.step != event.step or book.num_unfinished:
            self._context.counters.stale_events += 1
            return
        if book.trained:
            self._context.counters.duplicates += 1
            return
        book.trained = True
        self._learn(self.observation(event.at, event.wait_s, event.busy_s, event.handover_s), event.at)
        self._shrink(event.at)

    def _learn(self, seen: StepObservation | None, at: float) -> None:
        """Take in a trained step."""
        self._learn_step(at)
        if seen is not None:
            self._seeding.learn(seen)
            self._size_fleet()
            self._num_learned += 1

    def _on_trained_before(self, event: StepTrained) -> None:
        """A step is trained while a later one is rolled out."""
        known = self._work.steps.earlier.get(event.step)
        if known is not None and known.num_unfinished:
            self._context.counters.stale_events += 1
            return
        rolled_out = self._ahead.pop(event.step, None)
        for step in [step for step in self._ahead if step < event.step]:
            del self._ahead[step]
        if rolled_out is not None:
            seen = self._observed(*rolled_out, event)
            self._learn(seen and replace(seen, t_fleet=self._fleet_time(rolled_out[0])), event.at)
        self._work.trained_earlier(event.step)
        following = self._work.steps.first
        if following is not None and following.step == event.step + 1:
            self._lease_controller.trained_before(following, self._eligible.num_live_spot)
        self._shrink(event.at)

    def _fleet_time(self, book: StepResponses) -> float | None:
        """Return the fleet's seconds per step, where several are open at once: from the end of one step's
        rollout to the end of the next, or from its begin if the fleet had nothing to do before."""
        ended_at = book.last_finished_at
        if not book.rank or ended_at is None:
            return None
        self._fleet_s.append(max(0.0, ended_at - max(book.started_at, self._finished_at)))
        self._finished_at = max(self._finished_at, ended_at)
        return sum(self._fleet_s) / len(self._fleet_s)

    def _note_boot(self, instance: Instance, at: float) -> None:
        machine = self._fleet.machines.get(instance.machine) if instance.pool is Pool.SPOT else None
        if machine is not None and not machine.serves:
            published_at = at if self._published_at is None else self._published_at
            had_waited = machine.launched_at is None or machine.launched_at < published_at
            self._fleet.serving(machine, at, had_waited=had_waited)

    def _learn_step(self, at: float) -> None:
        """A step is trained: its time and, while their machines are there, the speed of engines."""
        if self._trained_at is not None:
            last_s = at - self._trained_at
            self._step_s = last_s if self._step_s is None else (self._step_s + last_s) / 2
        self._trained_at = at
        self._learn_rates()

    def _learn_rates(self) -> None:
        lengths = self._work.lengths
        for instance in self._instance_table.spot() if lengths.is_known else ():
            machine = self._fleet.machines.get(instance.machine)
            if machine is None or machine.kind is None:
                continue
            tokens_per_s = self._step_times.full_tokens_per_s(instance.kind, lengths.mean_context)
            if tokens_per_s is not None:
                self._rates[machine.kind.gpu] = tokens_per_s, machine.kind.engine_bandwidth

    def _shrink(self, at: float) -> None:
        surplus = self._superfluous()
        for machine in surplus[: self._surplus.after_step(len(surplus))]:
            self._end_machine(machine, "more machines than are useful", at)

    def _superfluous(self) -> list[Machine]:
        return self._fleet.superfluous(self.useful_instances, self._most_machines(), self._work_on)

    def _work_on(self, machine: Machine) -> int:
        return sum(i.num_assigned for i in self._controller.on_machine(machine))

    def _on_version_published(self, event: VersionPublished) -> None:
        newest = self._newest_version
        self._newest_version = event.version if newest is None else max(newest, event.version)
        self._weight_bytes = event.num_bytes
        self._whole_bytes = max(self._whole_bytes, event.num_bytes)
        if self._published_at is None:
            self._published_at = event.at

    def _on_lease_returned(self, event: LeaseReturned) -> None:
        if self._lease.state is not LeaseState.RECALLING:
            self._context.counters.stale_events += 1
            return
        self._lease.open("the trainer answered the recall", event.at)

    def _on_finished(self, event: Finished) -> None:
        response = self._work.response(event.response)
        if response is None:
            self._context.counters.stale_events += 1
        elif response.state is ResponseState.FINISHED:
            self._context.counters.duplicates += 1
        else:
            self._controller.finished_on(response.holder)
            self._work.finish(response, event.num_tokens, event.reason)

    def _on_tokens_lost(self, event: TokensLost) -> None:
        response = self._work.response(event.response)
        if response is None or response.state is not ResponseState.FINISHED:
            self._context.counters.stale_events += 1
        else:
            self._work.begin_again(response)

    def _on_events_lost(self, event: EventsLost) -> None:
        for instance in list(self._instance_table.instances.values()):
            self._controller.lose(instance, LossCause.RESET, evict=True)
        self._work.skip_to(event.next_assignment)

    def _on_machine_message(self, event: MachineMessage) -> None:
        machine = self._fleet.machines.get(event.machine)
        if machine is None:
            if not (
                isinstance(event, MachineLaunched) and self._fleet.launched_unknown(event.machine, event.at)
            ):
                self._context.counters.stale_events += 1
            return
        match event:
            case MachineLaunched():
                is_new = self._fleet.launched(machine, event.at, event.kind)
            case LaunchFailed():
                is_new = self._fleet.failed(machine, event.problem, event.retry_after_s, event.at)
            case MachineGone():
                is_new = self._on_machine_gone(machine, event.at)
            case _:
                assert_never(event)
        if not is_new:
            self._context.counters.duplicates += 1

    def _on_machine_gone(self, machine: Machine, at: float) -> bool:
        ended_by_us = machine.state is MachineState.TERMINATING
        is_new = self._fleet.gone(machine, at)
        for instance in self._controller.on_machine(machine):
            cause = LossCause.STOPPED if ended_by_us else LossCause.MACHINE_GONE
            self._controller.lose(instance, cause, evict=True)
        return is_new

    def _on_run_ending(self, reason: str) -> None:
        if self._context.is_ending:
            self._context.counters.duplicates += 1
            return
        self._context.is_ending = True
        for instance in self._instance_table.instances.values():
            self._work.abort_all(instance)
        for machine in list(self._fleet.machines.values()):
            if machine.is_alive:
                self._end_machine(machine, f"the run is ending: {reason}", self.now)

    def _on_deadline(self, timer: Timer, subject: str) -> None:
        if timer in INSTANCE_TIMERS:
            self._controller.on_deadline(timer, subject)
            return
        machine = self._fleet.machines.get(subject)
        if machine is None:
            return  # a window, a recall or a launch: the settling after each event sees the time itself
        match timer:
            case Timer.BOOT:
                waited = f"no agent dialled in within {self.config.boot_deadline_s:g} s"
                self._end_machine(machine, waited, self.now)
            case Timer.REJOIN:
                self._fleet.give_up_waiting(machine, self.now)
            case Timer.NOTICE:
                self._end_machine(machine, "its preemption notice has run out", self.now)
            case Timer.TERMINATE:
                self._fleet.ask_for_end(machine, self.now)
            case _:
                pass

    def _end_machine(self, machine: Machine, reason: str, at: float) -> None:
        for instance in self._controller.on_machine(machine):
            self._controller.drain(instance)
        self._fleet.terminate(machine, reason, at)

    # --- what follows from any event ----------------------------------------------------------------------

    def _settle(self) -> None:
        """Bring lease, versions, assignments and fleet in line with what is known now.

        The order matters: the lease decides whether reserved engines are eligible and orders them to wake or
        sleep; the target version decides which instances become eligible; responses are placed before running
        ones are moved; machines are requested last.
        """
        self._refresh_eligible()
        self._lease_controller.settle(self._eligible.num_serving_spot, self._eligible.num_live_spot)
        self._controller.set_target(self._target_version())
        self._refresh_eligible()
        self._work.assign_waiting()
        self._work.balance()
        if self._scale.look():
            for machine in self._superfluous():
                self._end_machine(machine, "the load fits without it", self.now)
        if self._has_started and not self._context.is_ending:
            self._fleet.grow(self.useful_instances, self._most_machines(), self.now)

    def _refresh_eligible(self) -> None:
        oldest, newest = self._served_versions()
        terms = Terms(
            version=oldest,
            newest=newest,
            reserved_may=self._lease.state is LeaseState.ENGINES,
            is_ending=self._context.is_ending,
        )
        changed, self._controller.changed = self._controller.changed, {}
        for name in self._eligible.refresh(terms, changed):
            self._work.touch_name(name)
        if self._eligible.num_present_spot != self._presence.count:
            self._presence.set(self._eligible.num_present_spot, self.now)

    def _served_versions(self) -> tuple[int | None, int | None]:
        """The oldest and the newest version under which work is given out: the step's, with in-flight updates
        up to the newest; without a step to roll out, requests get the one that the fleet is to load."""
        book = self._work.steps.first_unfinished
        is_asked = bool(self._work.requests.responses) or self.config.autoscaling is not None
        if is_asked and book is None:
            target = self._target_version()
            return target, target
        book = book or self._work.steps.newest
        if book is None:
            return None, None
        return book.policy_version, self._newest_version if book.in_flight_updates else book.policy_version

    def _target_version(self) -> int | None:
        """The version to load: the open step's while it has work left, else the newest."""
        book, newest = self._work.steps.first_unfinished, self._newest_version
        is_held = book is not None and not book.in_flight_updates
        if book is not None and is_held and newest is not None and book.policy_version < newest:
            return book.policy_version
        return newest

    def _most_machines(self) -> int:
        return desired_machines(self.config.max_spot_instances, self.config)
