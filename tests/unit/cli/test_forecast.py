"""What a plan predicts: the paper's equilibrium by hand, the core's rule for useful instances, and honest
words about what was measured."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlboost_cli.main import app
from rlboost_cli.planning import forecast as module
from rlboost_cli.planning import plan as planning
from rlboost_cli.planning.forecast import Forecast, seeding_s
from rlboost_cli.planning.plan import describe_plan, launch_plan, plan_json
from rlboost_cli.planning.rates import Rates, measured_rates
from rlboost_providers import registry
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.core.base.messages import CoreConfig
from rlboost_runtime.core.window.seeding_window import StepObservation
from rlboost_runtime.job import Job
from rlboost_runtime.run.create import prepare_run
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.sim.baselines.windows import Algorithm1Window

START = 1_700_000_000.0


def forecast(planned: Job, measured: Rates, former: Job) -> Forecast:
    return module.forecast(planned, registry.prices_of(planned), measured, former)


def job(**changes: Any) -> Job:
    """128 responses per step; reserved 10 $/h, up to 3 spot machines at 2 $/h."""
    fields: dict[str, Any] = {
        "name": "demo",
        "model": {"init": "tiny"},
        "data": {"reasoning_gym": ["basic_arithmetic"]},
        "algorithm": {"prompts_per_step": 16, "group_size": 8, "steps": 30, "max_response_tokens": 100},
        "trainer": {"infra": "local", "price_usd_per_hour": 10.0, "local_engines": 1},
        "rollout": {
            "spot": {"any_of": [{"infra": "local", "price_usd_per_hour": 2.0}], "max_instances": 3},
        },
    }
    for section, values in changes.items():
        fields[section] = {**fields[section], **values} if isinstance(values, dict) else values
    return Job.model_validate_json(json.dumps(fields))


def rates(**changes: float) -> Rates:
    """1,280 tokens in a step: 10 s of training and 2 s beside it; 100 and 64 tokens/s."""
    fields: dict[str, Any] = {
        "run": "before",
        "ended_at": START,
        "num_steps": 9,
        "reserved_tokens_per_s": 100.0,
        "spot_tokens_per_s": 64.0,
        "train_s_per_token": 10 / 1280,
        "overhead_s": 2.0,
        "step_s": 12.0,
        "spot_instances": 2.0,
        "tokens_per_response": 10.0,
    }
    return Rates(**{**fields, **changes})


# --- arithmetic --------------------------------------------------------------------------------------------


def test_without_spot_instances_rollout_and_training_follow_one_another() -> None:
    alone = forecast(job(), rates(), job()).row(0)
    assert alone is not None
    assert alone.seeding_s == pytest.approx(12.8)  # 1,280 tokens at 100 per s
    assert alone.step_s == pytest.approx(12.8 + 10 + 2)
    assert alone.usd_per_hour == 10.0
    assert alone.usd_per_million_tokens == pytest.approx(10 * 24.8 / 3600 / 1280 * 1e6)


def test_the_window_is_the_one_at_which_nobody_waits() -> None:
    for count in (1, 1.5):
        window = seeding_s(rates(), 1280, count)
        assert 100 * window + count * 64 * (window + 10) == pytest.approx(1280)
    assert seeding_s(rates(), 1280, 1) == pytest.approx(640 / 164)
    assert seeding_s(rates(), 1280, 2) == 0.0
    assert seeding_s(rates(), 1280, 3) == 0.0


def test_at_that_window_algorithm_1_stays_where_it_is() -> None:
    window = seeding_s(rates(), 1280, 1)
    seeding = Algorithm1Window(window, 1, CoreConfig(3).seeding_eta)
    remote = (1280 - 100 * window) / 64  # what one instance has left to do
    seeding.learn(StepObservation(1.0, 1, 0.0, window + 10 - remote, 10.0, remote))
    assert seeding.t_seed_s == pytest.approx(window)


def test_more_instances_are_never_slower_and_the_useful_number_is_the_cores() -> None:
    found = forecast(job(), rates(), job())
    steps = [row.step_s for row in found.rows]
    assert len(steps) == 4
    assert all(after <= before for before, after in itertools.pairwise(steps))
    unpriced = job(trainer={"price_usd_per_hour": 0.0})
    found = forecast(unpriced, rates(), unpriced)
    assert found.useful_instances == 2  # 1,280 tokens / (64 per s x 10 s), exactly
    assert forecast(unpriced, rates(spot_tokens_per_s=65.0), unpriced).useful_instances == 2
    assert forecast(unpriced, rates(spot_tokens_per_s=63.0), unpriced).useful_instances == 3
    assert forecast(unpriced, rates(spot_tokens_per_s=20.0), unpriced).useful_instances == 3, (
        "the job's bound"
    )
    assert forecast(unpriced, rates(spot_tokens_per_s=500.0), unpriced).useful_instances == 1


def cloudy(usd_per_gb: float, usd_per_hour: float) -> Job:
    offer = {"infra": "aws/us-east-2", "accelerators": "H100:8", "max_price_usd_per_hour": usd_per_hour}
    offers = [{**offer, "egress_usd_per_gb": usd_per_gb}]
    return job(rollout={"spot": {"any_of": offers, "max_instances": 3}})


@pytest.mark.parametrize("usd_per_gb", [0.0, 0.02, 0.2])
@pytest.mark.parametrize("usd_per_hour", [0.1, 1.0, 4.0, 12.0])
def test_the_useful_number_is_the_one_with_the_cheapest_tokens(
    usd_per_gb: float, usd_per_hour: float
) -> None:
    planned = cloudy(usd_per_gb, usd_per_hour)
    found = forecast(planned, rates(weight_bytes=1e9), planned)
    spot = [row for row in found.rows if row.instances]
    cheapest = min(spot, key=lambda row: row.usd_per_million_tokens)
    assert found.useful_instances == cheapest.instances


def test_egress_makes_dear_what_was_cheap() -> None:
    free, dear = cloudy(0.0, 1.0), cloudy(0.2, 1.0)
    alone, paid = (forecast(j, rates(weight_bytes=1e9), j) for j in (free, dear))
    assert (alone.useful_instances, paid.useful_instances) == (2, 1)
    assert alone.saving_fraction is not None
    assert paid.saving_fraction is not None
    assert alone.saving_fraction > 0 > paid.saving_fraction


def test_whether_spot_pays_depends_on_its_price() -> None:
    cheap = forecast(job(), rates(), job())
    assert cheap.speedup == pytest.approx(24.8 / 12)
    assert cheap.saving_fraction == pytest.approx(1 - (14 * 12) / (10 * 24.8))
    offer = {"spot": {"any_of": [{"infra": "local", "price_usd_per_hour": 9.0}], "max_instances": 3}}
    dear = forecast(job(rollout=offer), rates(), job())
    assert dear.useful_instances == 1, "the least that a run holds"
    assert dear.saving_fraction == pytest.approx(1 - (19 * dear.row(1).step_s) / (10 * 24.8))
    assert dear.saving_fraction < 0 < dear.speedup


def test_the_cheapest_offer_counts() -> None:
    offers = [{"infra": "local", "price_usd_per_hour": price} for price in (5.0, 1.0, 3.0)]
    found = forecast(job(rollout={"spot": {"any_of": offers, "max_instances": 1}}), rates(), job())
    assert [row.usd_per_hour for row in found.rows] == [10.0, 11.0]


def test_a_pool_that_was_not_measured_is_not_predicted() -> None:
    without_spot = forecast(job(), rates(spot_tokens_per_s=0.0), job())
    assert [row.instances for row in without_spot.rows] == [0]
    assert without_spot.speedup is without_spot.saving_fraction is None
    without_reserved = forecast(job(), rates(reserved_tokens_per_s=0.0), job())
    assert [row.instances for row in without_reserved.rows] == [1, 2, 3]
    assert without_reserved.rows[0].step_s == pytest.approx(1280 / 64 + 2)
    assert without_reserved.speedup is None


def test_other_data_is_taken_to_give_responses_as_long_as_allowed() -> None:
    longer = job(data={"reasoning_gym": ["chain_sum"]})
    assert forecast(longer, rates(), job()).tokens_per_step == 128 * 100
    assert forecast(job(), rates(), job()).tokens_per_step == 1280
    bigger = job(algorithm={"prompts_per_step": 32})
    assert forecast(bigger, rates(), job()).tokens_per_step == 2560


def test_the_arithmetic_is_held_against_the_run_it_is_from() -> None:
    exact = forecast(job(algorithm={"prompts_per_step": 32}), rates(), job())
    assert (exact.computed_s, exact.left_out_s) == (pytest.approx(12.0), 0.0)
    quick = forecast(job(), rates(step_s=11.0), job())
    assert quick.left_out_s == 0.0
    slow = forecast(job(), rates(step_s=15.0), job())
    assert slow.left_out_s == pytest.approx(3.0)
    for plain, more in zip(quick.rows, slow.rows, strict=True):
        assert more.step_s == pytest.approx(plain.step_s + 3.0)
    assert slow.saving_fraction is not None
    assert quick.saving_fraction is not None
    assert slow.saving_fraction < quick.saving_fraction


# --- measuring ---------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path / "home"))
    return tmp_path


FIGURES = {
    "reserved_tokens": 400.0,
    "reserved_rollout_s": 4.0,
    "train_busy_s": 10.0,
    "spot_instances_mean": 2.0,
    "rollout_s": 8.0,
    "rollout_wait_s": 4.0,
    "train_wait_s": 1.0,
}


def trained(home: Path, made_from: Job, *, steps: int = 5, **figures: float | None) -> RunFolder:
    """A run in whose ledger each step took 17 s; a figure of None is left out."""
    path = home / "job.yaml"
    path.write_text("# resolved\n")
    run = prepare_run(path, made_from).run
    metrics = {k: v for k, v in {**FIGURES, **figures}.items() if v is not None}
    ledger = Ledger(run.ledger)
    for step in range(steps):
        ledger.record_step(
            step=step,
            started_at=START + 17 * step + 1,
            ended_at=START + 17 * (step + 1),
            tokens=1280,
            reward_mean=0.5,
            metrics=metrics,
        )
    ledger.close()
    run.outcome.write_text('{"state": "done"}')
    return run


def test_rates_are_read_off_a_former_run(home: Path) -> None:
    trained(home, job())
    found = measured_rates(job(name="another"))
    assert found is not None
    measured, former = found
    assert former.name == measured.run == "demo"
    assert measured.num_steps == 4, "machines boot in the first step"
    assert measured.reserved_tokens_per_s == 100.0
    assert measured.spot_tokens_per_s == pytest.approx((1280 - 400) / (2 * 8))
    assert measured.train_s_per_token * 1280 == pytest.approx(10.0)
    assert measured.step_s == pytest.approx(17.0)
    assert measured.overhead_s == pytest.approx(17 - 4 - 1 - 10)
    assert measured.spot_instances == pytest.approx(2.0)
    assert measured.tokens_per_response == pytest.approx(10.0)
    assert measured.ended_at == START + 5 * 17


def test_the_newest_run_that_is_alike_counts(home: Path) -> None:
    trained(home, job(name="old"))
    trained(home, job(name="new"), train_busy_s=5.0)
    trained(home, job(name="paced", rollout={"engine_args": {"tokens_per_s_per_response": 5.0}}))
    trained(home, job(name="wide", model={"hidden_size": 64}))
    trained(home, job(name="threads", trainer={"threads": 2}))
    found = measured_rates(job())
    assert found is not None
    assert found[0].run == "new"
    assert found[0].train_s_per_token * 1280 == pytest.approx(5.0)


@pytest.mark.parametrize(
    "changes", [{"steps": 1}, {"spot_instances_mean": None}, {"reserved_tokens": None}], ids=str
)
def test_a_run_without_complete_steps_is_passed_over(home: Path, changes: dict[str, Any]) -> None:
    trained(home, job(), **changes)
    assert measured_rates(job()) is None


def test_runs_without_books_or_of_other_versions_do_not_hinder(home: Path) -> None:
    trained(home, job(name="good"))
    path = home / "job.yaml"
    prepare_run(path, job(name="fresh"))
    broken = prepare_run(path, job(name="broken")).run
    broken.job_json.write_text("{}")
    torn = prepare_run(path, job(name="torn")).run
    torn.ledger.write_bytes(b"no database at all, but long enough to be looked at as one" * 20)
    found = measured_rates(job())
    assert found is not None
    assert found[0].run == "good"


# --- words -------------------------------------------------------------------------------------------------


def test_a_plan_without_a_measurement_makes_nothing_up() -> None:
    plan = launch_plan("demo", job())
    assert plan.forecast is None
    assert plan_json(plan)["forecast"] is None
    text = "\n".join(describe_plan(plan))
    assert "forecast none" in text
    assert "up to 3 x local, $2.0000 per hour each" in text
    assert "up to $16.0000 per hour with the full fleet" in text, "a cloud may ask for more"
    assert "tokens" not in text


def test_the_heads_price_is_asked_for_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(home, job())
    asked = []

    def asking(of: Job) -> float:
        asked.append(of.name)
        return 10.0

    for place in (registry, planning):
        monkeypatch.setattr(place, "head_usd_per_hour", asking)
    assert launch_plan("demo-2", job()).forecast is not None
    assert asked == ["demo"], "SkyPilot may have to start for it"


def test_a_plan_names_its_basis(home: Path) -> None:
    trained(home, job())
    plan = launch_plan("demo-2", job())
    text = "\n".join(describe_plan(plan))
    assert "run demo" in text
    assert time.strftime("%Y-%m-%d", time.localtime(START + 85)) in text
    assert "took 17.0 s" in " ".join(text.split())
    assert "(useful)" in text
    assert "spot     pays:" in text
    assert all(len(line) < 80 for line in describe_plan(plan))
    found = plan_json(plan)["forecast"]
    assert found["useful_instances"] == 2, "a third machine saves less than it costs"
    row = next(row for row in found["rows"] if row["instances"] == 2)
    assert (found["step_s"], found["usd_per_hour"]) == (row["step_s"], row["usd_per_hour"])
    assert found["usd_per_hour"] == 14.0
    assert found["run_usd"] == pytest.approx(14.0 * 30 * found["step_s"] / 3600)
    assert found["spot_pays"] is True
    assert found["check"]["measured_step_s"] == pytest.approx(17.0)


def test_a_plan_says_where_spot_does_not_pay_or_is_not_known(home: Path) -> None:
    dear = {"spot": {"any_of": [{"infra": "local", "price_usd_per_hour": 50.0}], "max_instances": 3}}
    trained(home, job(name="spotty", rollout=dear))
    assert "does not pay" in "\n".join(describe_plan(launch_plan("x", job(rollout=dear))))
    trained(home, job(name="alone"), reserved_tokens=1280.0, spot_instances_mean=0.0)
    assert "whether it pays is not known" in "\n".join(describe_plan(launch_plan("x", job())))
    none = job(rollout={"spot": {"max_instances": 0}})
    assert "no instances are wanted" in "\n".join(describe_plan(launch_plan("x", none)))


def test_the_command_prints_one_json_object_and_hints_at_a_probe(home: Path) -> None:
    path = home / "real.yaml"
    path.write_text("name: demo\nmodel: {init: tiny}\ndata: {reasoning_gym: [basic_arithmetic]}\n")
    done = CliRunner().invoke(app, ["plan", str(path), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["forecast"] is None
    assert [offer["pool"] for offer in found["offers"]] == ["reserved", "spot"]
    assert f"rlboost plan {path} --probe" in done.stderr


def test_a_bad_job_is_bad_input_to_plan(home: Path) -> None:
    path = home / "real.yaml"
    path.write_text("name: demo\n")
    done = CliRunner().invoke(app, ["plan", str(path)])
    assert done.exit_code == 2
    assert "model" in done.stderr
