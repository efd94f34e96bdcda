"""The simulator with failures: a constant fleet, so that nothing fails but what is made to."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from benchmarks.ettr.failures import COORDINATOR_BACK_S, WARM_UP_STEPS, Failure
from benchmarks.paper.static import LONG_S, constant_trace
from rlboost_runtime.core.base.messages import Command, Event, Pool, StepStarted
from rlboost_runtime.sim.policies import Switches, policy_setup
from rlboost_runtime.sim.presets import Preset
from rlboost_runtime.sim.world import World


@dataclass(frozen=True, slots=True)
class Measured:
    """The steps after the warm-up."""

    seconds: float
    tokens: int
    failures: int

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens per second of wall time."""
        return self.tokens / self.seconds


class Simulated:
    """One simulated run with its failures."""

    def __init__(
        self,
        preset: Preset,
        planned: list[Failure],
        steps: int,
        seed: int,
        *,
        step_s: float,
        restore_s: float,
    ) -> None:
        self._planned = {failure.step: failure for failure in planned}
        self._steps, self._step_s, self._restore_s = steps, step_s, restore_s
        self._random = Random(f"ettr/{seed}")
        self._count = 0
        setup = policy_setup("rlboost", preset, Switches())
        self.world = World(preset, constant_trace(preset.max_spot_instances), setup, seed, watch=self._see)

    def run(self) -> Measured:
        """Live through all steps."""
        self.world.run(LONG_S, WARM_UP_STEPS + self._steps)
        before, rows = self.world.recorder.rows[WARM_UP_STEPS - 1], self.world.recorder.rows[WARM_UP_STEPS:]
        seconds = rows[-1].started_s + rows[-1].seconds - before.started_s - before.seconds
        return Measured(seconds, sum(row.tokens for row in rows), self._count)

    def _see(self, event: Event, commands: list[Command]) -> None:
        if isinstance(event, StepStarted) and event.step in self._planned:
            failure = self._planned.pop(event.step)
            self.world.agenda.after(failure.at * self._step_s, lambda: self._fail(failure.kind))

    def _fail(self, kind: str) -> None:
        world = self.world
        match kind:
            case "trainer":
                world.restart_trainer(self._restore_s)
            case "coordinator":
                world.restart_coordinator([COORDINATOR_BACK_S] * len(world.agents()))
            case _:
                machines = sorted({agent.machine for agent in world.agents() if agent.pool is Pool.SPOT})
                if not machines:
                    return
                world.cloud.take(self._random.choice(machines))
        self._count += 1
