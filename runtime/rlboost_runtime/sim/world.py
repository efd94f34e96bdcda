"""The virtual world around one core: sends it events, executes its commands, and records both.

Plays the coordinator's shell. Events and commands are the live ones; time comes from the agenda alone, so
the same preset, trace, policy and seed give the same commands (`digest`).
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rlboost_runtime.core.base.messages import (
    Abort,
    Assign,
    Command,
    CoordinatorRestarted,
    DeliverGroup,
    Disconnected,
    Event,
    Evict,
    Finished,
    GrantLease,
    LaunchMachine,
    LoadVersion,
    Pool,
    RecallLease,
    RunStarted,
    Sleep,
    TerminateMachine,
    Tick,
    Wake,
)
from rlboost_runtime.core.base.prior import Prior
from rlboost_runtime.core.base.token_cost import MachineKind
from rlboost_runtime.core.core import Core
from rlboost_runtime.core.lease_controller import LeaseState
from rlboost_runtime.sim.agents import AgentCosts, SimAgent
from rlboost_runtime.sim.clock import Agenda, SharedLink
from rlboost_runtime.sim.cloud import RentedMachine, SimCloud
from rlboost_runtime.sim.engine_model import EngineSpeed, engine_speed
from rlboost_runtime.sim.episodes import EpisodePlay, EpisodeStore
from rlboost_runtime.sim.oracle import simulate_oracle
from rlboost_runtime.sim.policies import ORACLE, PolicySetup, Switches, policy_setup
from rlboost_runtime.sim.presets import MachineShape, Preset
from rlboost_runtime.sim.responses import ResponseStore
from rlboost_runtime.sim.result import RESERVED, Activity, Kill, Recorder, SimResult, StepRow, summed_up
from rlboost_runtime.sim.trainer_model import SimTrainer
from rlboost_runtime.traces import Trace

RESTART_S = 3.0
"""Until a reserved engine whose agent was dropped is there again."""
Watch = Callable[[Event, list[Command]], None]
"""Sees every event and the commands that followed; tests check the core there."""


@dataclass(slots=True)
class _Totals:
    """Of agents that are gone."""

    tokens_lost: int = 0
    prefill_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Mark:
    """What had been counted when the open step began."""

    at: float = 0.0
    t_seed_s: float = 0.0
    seeded_s: float = 0.0
    usd: float = 0.0
    migrations: int = 0
    redone: int = 0


class World:
    """One run in virtual time."""

    def __init__(
        self,
        preset: Preset,
        trace: Trace,
        setup: PolicySetup,
        seed: int,
        *,
        watch: Watch | None = None,
        prior: Prior | None = None,
    ) -> None:
        self.agenda = Agenda()
        self.core = Core(setup.rules)
        self.recorder = Recorder()
        self.num_events = 0
        self.link = SharedLink(self.agenda, preset.reserved_nodes * preset.reserved.link_bytes_per_s)
        workload = preset.workload
        self.responses = ResponseStore(workload.group_size, workload.max_response_tokens)
        self._episodes: EpisodePlay | None = None
        if workload.turns is not None:
            store = EpisodeStore(workload.group_size, workload.max_response_tokens)
            self.responses, self._episodes = store, EpisodePlay(self, store, workload.turns.concurrency)
        self.cloud = SimCloud(self, trace, preset.spot, preset.assumptions.retry_s)
        self._preset = preset
        self._setup = setup
        self.watch = watch
        self._prior = prior
        self._digest = hashlib.blake2b(digest_size=16)
        self._agents: dict[str, SimAgent] = {}
        self._of_machine: dict[str, list[SimAgent]] = {}
        self._retired = _Totals()
        self.egress_usd = 0.0
        self._newest_on: dict[str, int] = {}  # by machine: the version that travelled last
        waits_for_weights = not setup.config.policy.loads_any_time
        weight_bytes = round(setup.wire_share * preset.model.weight_bytes)
        self._trainer = SimTrainer(
            self,
            preset,
            seed,
            waits_for_weights=waits_for_weights,
            works_early=setup.works_early,
            weight_bytes=weight_bytes,
        )
        self._speeds: dict[tuple[MachineShape, float], EngineSpeed] = {}
        self._inbox: deque[Event] = deque()
        self._unsettled: dict[SimAgent, None] = {}
        self._is_draining = False
        self._next_epoch = 0
        self._step_began = _Mark()
        self.mean_spot_machines = 0.0
        """Time average of billed spot machines until the end of the last step."""
        self.startup_usd = 0.0
        """Spent before the first step."""
        self.bill: dict[str, float] = {}
        """Dollars by part until the end of the last step."""

    # --- driving ------------------------------------------------------------------------------------------

    def run(
        self,
        end_s: float,
        max_steps: int | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        """Live until `end_s` or `max_steps`, and until a step is finished; what is open then is not
        counted."""
        rows = self.recorder.rows
        self.cloud.begin()
        while (when := self.agenda.next_time()) == 0.0:
            self.agenda.step()
        self.send(RunStarted(0.0, self._setup.config, prior=self._prior))
        self._start_reserved()
        if startup_s := self._preset.assumptions.startup_s:
            self.agenda.after(startup_s, self._trainer.begin)
        else:
            self._trainer.begin()
        while not rows or (self.agenda.now < end_s and len(rows) != max_steps):
            when, deadline = self.agenda.next_time(), self.core.next_deadline()
            if deadline is not None and (when is None or deadline <= when):
                self.agenda.now = max(self.agenda.now, deadline)
                self.send(Tick(self.agenda.now))
            else:
                assert when is not None, "nothing will ever happen again"
                self.agenda.step()
                self._drain()
            if progress is not None:
                progress(self.agenda.now)
        self.recorder.close(self.agenda.now)

    def agents(self) -> list[SimAgent]:
        """Return the agents, in the order in which they joined."""
        return list(self._agents.values())

    def restart_coordinator(self, back_after_s: list[float]) -> None:
        """The coordinator is replaced: agents, in order, are back after so many seconds."""
        self.send(CoordinatorRestarted(self.agenda.now))
        for agent, seconds in zip(self.agents(), back_after_s, strict=False):
            agent.reset(seconds, reports=False)

    def restart_trainer(self, back_after_s: float) -> None:
        """The trainer's process ends; another is ready after so many seconds."""
        self._trainer.restart(back_after_s)

    @property
    def digest(self) -> str:
        """Digest of all commands so far, in order."""
        return self._digest.hexdigest()

    def tokens_lost(self) -> int:
        """Return the tokens generated and not kept until now."""
        lost = sum(agent.tokens_lost for agent in self._agents.values())
        return self._retired.tokens_lost + lost + self.responses.tokens_redone

    def repeated_prefill_s(self) -> float:
        """Return the engines' seconds in prefills of what had been begun elsewhere."""
        return self._retired.prefill_s + sum(a.engine.repeated_prefill_s for a in self._agents.values())

    # --- what the parts report ----------------------------------------------------------------------------

    def send(self, event: Event) -> None:
        """Give the core an event, after those before it."""
        self._inbox.append(event)
        self._drain()

    def queued_at_core(self, instance: str) -> int:
        """Return how many of its assignments the core takes for queued."""
        known = self.core.instances.get(instance)
        return 0 if known is None else known.num_queued

    def note(self, event: Event) -> None:
        """Let the core handle an event once it has handled those of this moment."""
        self._inbox.append(event)

    def will_settle(self, agent: SimAgent) -> None:
        """Settle the agent once the core has handled every event of this moment."""
        self._unsettled[agent] = None

    def finished(self, response: int) -> None:
        """A response is complete, or a turn of an episode."""
        if self._episodes is not None and self._episodes.turn_finished(response):
            return
        if self.responses.is_open(response):
            self._inbox.append(self._finish(response))
            self._trainer.response_finished(response)

    def _finish(self, response: int) -> Finished:
        return Finished(self.agenda.now, response, *self.responses.finish(response))

    def activity(self, agent: SimAgent, what: Activity) -> None:
        """A spot instance's activity changes."""
        if agent.pool is Pool.SPOT:
            self.recorder.begin(agent.machine, what, self.agenda.now)
        elif what == "rollout" and self.core.lease is LeaseState.ENGINES:
            self.trainer_activity("seed")

    def generated(self, tokens: int) -> None:
        """Engines have generated more tokens."""
        self.recorder.generated(tokens, self.agenda.now)

    def pulled(self, machine: str, version: int, num_bytes: float) -> None:
        """An instance has a version, which weighs so much; to a machine it travels once."""
        if self._newest_on.get(machine) != version:
            self._newest_on[machine] = version
            shape = self.cloud.shape_of(machine)
            price = 0.0 if shape is None else self._preset.egress_of(shape)
            self.egress_usd += price * num_bytes / 1e9

    def is_step_open(self, step: int) -> bool:
        """Return True if the core has that step open."""
        return any(book.step == step for book in self.core.open_steps)

    def step_asked(self, responses: Sequence[int]) -> None:
        """A step has been asked for: its episodes begin, or the core learns which responses are finished of
        one that was asked for before."""
        if self._episodes is not None:
            self._episodes.begin()
            return
        for response in responses:
            if self.responses.is_finished(response) and self.core.response(response).finish_reason is None:
                self._inbox.append(self._finish(response))
        self._drain()

    def all_loaded(self) -> bool:
        """Return True if every spot instance serves the newest version."""
        return not any(a.is_loading for a in self._agents.values() if a.pool is Pool.SPOT and not a.is_dead)

    # --- the reserved node --------------------------------------------------------------------------------

    def trainer_activity(self, what: Activity) -> None:
        """The reserved node's activity changes."""
        self.recorder.begin(RESERVED, what, self.agenda.now)

    def step_began(self, *, gives_back: bool) -> None:
        """The trainer begins with a step."""
        if gives_back:
            self.trainer_activity("hand-over")
        now = self.agenda.now
        if not self.recorder.rows:
            self.startup_usd = self._usd()
        self._step_began = _Mark(
            at=now,
            t_seed_s=self.core.seeding.t_seed_s,
            seeded_s=self.recorder.reserved_s("seed", now),
            usd=self._usd(),
            migrations=self.core.counters.migrations,
            redone=self.responses.tokens_redone,
        )

    def step_ended(self, step: int, wait_s: float, train_s: float, tokens: Sequence[int]) -> None:
        """The trainer has published."""
        began, now = self._step_began, self.agenda.now
        observed = self.core.observation(now, wait_s, train_s)
        self.recorder.rows.append(
            StepRow(
                step=step,
                started_s=began.at,
                seconds=now - began.at,
                tokens=sum(tokens),
                t_seed_s=began.t_seed_s,
                seeded_s=self.recorder.reserved_s("seed", now) - began.seeded_s,
                wait_s=wait_s,
                train_s=train_s,
                spot_instances=self._num_present() if observed is None else observed.n_prem,
                useful_instances=self.core.useful_instances,
                longest_tokens=max(tokens),
                usd=self._usd() - began.usd,
                migrations=self.core.counters.migrations - began.migrations,
                tokens_redone=self.responses.tokens_redone - began.redone,
            )
        )
        spot_usd, spot_s = self.cloud.billed()
        self.mean_spot_machines = spot_s / now
        self.bill = {
            "start-up": self.startup_usd,
            "spot": spot_usd,
            "egress": self.egress_usd,
            "spot hours": spot_s / 3600.0,
        }

    def _num_present(self) -> float:
        return sum(i.is_present for i in self.core.instances.values() if i.pool is Pool.SPOT)

    def _usd(self) -> float:
        reserved = self._preset.reserved_usd_per_hour * self.agenda.now / 3600.0
        return self.cloud.billed()[0] + reserved + self.egress_usd

    # --- spot machines ------------------------------------------------------------------------------------

    def usd_per_token(self, shape: MachineShape) -> float:
        """Return what the tokens of a machine cost, by what the core has measured so far."""
        return self._preset.usd_per_token(shape, self.core.measured())

    def kind_of(self, shape: MachineShape) -> MachineKind:
        """Return what the core is told of a machine."""
        return self._preset.kind_of(shape)

    def machine_begins(self, rented: RentedMachine) -> None:
        """A machine boots; its agents dial in when it is up."""
        self.recorder.begin(rented.machine, "boot", self.agenda.now)
        self._of_machine[rented.machine] = []
        self.agenda.after(self._preset.assumptions.boot_s, lambda: self._booted(rented))

    def machine_noticed(self, machine: str, seconds: float) -> None:
        """A machine will be taken."""
        for agent in self._of_machine.get(machine, ()):
            agent.notice(seconds)

    def machine_dies(self, rented: RentedMachine, *, by_cloud: bool, was_noticed: bool) -> None:
        """A machine ends."""
        now = self.agenda.now
        for agent in self._of_machine.pop(rented.machine):
            agent.kill()
            self._retire(agent)
            if by_cloud:
                self.send(Disconnected(now, agent.instance, agent.epoch))
        self.recorder.stop(rented.machine, now)
        if by_cloud or was_noticed:  # one that was noticed may have ended before it was taken
            self.recorder.kills.append(Kill(now, rented.machine, rented.node, was_noticed))

    def _booted(self, rented: RentedMachine) -> None:
        agents = self._of_machine.get(rented.machine)
        if agents is None:
            return  # it went while it booted
        assumptions = self._preset.assumptions
        costs = AgentCosts(
            weight_bytes=self._setup.wire_share * self._preset.model.weight_bytes,
            link_bytes_per_s=rented.shape.link_bytes_per_s / rented.shape.engines,
            apply_s=assumptions.apply_s,
            sleep_s=0.0,
            wake_s=0.0,
            frozen_bytes=assumptions.frozen_bytes,
        )
        for index in range(rented.shape.engines):
            name = f"{rented.machine}-{index}"
            speed = self._speed(rented.shape, self._preset.assumptions.spot_memory_share)
            agents.append(self._join(name, rented.machine, Pool.SPOT, speed, costs))

    def _start_reserved(self) -> None:
        assumptions = self._preset.assumptions
        costs = AgentCosts(0.0, 0.0, assumptions.apply_s, assumptions.sleep_s, assumptions.wake_s)
        speed = self._speed(self._preset.reserved, assumptions.reserved_memory_share)
        for index in range(self._preset.reserved_engines):
            self._join(f"head-{index}", "head", Pool.RESERVED, speed, costs)

    def _join(self, name: str, machine: str, pool: Pool, speed: EngineSpeed, costs: AgentCosts) -> SimAgent:
        agent = SimAgent(self, name, machine, pool, self._next_epoch, speed, costs)
        self._next_epoch += 1
        self._agents[name] = agent
        agent.join()
        return agent

    def _speed(self, shape: MachineShape, memory_share: float) -> EngineSpeed:
        key = shape, memory_share
        if key not in self._speeds:
            preset = self._preset
            self._speeds[key] = engine_speed(
                preset.model, shape, memory_share, preset.calibration, preset.assumptions
            )
        return self._speeds[key]

    def _retire(self, agent: SimAgent) -> None:
        del self._agents[agent.instance]
        self._retired.tokens_lost += agent.tokens_lost
        self._retired.prefill_s += agent.engine.repeated_prefill_s

    # --- the shell ----------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Let the core handle all waiting events, then let engines go on, until no event is left."""
        if self._is_draining:
            return
        self._is_draining = True
        while self._inbox or self._unsettled:
            if self._inbox:
                self._handle(self._inbox.popleft())
                continue
            unsettled, self._unsettled = self._unsettled, {}
            for agent in unsettled:
                agent.settle()
        self._is_draining = False

    def _handle(self, event: Event) -> None:
        self.num_events += 1
        commands = self.core.handle(event)
        if self.watch is not None:
            self.watch(event, commands)
        for command in commands:
            self._digest.update(_fingerprint(command))
            self._execute(command)

    def _execute(self, command: Command) -> None:
        match command:
            case Assign(response=response) if self.responses.is_finished(response):
                self._inbox.append(self._finish(response))  # it came with a step that is asked for again
            case Assign() | Abort() | LoadVersion() | Evict():
                self._to_agent(command)
            case Sleep() | Wake():
                self.trainer_activity("hand-over")
                self._to_agent(command)
            case DeliverGroup(step=step, group=group):
                self._trainer.group_finished(step, group)
            case GrantLease():
                self._trainer.granted()
            case RecallLease():
                self._trainer.recalled()
            case LaunchMachine(machine=machine):
                self.cloud.launch(machine)
            case TerminateMachine(machine=machine):
                self.cloud.terminate(machine)

    def _to_agent(self, command: Assign | Abort | LoadVersion | Evict | Sleep | Wake) -> None:
        agent = self._agents.get(command.instance)
        if agent is None or agent.epoch != command.epoch:
            return
        agent.execute(command)
        if isinstance(command, Evict) and agent.pool is Pool.RESERVED:
            self.agenda.after(RESTART_S, lambda: self._start_again(agent))

    def _start_again(self, agent: SimAgent) -> None:
        """A reserved engine's agent ended: what a supervisor does."""
        self._retire(agent)
        self._join(agent.instance, agent.machine, agent.pool, agent.engine.speed, agent.costs)


def _fingerprint(command: Command) -> bytes:
    return repr(command).encode()


def simulate(
    preset: Preset,
    trace: Trace,
    policy: str,
    *,
    seed: int,
    hours: float,
    max_steps: int | None = None,
    switches: Switches | None = None,
    progress: Callable[[float], None] | None = None,
    watch: Watch | None = None,
) -> SimResult:
    """Simulate `hours` of a policy on a trace, or `max_steps` if they take less; at least one step is
    finished, even if it takes longer.

    `seed` decides the responses' lengths, the same for every policy. `progress` receives the simulated
    seconds, `watch` every event and the core's commands. After the trace's end its last nodes stay. Raises
    what `policy_setup` raises, and `ValueError` for a model that its machines cannot hold.
    """
    if policy == ORACLE and preset.workload.turns is None:
        return simulate_oracle(preset, trace, seed, hours)
    setup = policy_setup(policy, preset, Switches() if switches is None else switches)
    end_s = hours * 3600.0
    world = World(preset, trace, setup, seed, watch=watch)
    world.run(end_s, max_steps, progress)
    summed = summed_up(preset.name, trace.name, policy, seed, hours, world.recorder.rows)
    seconds = summed.rows[-1].started_s + summed.rows[-1].seconds
    return replace(
        summed,
        preemptions=len(world.recorder.kills),
        tokens_lost=world.tokens_lost(),
        mean_spot_machines=world.mean_spot_machines,
        timeline=tuple(world.recorder.intervals),
        throughput=world.recorder.throughput(),
        kills=tuple(world.recorder.kills),
        events=world.num_events,
        commands_digest=world.digest,
        bill=world.bill,
        overheads_s={
            "hand-over": world.recorder.reserved_s("hand-over", seconds),
            "repeated prefill": world.repeated_prefill_s(),
        },
    )
