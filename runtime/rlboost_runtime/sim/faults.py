"""Random faults for a simulated run, from a seed: what must never break a promise of the core.

Connections are reset and come back, or not; agents fall silent; engines crash and hang; the trainer and the
coordinator restart; the market takes and gives machines at random, with and without notice.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from random import Random

from rlboost_runtime.core.base.messages import Command, Event
from rlboost_runtime.sim.policies import ORACLE, POLICIES, Switches, policy_setup
from rlboost_runtime.sim.presets import Preset, Workload, presets
from rlboost_runtime.sim.referee import Referee
from rlboost_runtime.sim.world import World
from rlboost_runtime.traces import Trace, TraceEvent

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
        match self._random.randrange(6):
            case 0 | 1:
                agent.reset(self._random.choice((0.1, 0.4, 2.0)))
            case 2:
                agent.fall_silent()
            case 3:
                agent.crash_engine()
            case 4:
                agent.hang()
            case _:
                self._world.restart_coordinator([self._random.uniform(0.1, 40.0) for _ in agents])


def run_with_faults(seed: int, policy: str | None = None) -> FaultReport:
    """Live through one random run, the core's invariants asserted now and then and at its end.

    Raises `AssertionError` where a promise or an invariant is broken.
    """
    random = Random(f"faults/{seed}")  # noqa: S311 a simulation
    name = policy or random.choice([p for p in POLICIES if p != ORACLE])
    preset = small_preset(random)
    setup = policy_setup(name, preset, Switches(*(random.random() < 0.8 for _ in fields(Switches))))
    referee = Referee()
    world = World(preset, random_market(random), setup, seed)

    def watch(event: Event, commands: list[Command]) -> None:
        referee(event, commands)
        if referee.num_events % CHECK_EVERY == 0:
            world.core.check()

    world.watch = watch
    faults = Faults(world, random)
    faults.plan()
    world.run(RUN_S)
    world.core.check()
    kills, steps = len(world.recorder.kills), len(world.recorder.rows)
    return FaultReport(seed, name, faults.count, kills, steps, world.num_events, world.digest)
