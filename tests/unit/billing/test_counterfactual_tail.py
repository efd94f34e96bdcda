"""What the books say of on demand only, against a simulation of it: both count the slow tail of a rollout."""

from __future__ import annotations

from pathlib import Path

from rlboost_runtime.billing.launch_records import MachineRecord
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.billing.report import cost_report
from rlboost_runtime.coordinator.observers.steps import alone
from rlboost_runtime.core.base.messages import Command, Event, StepTrained
from rlboost_runtime.core.core import Core
from rlboost_runtime.sim import simulate
from rlboost_runtime.sim.policies import Switches, policy_setup
from rlboost_runtime.sim.presets import presets
from rlboost_runtime.sim.world import World
from rlboost_runtime.traces import Trace, TraceEvent

STEPS = 3


def test_the_report_agrees_with_a_simulation_of_on_demand_only(tmp_path: Path) -> None:
    preset = presets()["paper-8b"]
    market = Trace("t", "test", tuple(TraceEvent(0.0, f"n{k}", "add") for k in range(3)), 7_200.0)
    measured: list[dict[str, float]] = []
    world = World(preset, market, policy_setup("rlboost", preset, Switches()), seed=0)

    def watch(event: Event, commands: list[Command]) -> None:
        if isinstance(event, StepTrained):
            measured.append({"train_busy_s": event.busy_s, **alone(world.core)})

    world.watch = watch
    world.run(7_200.0, max_steps=STEPS)
    window_rate = preset.reserved_engines * world.core.measured().engine_tokens_per_s["H100"][0]
    assumed = preset.assumptions
    between_s = assumed.optimizer_s + assumed.gather_s
    with_tail = reported(tmp_path / "tail", world, measured, between_s, window_rate)
    no_tail = [{"train_busy_s": each["train_busy_s"]} for each in measured]
    without = reported(tmp_path / "none", world, no_tail, between_s, window_rate)
    simulated = simulate(preset, market, "on_demand", seed=0, hours=1e6, max_steps=STEPS)
    truth = 1e6 / simulated.tokens_per_usd
    assert 0.9 < with_tail / truth < 1.1
    assert without / truth < 0.85, "as with the rate of full engines"


def reported(
    folder: Path, world: World, metrics: list[dict[str, float]], between_s: float, window_rate: float
) -> float:
    """Return dollars per million tokens on demand of a run that trained the world's steps."""
    ledger = Ledger(folder)
    price = round(world._preset.reserved_usd_per_hour * 1e6)
    ledger.intend(MachineRecord("head", "local", "here", "H100:8", price, "test", 0.0, pool="reserved"))
    ledger.launched("head", 0.0)
    free = MachineRecord("spot", "local", "here", "H100:1", 0, "test", 0.0, pool="spot")
    ledger.intend(free)  # without any, nothing is computed
    ledger.launched("spot", 0.0)
    for row, each in zip(world.recorder.rows, metrics, strict=True):
        waited = row.seconds - between_s - each["train_busy_s"]
        known = {
            "reserved_tokens": window_rate,
            "reserved_rollout_s": 1.0,
            "rollout_wait_s": waited,
            "train_wait_s": 0.0,
        }
        ended = row.started_s + row.seconds
        times = {"started_at": row.started_s, "ended_at": ended}
        ledger.record_step(row.step, **times, tokens=row.tokens, reward_mean=None, metrics=each | known)
    found = cost_report(ledger, world.agenda.now, "r").counterfactual
    ledger.close()
    assert found.usd_per_million_tokens is not None
    return found.usd_per_million_tokens


def test_a_core_that_has_measured_nothing_says_nothing() -> None:
    assert alone(Core()) == {}
