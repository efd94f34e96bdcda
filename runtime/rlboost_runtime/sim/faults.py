"""Random faults for a simulated run, from a seed: what must never break a promise of the core.

Connections are reset and come back, or not; agents fall silent; engines crash and hang; the trainer and the
coordinator restart; the market takes and gives machines at random, with and without notice.

`Referee` keeps books of its own and never asks the core. Promises (design, section 4): (1) every response
that was asked for ends exactly once, or is cancelled by another step; (2) each assignment is current or over,
one per response at a time, and tokens never go back except where the policy restarts them; (3, 4) work goes
only to an instance that proved the step's version in its present life; (5) what is finished is never resumed;
(8) nothing launched is forgotten. A group is delivered exactly when its last response has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from random import Random

from rlboost_runtime.core.base.messages import (
    Abort,
    Assign,
    Command,
    DeliverGroup,
    Event,
    Evict,
    Finished,
    GrantLease,
    InstanceJoined,
    InstanceLeft,
    InstanceReady,
    LaunchFailed,
    LaunchMachine,
    LeaseReturned,
    MachineGone,
    Pool,
    RecallLease,
    Reconnected,
    Released,
    RequestArrived,
    Sleep,
    StepStarted,
    StepTrained,
    TerminateMachine,
    VersionPublished,
    Wake,
)
from rlboost_runtime.sim.policies import ORACLE, POLICIES, Switches, policy_setup
from rlboost_runtime.sim.presets import Preset, Workload, presets
from rlboost_runtime.sim.world import Watch, World
from rlboost_runtime.traces import Trace, TraceEvent


@dataclass(frozen=True, slots=True)
class _Asked:
    """One open step, as it was asked for."""

    version: int
    takes_newer: bool
    """Its responses go on under versions that are published later."""
    group: dict[int, int]
    """Group by response."""


@dataclass(slots=True)
class _Life:
    """One registration of an instance."""

    epoch: int
    machine: str
    pool: Pool
    version: int | None = None
    is_asleep: bool = False
    """Ordered to sleep: an earlier report that it serves means nothing."""
    holds: set[int] = field(default_factory=set)
    """Current assignments."""


class Referee:
    """Call with each event and its commands. Raises `AssertionError` as soon as a promise is broken."""

    def __init__(self) -> None:
        self.num_finished = 0
        self.num_events = 0
        self._newest = -1
        """The version published last."""
        self._steps: dict[int, _Asked] = {}
        """The open steps, in the order in which they were asked for."""
        self._open: set[int] = set()
        self._ended: set[int] = set()
        self._tokens: dict[int, int] = {}
        self._delivered: set[tuple[int, int]] = set()
        """By step and group."""
        self._lives: dict[str, _Life] = {}
        self._holder: dict[int, tuple[str, int]] = {}
        """Instance and response by current assignment."""
        self._current: dict[int, int] = {}
        """Current assignment by response."""
        self._used: set[int] = set()
        self._has_gpu = True
        """The trainer has the reserved GPUs."""
        self._machines: set[str] = set()

    def __call__(self, event: Event, commands: list[Command]) -> None:
        """Take in what happened and what followed."""
        self.num_events += 1
        self._take_in(event)
        for command in commands:
            self._see(command)

    def check_done(self, step: int) -> None:
        """A step is trained: nothing of it may be left."""
        asked = self._steps[step].group
        left = sorted(self._open & asked.keys())
        assert not left, f"responses {left[:5]} were asked for and never ended"
        groups = {(step, group) for group in asked.values()}
        assert groups == {each for each in self._delivered if each[0] == step}, "a group was not delivered"

    # --- events -------------------------------------------------------------------------------------------

    def _take_in(self, event: Event) -> None:
        match event:
            case VersionPublished(version=version):
                self._newest = max(self._newest, version)
            case StepStarted():
                self._has_gpu = self._has_gpu and event.keeps_lease
                known = self._steps.get(event.step)
                if known is None or known.version != event.policy_version or not known.group:
                    self._open_step(event)
                else:
                    self._delivered = {each for each in self._delivered if each[0] != event.step}
            case RequestArrived(request=request):
                self._open.add(request.response)
                self._tokens[request.response] = 0
            case StepTrained(step=step) if step in self._steps:
                self.check_done(step)
            case LeaseReturned():
                self._has_gpu = False
            case InstanceJoined():
                self._lose(event.instance)
                self._lives[event.instance] = _Life(event.epoch, event.machine, event.pool)
            case InstanceReady():
                life = self._lives.get(event.instance)
                if life is not None and life.epoch == event.epoch and not life.is_asleep:
                    life.version = event.version
            case InstanceLeft():
                life = self._lives.get(event.instance)
                if life is not None and life.epoch == event.epoch:
                    self._lose(event.instance)
            case Reconnected():
                life = self._lives.get(event.instance)
                if life is not None and life.epoch == event.epoch:
                    for assignment in life.holds - set(event.assignments):
                        self._let_go(assignment)
            case Finished():
                self._end(event)
            case Released():
                response = self._let_go(event.assignment)
                if response is not None:
                    self._tokens[response] = event.num_tokens
            case LaunchFailed() | MachineGone():
                self._machines.discard(event.machine)
            case _:
                pass

    def _open_step(self, event: StepStarted) -> None:
        if event.keeps_lease and event.open_from is None:
            self.check_done(max(self._steps))
        since = event.step if event.open_from is None else event.open_from
        kept = {step: asked for step, asked in self._steps.items() if since <= step < event.step}
        stays = {response for asked in kept.values() for response in asked.group}
        group = {r.response: r.group for r in event.requests}
        assert not self._ended & group.keys(), "a response's number was used twice"
        self._steps = kept | {event.step: _Asked(event.policy_version, event.in_flight_updates, group)}
        self._open = self._open & stays | group.keys()
        self._tokens = {response: self._tokens[response] for response in stays} | dict.fromkeys(group, 0)
        self._delivered = {each for each in self._delivered if each[0] in kept}
        for assignment, (_, response) in list(self._holder.items()):
            if response not in stays:
                self._let_go(assignment)

    def _end(self, event: Finished) -> None:
        if event.response not in self._open:
            assert event.response in self._ended, f"response {event.response} was never asked for"
            return
        assert event.num_tokens >= self._tokens[event.response], "a response became shorter"
        self._open.discard(event.response)
        self._ended.add(event.response)
        self.num_finished += 1
        if event.response in self._current:
            self._let_go(self._current[event.response])

    def _let_go(self, assignment: int) -> int | None:
        instance, response = self._holder.pop(assignment, ("", -1))
        if not instance:
            return None
        self._lives[instance].holds.discard(assignment)
        del self._current[response]
        return response

    def _lose(self, instance: str) -> None:
        life = self._lives.get(instance)
        for assignment in set() if life is None else set(life.holds):
            self._let_go(assignment)
        self._lives.pop(instance, None)

    # --- commands -----------------------------------------------------------------------------------------

    def _see(self, command: Command) -> None:
        match command:
            case Assign():
                self._assigned(command)
            case Abort():
                assert command.assignment in self._used, "aborts what was never assigned"
            case Evict():
                self._lose(command.instance)
            case Sleep():
                life = self._lives[command.instance]
                life.version, life.is_asleep = None, True
            case Wake():
                assert not self._has_gpu, f"{command.instance} is woken on the trainer's GPU"
                self._lives[command.instance].is_asleep = False
            case DeliverGroup(step=step, group=group):
                left = [r for r, its in self._steps[step].group.items() if its == group and r in self._open]
                assert not left, f"group {group} of step {step} is delivered without {left}"
                assert (step, group) not in self._delivered, f"group {group} is delivered twice"
                self._delivered.add((step, group))
            case GrantLease():
                awake = [
                    n for n, i in self._lives.items() if i.pool is Pool.RESERVED and i.version is not None
                ]
                assert not awake, f"the GPU is granted while {awake} serve"
                self._has_gpu = True
            case RecallLease():
                assert self._has_gpu, "recalls what the trainer does not have"
            case LaunchMachine(machine=machine):
                assert machine not in self._machines, f"{machine} is launched twice"
                self._machines.add(machine)
            case TerminateMachine(machine=machine):
                assert machine in self._machines, f"{machine} is ended and not ours"
            case _:
                pass

    def _assigned(self, command: Assign) -> None:
        life, response = self._lives.get(command.instance), command.response
        assert life is not None, f"work for {command.instance}, which does not exist"
        assert life.epoch == command.epoch, f"work for a former life of {command.instance}"
        steps = [asked for asked in self._steps.values() if response in asked.group]
        asked = steps[0] if steps else next(reversed(self._steps.values()))  # a turn: of the newest step
        newest = self._newest if asked.takes_newer else asked.version
        proved = life.version is not None and asked.version <= life.version <= newest
        assert proved, f"{command.instance} has not proved version {asked.version}"
        assert response in self._open, f"response {response} is over, or of another step"
        assert command.assignment not in self._used, "an assignment's number was used twice"
        assert life.pool is Pool.SPOT or not self._has_gpu, "work on the trainer's GPU"
        assert response not in self._current, f"response {response} is generated twice"
        if command.keep_tokens is not None:
            self._tokens[response] = min(self._tokens[response], command.keep_tokens)
        self._used.add(command.assignment)
        self._holder[command.assignment] = command.instance, response
        self._current[response] = command.assignment
        life.holds.add(command.assignment)


RUN_S = 400.0
"""Simulated seconds of a run; about eight steps."""
MEAN_PAUSE_S = 12.0
"""Mean seconds between two faults."""
NODES = 4
CHECK_EVERY = 20
"""Events between two looks at all invariants, which cost more than the events themselves."""


@dataclass(frozen=True, slots=True)
class FaultReport:
    """One run that kept its promises."""

    seed: int
    policy: str
    faults: int
    kills: int
    steps: int
    events: int
    commands_digest: str


def small_preset(random: Random) -> Preset:
    """Return a job whose steps take less than a minute."""
    workload = Workload(
        prompts=random.randint(2, 5),
        group_size=random.randint(1, 4),
        prompt_tokens=100,
        max_response_tokens=random.choice((300, 1_500)),
    )
    workload = replace(workload, max_staleness=random.choice((0, 0, 1, 2)))
    workload = replace(workload, in_flight_updates=workload.max_staleness > 0 and random.random() < 0.7)
    known = presets()["paper-8b"]
    assumptions = replace(
        known.assumptions, length_median=400.0, boot_s=5.0, optimizer_s=1.0, wake_s=1.0, sleep_s=1.0
    )
    return replace(
        known,
        workload=workload,
        assumptions=replace(assumptions, trains_whole_groups=random.random() < 0.5),
        max_spot_instances=random.randint(0, 4),
        seeding_initial_s=random.choice((0.0, 5.0, 20.0)),
    )


def random_market(random: Random) -> Trace:
    """Return a market whose nodes live for some tens of seconds; a third of them are noticed before."""
    events: list[TraceEvent] = []
    for number in range(NODES):
        at = random.choice((0.0, random.uniform(0.0, 60.0)))
        life = 0
        while at < RUN_S:
            node = f"node{number}-{life}"
            end = at + random.expovariate(1 / 60.0) + 1.0
            events.append(TraceEvent(at, node, "add"))
            if random.random() < 1 / 3:
                events.append(TraceEvent(max(at, end - random.uniform(1.0, 20.0)), node, "notice"))
            events.append(TraceEvent(end, node, "remove"))
            at, life = end + random.expovariate(1 / 20.0), life + 1
    order = {"add": 0, "notice": 1, "remove": 2}
    events.sort(key=lambda e: (e.at_s, order[e.kind]))
    within = tuple(e for e in events if e.at_s <= 2 * RUN_S)
    return Trace("random", "generated with random faults", within, 2 * RUN_S + 1)


class Faults:
    """Does something bad now and then."""

    def __init__(self, world: World, random: Random) -> None:
        self.count = 0
        self._world = world
        self._random = random

    def plan(self) -> None:
        """Have the next fault happen in a while."""
        pause = self._random.expovariate(1.0 / MEAN_PAUSE_S)
        self._world.agenda.after(pause, self._happen)

    def _happen(self) -> None:
        self.plan()
        agents = [a for a in self._world.agents() if not a.is_dead and not a.is_cut]
        if not agents:
            return
        self.count += 1
        agent = self._random.choice(agents)
        match self._random.randrange(7):
            case 0 | 1:
                agent.reset(self._random.choice((0.1, 0.4, 2.0)))
            case 2:
                agent.fall_silent()
            case 3:
                agent.crash_engine()
            case 4:
                agent.hang()
            case 5:
                self._world.restart_trainer(self._random.uniform(0.1, 20.0))
            case _:
                self._world.restart_coordinator([self._random.uniform(0.1, 40.0) for _ in agents])


def run_with_faults(seed: int, policy: str | None = None, watch: Watch | None = None) -> FaultReport:
    """Live through one random run, the core's invariants asserted now and then and at its end; `watch` sees
    every event.

    Raises `AssertionError` where a promise or an invariant is broken.
    """
    random = Random(f"faults/{seed}")  # noqa: S311 a simulation
    name = policy or random.choice([p for p in POLICIES if p != ORACLE])
    preset = small_preset(random)
    setup = policy_setup(name, preset, Switches(*(random.random() < 0.8 for _ in fields(Switches))))
    referee = Referee()
    world = World(preset, random_market(random), setup, seed)

    def check(event: Event, commands: list[Command]) -> None:
        referee(event, commands)
        if watch is not None:
            watch(event, commands)
        if referee.num_events % CHECK_EVERY == 0:
            world.core.check()

    world.watch = check
    faults = Faults(world, random)
    faults.plan()
    world.run(RUN_S)
    world.core.check()
    kills, steps = len(world.recorder.kills), len(world.recorder.rows)
    return FaultReport(seed, name, faults.count, kills, steps, world.num_events, world.digest)
