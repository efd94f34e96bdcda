"""What a plan predicts: the simulator's answer, calibrated by what runs measured, and what is kept of it."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from typer.testing import CliRunner

import rlboost_templates
from rlboost_cli.main import app
from rlboost_cli.planning import projection as module
from rlboost_cli.planning.agreement import planned
from rlboost_cli.planning.plan import describe_plan, launch_plan, plan_json
from rlboost_cli.planning.projection import Projection, project
from rlboost_cli.simulation.calibration import calibrated
from rlboost_cli.simulation.job import simulated_job
from rlboost_cli.simulation.market import market_of
from rlboost_cli.simulation.rates import Rates, boots_here, measured_rates
from rlboost_cli.views.cost import cost_lines
from rlboost_runtime.billing.accounts import WasteKind
from rlboost_runtime.billing.books import report_of
from rlboost_runtime.billing.launch_records import MachineRecord
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.billing.planned import PlannedParts, keep_plan, kept_plan
from rlboost_runtime.billing.report import compared
from rlboost_runtime.coordinator.status import OnDemand
from rlboost_runtime.engines.vllm.command import NUM_DRAFT_TOKENS
from rlboost_runtime.job import Job
from rlboost_runtime.job.file.load import load_job
from rlboost_runtime.run.create import prepare_run
from rlboost_runtime.run.folder import RunFolder, write_json
from rlboost_runtime.sim import SimResult, simulate
from rlboost_runtime.sim.presets import Preset

START = 1_700_000_000.0
MARKET = {"seed": 7, "mean_lifetime_s": 40, "mean_absence_s": 4}


def job(**changes: Any) -> Job:
    """32 responses per step; reserved 10 $/h, up to 3 spot machines at 2 $/h with a market of their own."""
    offer = {"infra": "local", "price_usd_per_hour": 2.0, "market": MARKET}
    fields: dict[str, Any] = {
        "name": "demo",
        "model": {"init": "tiny"},
        "data": {"reasoning_gym": ["basic_arithmetic"]},
        "algorithm": {"prompts_per_step": 8, "group_size": 4, "steps": 20, "max_response_tokens": 100},
        "trainer": {"infra": "local", "price_usd_per_hour": 10.0, "local_engines": 1},
        "rollout": {
            "engine_args": {"max_running": 12, "tokens_per_s_per_response": 20},
            "spot": {"any_of": [offer], "max_instances": 3},
        },
    }
    for section, values in changes.items():
        fields[section] = {**fields.get(section, {}), **values} if isinstance(values, dict) else values
    return Job.model_validate_json(json.dumps(fields))


def measured(**changes: float) -> Rates:
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


# --- a run as the simulator would live it, with the books of a real one -------------------------------------


def lived(preset: Preset, planned_job: Job, folder: Path, seed: int, name: str) -> RunFolder:
    """A whole simulated run in a real run's folder: its machines, steps and metrics are in the ledger."""
    path = folder / f"{name}.yaml"
    path.write_text("# resolved\n")
    run = prepare_run(path, planned_job.model_copy(update={"name": name})).run
    market = market_of(planned_job, folder, seed)
    found = simulate(preset, market, "rlboost", seed=seed, hours=100, max_steps=planned_job.algorithm.steps)
    with contextlib.closing(Ledger(run.ledger)) as ledger:
        _bought(ledger, "reserved-0", "reserved", 10.0, 0.0, found.seconds)
        for machine, start_s, end_s, boot_s in machines(found):
            _bought(ledger, machine, "spot", 2.0, start_s, min(end_s, found.seconds))
            ledger.add_wastes({(WasteKind.BOOT, machine): boot_s})
            times = {"requested_at": start_s, "joined_at": start_s + boot_s, "ready_at": start_s + boot_s}
            ledger.keep_boots({machine: json.dumps(times)})
        for row in found.rows:
            ledger.record_step(
                step=row.step,
                started_at=START + row.started_s,
                ended_at=START + row.started_s + row.seconds,
                tokens=row.tokens,
                reward_mean=0.5,
                metrics=_metrics(found, row.step),
            )
    run.outcome.write_text('{"state": "done"}')
    return run


def machines(found: SimResult) -> Iterator[tuple[str, float, float, float]]:
    """Yield spot machines with their begin, end, and seconds before their first work."""
    for name in dict.fromkeys(each.machine for each in found.timeline if each.machine != "reserved"):
        mine = [each for each in found.timeline if each.machine == name]
        booting = [each for each in mine if each.what in ("boot", "pull")]
        if mine[0].start_s < found.seconds:
            yield name, mine[0].start_s, mine[-1].end_s, booting[0].end_s - booting[0].start_s


def _bought(ledger: Ledger, name: str, pool: str, usd: float, start_s: float, end_s: float) -> None:
    ledger.intend(
        MachineRecord(
            machine=name,
            pool=pool,
            provider="local",
            zone="local",
            accelerator="cpu",
            price_micro_usd_per_hour=round(usd * 1e6),
            price_source="job",
            intended_at=START + start_s,
        )
    )
    ledger.launched(name, START + start_s)
    ledger.ended(name, START + end_s)


def _metrics(found: SimResult, step: int) -> dict[str, float]:
    row = found.rows[step]
    alone = SPEED * 12  # tokens/s of the reserved engine with a full batch
    return {
        "reserved_tokens": min(row.tokens, row.seeded_s * alone),
        "reserved_rollout_s": row.seeded_s,
        "train_busy_s": row.train_s,
        "spot_instances_mean": row.spot_instances,
        "rollout_s": max(0.1, row.seconds - row.train_s - row.wait_s),
        "rollout_wait_s": row.seconds - row.train_s - row.wait_s - 0.2,
        "train_wait_s": row.wait_s,
        "length_p10": 25.0 * math.exp(-1.2816 * 0.3),
        "length_p90": 25.0 * math.exp(1.2816 * 0.3),
    }


SPEED = 14.0
"""Tokens per second of a response in the run that is lived: slower than the 20 at which the job paces it."""


def slow(planned_job: Job, folder: Path) -> Preset:
    """The job on a machine that is slower than it is assumed to be."""
    preset = simulated_job(planned_job, folder).preset
    return replace(
        preset,
        calibration=replace(preset.calibration, decode_step_s=1 / SPEED, micro_batch_s=0.1),
        assumptions=replace(
            preset.assumptions, boot_s=12.0, startup_s=20.0, length_median=25.0, length_sigma=0.3
        ),
    )


def within(share: float, ours: float, theirs: float) -> bool:
    return abs(ours - theirs) <= share * theirs


def test_plan_knows_spot_engines_that_are_slower_than_the_reserved_one(home: Path) -> None:
    """They share its cores. Without the measured step's time the plan is a quarter too cheap."""
    full = job(algorithm={"group_size": 16, "steps": 12})
    machine = slow(full, home)
    crowded = replace(machine, spot=tuple(replace(each, engine_pace=0.4) for each in machine.spot))
    bill = report_of(lived(crowded, full, home, seed=0, name="first"))
    plan = project(full, home)
    assert within(0.15, plan.usd.mean, bill.total_usd), (plan.usd, bill.total_usd)
    assert any("of the calibrated speed" in note for note in plan.notes)


def test_plan_live_view_bill_and_simulation_of_one_run_agree(home: Path) -> None:
    """Stated bounds: 15 % of dollars and hours, 20 % of dollars per token on demand only."""
    full = job(algorithm={"group_size": 16, "steps": 12})  # short steps would be all tail, which no bill sees
    first = lived(slow(full, home), full, home, seed=3, name="first")
    bill = report_of(first)
    plan = project(full, home)
    assert plan.is_calibrated
    assert within(0.15, plan.usd.mean, bill.total_usd), (plan.usd, bill.total_usd)
    hours = next(m.billed_s for m in bill.machines if m.pool == "reserved") / 3600
    assert within(0.15, plan.hours.mean, hours), (plan.hours, hours)
    with contextlib.closing(Ledger(first.ledger, read_only=True)) as ledger:
        live = OnDemand().figures(ledger, "first", 12, START + 3600 * hours)
    assert live is not None
    assert live.usd_per_million_tokens == bill.counterfactual.usd_per_million_tokens, "one function"
    alone = bill.counterfactual.usd_per_million_tokens
    assert alone is not None
    assert plan.on_demand.usd_per_million_tokens is not None
    assert within(0.2, plan.on_demand.usd_per_million_tokens, alone)
    path = home / "same.yaml"
    path.write_text(full.model_dump_json(exclude_unset=True))
    policies = ["--policy", "rlboost", "--policy", "on_demand"]
    done = CliRunner().invoke(app, ["simulate", str(path), "--seed", "5", *policies, "--json"])
    assert done.exit_code == 0, done.output
    simulated = json.loads(done.stdout)
    ours = 1e6 / simulated["policies"]["rlboost"]["tokens_per_usd"]
    assert within(0.15, plan.usd_per_million_tokens, ours)
    for each in (plan.on_demand.usd_per_hour, bill.counterfactual.usd_per_hour):
        assert each == 10.0, "the reserved node's own price"
    assert simulated["on_demand"]["usd_per_hour"] == 10.0
    assert within(0.2, simulated["on_demand"]["usd_per_million_tokens"], alone)


def test_without_a_measurement_the_plan_of_a_slower_machine_is_further_off(home: Path) -> None:
    run = lived(slow(job(), home), job(), home, seed=3, name="first")
    bill = report_of(run).total_usd
    run.ledger.unlink()
    assert not within(0.15, project(job(), home).usd.mean, bill), "else the test above proves nothing"


def test_a_cost_report_says_what_the_plan_said_and_where_the_difference_comes_from(home: Path) -> None:
    plan = project(job(), home)
    run = lived(slow(job(), home), job(), home, seed=3, name="first")
    keep_plan(run, plan.parts)
    keep_plan(run, replace_parts(plan, steps=1))
    report = report_of(run)
    assert kept_plan(run) == plan.parts, "what was said at the first launch stays"
    found = report.plan
    assert found is not None
    assert found.planned_usd == pytest.approx(plan.usd.mean)
    assert found.actual_usd == report.total_usd
    causes = [getattr(found.difference_usd, name) for name in type(found.difference_usd).__struct_fields__]
    assert sum(causes) == pytest.approx(found.actual_usd - found.planned_usd, abs=1e-5)
    assert found.difference_usd.machine_time < 0, "responses are shorter than was assumed"
    assert abs(found.difference_usd.prices) < 1e-5
    text = " ".join("\n".join(cost_lines(report)).split())
    assert f"plan ${found.planned_usd:.4f} in" in text
    assert "machine time -$" in text


def replace_parts(plan: Projection, **changes: float) -> PlannedParts:
    return structs.replace(plan.parts, **changes)


def test_a_difference_names_prices_and_steps(home: Path) -> None:
    plan = project(job(), home)
    run = lived(slow(job(), home), job(), home, seed=0, name="first")
    cheap = replace_parts(plan, steps=60)
    found = compared(cheap, report_of(run))
    assert found.difference_usd.steps == pytest.approx(-(plan.usd.mean - plan.parts.startup_usd) * 2 / 3)
    halved = replace_parts(plan, spot_usd=plan.parts.spot_usd / 2)
    found = compared(halved, report_of(run))
    spot = report_of(run).compute_usd["spot"]
    assert found.difference_usd.prices == pytest.approx(spot / 2, rel=1e-3)


# --- ten jobs ----------------------------------------------------------------------------------------------

SMALL = {"prompts_per_step": 8, "steps": 24}


def jobs(folder: Path) -> dict[str, Job]:
    """Local ones, each template, and two whose spot machines are in other regions than the head."""
    found = {"local": job(), "quiet": job(rollout={"spot": {"max_instances": 2}}), "none": no_spot()}
    for name in ("laptop", "aws", "gcp", "multi-cloud", "own-machines"):
        (folder / f"{name}.yaml").write_text(rlboost_templates.text(name))
        found[name] = load_job(folder / f"{name}.yaml")
    for name, region in (("far", "us-west-2"), ("overseas", "eu-north-1")):
        (folder / f"{name}.yaml").write_text(foreign(region))
        found[name] = load_job(folder / f"{name}.yaml")
    return {name: shortened(each) for name, each in found.items()}


def foreign(region: str) -> str:
    text = rlboost_templates.text("aws")
    head, offers = text.split("rollout:")
    return head + "rollout:" + offers.replace("us-east-2", region, 1)


def no_spot() -> Job:
    return job(rollout={"spot": {"max_instances": 0}})


def shortened(each: Job, **changes: int) -> Job:
    return each.model_copy(update={"algorithm": each.algorithm.model_copy(update={**SMALL, **changes})})


@pytest.mark.e2e  # simulates for ten seconds
def test_ten_plans_are_within_15_percent_of_a_simulation_with_another_seed(home: Path) -> None:
    found = jobs(home)
    assert len(found) == 10
    off = {}
    for name, each in found.items():
        plan = project(each, home)
        other = another_seed(each, home)
        off[name] = (plan.usd.mean / other[0] - 1, plan.hours.mean / other[1] - 1)
    assert all(abs(share) <= 0.15 for shares in off.values() for share in shares), off


def another_seed(each: Job, folder: Path) -> tuple[float, float]:
    """Dollars and hours of the whole job, simulated from its begin to its last step under another seed."""
    found = simulated_job(each, folder)
    assumptions = replace(found.preset.assumptions, startup_s=found.startup_s)
    preset = replace(found.preset, assumptions=assumptions)
    market = market_of(each, folder, 11)
    whole = simulate(preset, market, "rlboost", seed=11, hours=1e4, max_steps=each.algorithm.steps)
    usd = whole.bill["start-up"] + sum(row.usd for row in whole.rows)
    return usd, whole.seconds / 3600


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
    assert measured.tokens_per_response == pytest.approx(1280 / 32)
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


def test_training_takes_the_passes_that_the_objective_needs(tmp_path: Path) -> None:
    def passes(**algorithm: Any) -> float:
        cloud = {"infra": "aws/us-east-1", "accelerators": "H100:8"}
        trainer = {"activation_checkpointing": algorithm.pop("checkpointing", "auto"), "local_engines": 8}
        big = job(
            model="Qwen/Qwen3-8B", algorithm=algorithm, trainer=trainer, rollout={"spot": {"any_of": [cloud]}}
        )
        return simulated_job(big, tmp_path).preset.assumptions.forward_passes

    assert passes(checkpointing=False) == 3.0
    assert passes() == 4.0
    assert passes(kl={"coef": 0.001}) == 5.0
    assert passes(kl={"coef": 0.001}, minibatches_per_step=4, old_logprobs="recompute") == 6.0, "the paper's"


def test_drafts_are_simulated_and_what_they_bring_is_said_to_be_assumed(tmp_path: Path) -> None:
    cloud = {"infra": "aws/us-east-1", "accelerators": "H100:2"}

    def planned(**engine_args: Any) -> Any:
        rollout = {"engine": "vllm", "engine_args": engine_args, "spot": {"any_of": [cloud]}}
        return simulated_job(job(model="Qwen/Qwen3-8B", rollout=rollout), tmp_path)

    plain, drafting = planned(), planned(speculative="suffix")
    assert plain.preset.assumptions.draft_tokens == 0
    assert drafting.preset.assumptions.draft_tokens == NUM_DRAFT_TOKENS, "as live"
    assert [note for note in drafting.notes if note not in plain.notes] == [
        "a decode step with drafts is assumed to bring 1.7 tokens, and drafts are used where that is faster"
    ]


def test_passes_that_need_no_group_are_those_of_logprobs(tmp_path: Path) -> None:
    def early(**algorithm: Any) -> float:
        return simulated_job(job(algorithm=algorithm), tmp_path).preset.assumptions.early_passes

    recomputed: dict[str, Any] = {"minibatches_per_step": 4, "old_logprobs": "recompute"}
    assert early() == 0.0
    assert early(kl={"coef": 0.001}) == 1.0
    assert early(kl={"coef": 0.001}, **recomputed) == 2.0
    assert early(kl={"coef": 0.001}, max_staleness=1, in_flight_updates=True) == 0.0


def test_a_job_without_prices_is_planned_in_time_only(home: Path) -> None:
    free = {"infra": "local", "market": MARKET}
    path = home / "free.json"
    spot = {"spot": {"any_of": [free], "max_instances": 3}}
    path.write_text(
        job(trainer={"price_usd_per_hour": 0.0}, rollout=spot).model_dump_json(exclude_unset=True)
    )
    said = CliRunner().invoke(app, ["plan", str(path)])
    assert "min; the job has no prices" in said.output
    assert "$0.00 per million" not in said.output


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"spare_prompts": 8}, "beside 16 a step may roll out 8 more, in at most one rollout"),
        ({"spare_prompts": 8, "max_refills": 3}, "a step may roll out 56 more, in at most 4 rollouts"),
    ],
)
def test_a_plan_says_how_much_it_does_not_count_of_dynamic_sampling(
    more: dict[str, int], said: str, tmp_path: Path
) -> None:
    plain = {"prompts_per_step": 16, "zero_variance_groups": "drop"}
    assert "without spread" not in " ".join(simulated_job(job(algorithm=plain), tmp_path).notes)
    refilled = plain | more | {"zero_variance_groups": "replace"}
    assert said in " ".join(simulated_job(job(algorithm=refilled), tmp_path).notes)


def test_a_plan_dates_its_prices_and_doubts_a_head_of_ones_own(tmp_path: Path) -> None:
    def notes(**trainer: Any) -> str:
        cloud = {"infra": "aws/us-east-1", "accelerators": "H100:8"}
        own = {
            "infra": "ssh",
            "hosts": ["me@box"],
            "price_usd_per_hour": 20.0,
            "accelerators": "H100:8",
            **trainer,
        }
        spot = {"spot": {"any_of": [cloud]}}
        return " ".join(simulated_job(job(model="Qwen/Qwen3-8B", trainer=own, rollout=spot), tmp_path).notes)

    assert re.search(r"prices are those shipped with rlboost, of 20\d\d-\d\d-\d\d", notes())
    assert "the head is in no known cloud" in notes()
    assert "no known cloud" not in notes(location="aws/us-east-1")


def test_boots_of_forked_engines_say_nothing_of_others(home: Path) -> None:
    """A quickstart's machines boot in a second; a job without `preload` does not."""

    def with_offer(**changes: object) -> Job:
        offer = {"infra": "local", "price_usd_per_hour": 2.0, "market": MARKET, **changes}
        return job(rollout={"spot": {"any_of": [offer], "max_instances": 3}})

    run = trained(home, with_offer(preload=True))
    with contextlib.closing(Ledger(run.ledger)) as ledger:
        ledger.keep_boots({"spot-0": json.dumps({"requested_at": 0.0, "joined_at": 1.0, "ready_at": 1.5})})
    assert boots_here(with_offer(preload=True)) == 1.5
    assert boots_here(with_offer()) is None


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


# --- calibration -------------------------------------------------------------------------------------------


def test_rates_become_the_simulators_own_parameters(home: Path) -> None:
    preset = simulated_job(job(), home).preset
    found = calibrated(preset, job(), measured(boot_s=17.0), job())
    assert found.assumptions.boot_s == 17.0
    assert found.assumptions.gather_s == 2.0
    assert found.calibration.decode_step_s > preset.calibration.decode_step_s, "240 tokens/s were assumed"
    twice = calibrated(preset, job(), measured(reserved_tokens_per_s=50.0), job())
    assert twice.calibration.decode_step_s == pytest.approx(2 * found.calibration.decode_step_s)
    other = calibrated(preset, job(data={"reasoning_gym": ["chain_sum"]}), measured(), job())
    assert other.assumptions.length_median == preset.assumptions.length_median, "other data, other lengths"


# --- words -------------------------------------------------------------------------------------------------


def test_a_plan_of_a_job_that_nobody_measured_is_simulated(home: Path) -> None:
    plan = planned("demo", job(), home, with_options=True)
    text = "\n".join(describe_plan(plan))
    assert "20 steps in" in text
    assert "simulated, not measured" in text
    assert "on demand only at $10.00 per hour" in " ".join(text.split())
    assert all(len(line) < 80 for line in describe_plan(plan))
    found = plan_json(plan)["forecast"]
    noise = found["usd"]["half_width"] / found["usd"]["mean"]
    assert f"{noise:.0%} in cost may be chance" in " ".join(text.split())
    costs = [each["usd_per_million_tokens"] for each in found["alternatives"]]
    assert costs == sorted(costs)
    assert len(costs) >= 4
    assert sum(each["is_job"] for each in found["alternatives"]) == 1
    parts = found["parts"]
    total = parts["reserved_usd"] + parts["spot_usd"] + parts["egress_usd"] + parts["storage_usd"]
    assert total == pytest.approx(found["usd"]["mean"])


def test_a_plan_counts_evaluations(home: Path) -> None:
    (home / "held.jsonl").write_text('{"prompt": "1 + 1"}\n' * 6)
    every = {"every_steps": 5, "at_start": True, "at_end": True}
    plain, some, twice = (
        planned("demo", job(evaluation=each), home).forecast
        for each in (
            None,
            {"prompts": 8, **every},
            [
                {"name": "held", "prompts": 8, **every},
                {"name": "file", "source": "held.jsonl", "samples": 8, **every},
            ],
        )
    )
    assert plain is not None
    assert some is not None
    assert twice is not None
    assert (plain.evaluations.times, plain.evaluations.tokens, plain.evaluations.usd) == (0, 0.0, 0.0)
    assert some.evaluations.times == 5, "before update 1, after 5, 10, 15, and of the final weights"
    per_response = some.evaluations.tokens / (5 * 8 * 4)
    assert per_response == pytest.approx(some.tokens / (20 * 32), rel=0.1), "as long as those trained on"
    assert twice.evaluations.tokens == pytest.approx(per_response * 5 * (8 * 4 + 6 * 8))
    assert some.tokens == plain.tokens, "what is trained on"
    for found in (some, twice):
        assert found.hours.mean - found.evaluations.hours == pytest.approx(plain.hours.mean)
        assert found.usd.mean - found.evaluations.usd == pytest.approx(plain.usd.mean)
        assert found.parts.total_usd == pytest.approx(found.usd.mean)
        share = found.evaluations.tokens / found.tokens
        assert 0.2 * share < found.evaluations.hours / plain.hours.mean < 1.2 * share, "not trained on"
    assert some.on_demand_hours is not None
    assert plain.on_demand_hours is not None
    assert some.on_demand_hours > plain.on_demand_hours, "on demand only has to evaluate too"
    plan = planned("demo", job(evaluation={"prompts": 8, **every}), home)
    assert any("5 evaluations with 0.0" in line for line in describe_plan(plan))
    assert plan_json(plan)["forecast"]["evaluations"]["times"] == 5
    unknown = planned("demo", job(evaluation={"name": "hub", "dataset": "a/b"}), home).forecast
    assert unknown is not None
    assert unknown.evaluations.times == 0
    assert any("evaluation hub is not counted" in note for note in unknown.notes)


def test_a_plan_judges_spot_only_where_there_is_some_and_its_price_is_known(home: Path) -> None:
    plan = planned("demo", job(), home)
    assert "pay" in " ".join(describe_plan(plan))
    assert plan_json(plan)["forecast"]["spot_pays"] in (True, False)
    alone = replace(plan, max_spot_machines=0)
    assert "none: the job is on demand only" in " ".join(describe_plan(alone))
    unpriced = replace(plan, lines=tuple(replace(line, price_micro_usd_per_hour=None) for line in plan.lines))
    assert "whether it pays is not known: an offer has no price" in " ".join(describe_plan(unpriced))
    assert [plan_json(each)["forecast"]["spot_pays"] for each in (alone, unpriced)] == [None, None]


def test_a_budget_that_ends_the_run_early_is_told(home: Path) -> None:
    whole = planned("demo", job(), home)
    assert whole.forecast is not None
    text = describe_plan(planned("demo", job(budget={"max_usd": whole.forecast.usd.mean / 2}), home))
    assert any("ends the run after about 10 of 20 steps" in line for line in text)
    enough = describe_plan(planned("demo", job(budget={"max_usd": whole.forecast.usd.mean * 2}), home))
    assert not any("too small" in line for line in enough)


def test_a_cloud_plan_counts_egress_storage_and_start_up_and_offers_other_places(home: Path) -> None:
    path = home / "far.yaml"
    path.write_text(foreign("us-west-2"))
    far = shortened(load_job(path), prompts_per_step=2, steps=8)
    found = project(far, home, with_options=True)
    assert found.parts.egress_usd > 0
    assert found.parts.storage_usd > 0
    assert found.parts.startup_usd > 0
    assert found.parts.boot_usd > 0
    words = [option.what for option in found.options]
    assert any(" in aws/" in each for each in words)
    assert any("L40S" in each or "A100" in each for each in words)
    assert any(each.startswith("on demand only") for each in words)
    assert any(each.startswith("at most") for each in words)


def test_a_job_that_cannot_be_simulated_says_why_and_can_still_be_launched(home: Path) -> None:
    plan = planned("demo", job(model="someone/secret"), home)
    assert plan.forecast is None
    assert "the shape of `someone/secret` is not known" in " ".join("\n".join(describe_plan(plan)).split())
    assert plan_json(plan)["forecast"] is None


def test_a_model_that_says_its_size_is_simulated(home: Path) -> None:
    found = simulated_job(job(model="someone/Made-7B-Instruct"), home)
    assert found.preset.model.parameters == 7e9
    assert any("assumed to be shaped like Qwen3-8B" in note for note in found.notes)


def test_a_job_whose_steps_never_end_is_told_so(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_TURNS", 1)
    plan = planned("demo", job(), home)
    assert "no step ends" in plan.problem


def test_the_same_job_gets_the_same_plan(home: Path) -> None:
    assert project(job(), home) == project(job(), home)


def test_a_plan_without_a_forecast_makes_nothing_up() -> None:
    text = "\n".join(describe_plan(launch_plan("demo", job())))
    assert "up to 3 x local, $2.00 per hour each" in text
    assert "together $16.00 per hour with the full fleet, at these prices" in text
    assert "tokens" not in text


def test_the_command_prints_one_json_object_and_hints_at_a_probe(home: Path) -> None:
    path = home / "real.yaml"
    path.write_text(
        "name: demo\nmodel: {init: tiny}\ndata: {reasoning_gym: [basic_arithmetic]}\n"
        "algorithm: {prompts_per_step: 2, group_size: 2, steps: 3, max_response_tokens: 8}\n"
    )
    done = CliRunner().invoke(app, ["plan", str(path), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["forecast"]["usd"]["mean"] == 0.0
    assert [offer["pool"] for offer in found["offers"]] == ["reserved", "spot"]
    assert f"rlboost plan {path} --probe" in done.stderr
    assert found["run"] == "demo"
    ended = prepare_run(path, load_job(path), resume=False).run
    write_json(ended.outcome, {"state": "done", "exit_code": 0})
    again = CliRunner().invoke(app, ["plan", str(path), "--json"])
    assert json.loads(again.stdout)["run"] == "demo-2", "the run that launch would make"


def test_a_bad_job_is_bad_input_to_plan(home: Path) -> None:
    path = home / "real.yaml"
    path.write_text("name: demo\n")
    done = CliRunner().invoke(app, ["plan", str(path)])
    assert done.exit_code == 2
    assert "model" in done.stderr


def test_the_hourly_budget_bounds_the_planned_fleet(home: Path) -> None:
    """As in live runs: the reserved machine costs 10 $/h, each spot machine 2 $/h."""
    for cap, machines in ((None, 3), (100.0, 3), (14.5, 2), (11.0, 0)):
        found = simulated_job(job(budget={"max_usd_per_hour": cap}), home)
        assert found.preset.max_spot_instances == machines
        said = [note for note in found.notes if "max_usd_per_hour" in note]
        assert said == (
            [] if machines == 3 else [f"budget.max_usd_per_hour has room for {machines} of 3 spot machines"]
        )
    assert project(job(budget={"max_usd_per_hour": 11.0}), home).parts.spot_usd == 0


@pytest.mark.parametrize("template", ["aws", "gcp", "multi-cloud"])
def test_the_parts_of_a_plan_are_hours_times_prices(home: Path, template: str) -> None:
    """Spot money over spot hours lies between the offers' prices, whatever egress takes."""
    path = home / f"{template}.yaml"
    path.write_text(rlboost_templates.text(template))
    planned_job = load_job(path)
    found = project(planned_job, home)
    prices = [shape.usd_per_hour for shape in simulated_job(planned_job, home).preset.spot]
    rate = (found.parts.spot_usd + found.parts.storage_usd) / found.parts.spot_hours
    assert min(prices) * 0.99 <= rate
    assert found.parts.spot_usd / found.parts.spot_hours <= max(prices) * 1.01
    assert found.parts.total_usd == pytest.approx(found.usd.mean)


def test_adapters_travel_where_the_job_sends_adapters(tmp_path: Path) -> None:
    def shares(transfer: str) -> tuple[float, float]:
        path = tmp_path / "job.yaml"
        text = rlboost_templates.text("lora-8b")
        assert "transfer: lora" in text
        path.write_text(text.replace("transfer: lora", f"transfer: {transfer}"))
        found = simulated_job(load_job(path), tmp_path)
        says = any("pulls the model's 16.4 GB once, then adapters of 0.35 GB" in n for n in found.notes)
        assert says is (transfer == "lora")
        assumed = found.preset.assumptions
        return assumed.wire_share * found.preset.model.weight_bytes, assumed.frozen_bytes

    per_version, once = shares("lora")
    rank, layers, hidden, keys, mlp = 64, 36, 4096, 1024, 12_288
    linear = 2 * (hidden + hidden) + 2 * (hidden + keys) + 3 * (hidden + mlp)
    assert per_version == pytest.approx(2 * rank * layers * linear, rel=0.001)
    assert once == pytest.approx(16.4e9, rel=0.01)
    whole, nothing = shares("full")
    assert (whole, nothing) == (pytest.approx(once), 0.0)
