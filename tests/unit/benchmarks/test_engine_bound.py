"""What the simulated engines can do at their best, beside the oracle."""

from dataclasses import replace

from benchmarks.paper.windows import LENGTH_SEED
from benchmarks.scheduler.engine_bound import engine_share
from rlboost_runtime.sim import presets
from rlboost_runtime.sim.oracle import simulate_oracle
from rlboost_runtime.traces import Trace, TraceEvent


def test_an_engine_that_keeps_less_room_comes_nearer_to_its_most() -> None:
    paper = presets()["paper-8b"]
    roomy = replace(paper, calibration=replace(paper.calibration, growth_headroom_tokens=6_000))
    assert engine_share(roomy) < engine_share(paper) < 1.0


def test_the_oracle_is_as_slow_as_its_engines_where_these_are_all_that_it_waits_for() -> None:
    market = Trace("stays", "", (TraceEvent(0.0, "n", "add"),), 7_200.0)
    whole, half = (
        simulate_oracle(presets()["paper-8b"], market, LENGTH_SEED, 2.0, engine_share=share)
        for share in (1.0, 0.5)
    )
    assert 0.5 < half.tokens_per_s / whole.tokens_per_s < 0.7, "training takes as long as before"
