"""The learning runs per loss and staleness: jobs that differ in one thing, and verdicts that can be no."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.learning.losses import (
    IN_FLIGHT,
    LOSSES,
    Planned,
    judge_losses,
    judge_staleness,
    make,
    planned,
    stored,
    summary,
)
from rlboost_runtime.job import Job, TinyModel
from rlboost_runtime.trainer.learn.policy import Policy
from rlboost_runtime.trainer.models.tiny import make_model, make_tokenizer

UP, DOWN = [0.1] * 5 + [0.4] * 5, [0.4] * 5 + [0.1] * 5


@pytest.mark.parametrize(("what", "seeds", "count"), [("losses", 3, 21), ("staleness", 5, 15)])
def test_runs_of_a_seed_differ_in_one_field(what: str, seeds: int, count: int) -> None:
    runs = planned(what, seeds, 12)
    field = "loss" if what == "losses" else "max_staleness"
    assert len({run.name for run in runs}) == len({run.digest for run in runs}) == len(runs) == count
    for seed in range(seeds):
        jobs = [run.job.model_dump() for run in runs if run.seed == seed]
        tried = [job["algorithm"].pop(field) for job in jobs]
        assert sorted(tried) == sorted(LOSSES) if what == "losses" else tried == [0, 1, 1]
        in_flight = [job["algorithm"].pop("in_flight_updates") for job in jobs]
        assert in_flight == [False] * len(jobs) if what == "losses" else [False, False, True]
        assert all(job == jobs[0] for job in jobs)
        assert jobs[0]["model"]["seed"] == jobs[0]["algorithm"]["seed"] == seed


def small(run: Planned, folder: Path) -> Planned:
    """The run at a tenth of its size, its model made already."""
    job = run.job.model_dump()
    job["model"] |= {"hidden_size": 32, "num_layers": 1}
    job["algorithm"] |= {"prompts_per_step": 4, "group_size": 2, "learning_rate": 1e-2}
    job |= {"data": {"source": "prompts.jsonl"}, "reward": "rewards.py:score"}
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"{i}?"}) for i in range(8)))
    (folder / "rewards.py").write_text("def score(response): return len(response) % 3\n")
    found = replace(run, job=Job.model_validate_json(json.dumps(job)))
    assert isinstance(found.job.model, TinyModel)
    (folder / "models" / "0").mkdir(parents=True, exist_ok=True)
    Policy(make_model(found.job.model, 256), make_tokenizer()).save(folder / "models" / "0")
    return found


@pytest.mark.usefixtures("one_thread")
def test_a_run_is_kept_and_as_stale_as_asked_for(tmp_path: Path) -> None:
    fresh, stale, _ = (small(run, tmp_path) for run in planned("staleness", 1, 3))
    assert stored(fresh, tmp_path) is None
    records = [make(run, tmp_path, "abc", tmp_path) for run in (fresh, stale)]
    assert [record["staleness"] for record in records] == [[0, 0, 0], [0, 1, 1]]
    assert 0 < records[0]["entropy"][0] == records[1]["entropy"][0], "they begin with one model"
    assert records[0]["entropy"][2] != records[1]["entropy"][2]
    assert [stored(run, tmp_path) for run in (fresh, stale)] == records
    told = summary("losses", records, 3)["detail"]
    assert told["curves"] == {record["condition"]: [record["reward_mean"]] for record in records}
    with pytest.raises(SystemExit, match="another job"):
        stored(planned("staleness", 1, 3)[0], tmp_path)


@pytest.mark.usefixtures("one_thread")
def test_responses_of_a_run_in_flight_continue_under_the_next_weights(tmp_path: Path) -> None:
    _, stale, in_flight = (small(run, tmp_path) for run in planned("staleness", 1, 3))
    records = [make(run, tmp_path, "abc", tmp_path) for run in (stale, in_flight)]
    assert [record["staleness"] for record in records] == [[0, 1, 1], [0, 1, 1]]
    assert records[0]["entropy"][0] == records[1]["entropy"][0], "the first step is fresh in both"
    lags = [sum(record["mismatch_kl"]) for record in records]
    assert 0 < lags[1] < lags[0], "a part of its tokens is of newer weights"


def test_one_run_that_does_not_learn_is_enough_to_fail() -> None:
    assert judge_losses({"dapo": [UP, UP]}) == (pytest.approx(0.3), True)
    value, passed = judge_losses({"dapo": [UP, UP], "gspo": [UP, DOWN]})
    assert value < 0
    assert not passed


def test_staleness_is_held_against_the_spread_of_seeds() -> None:
    fresh = [[0.5] * 5, [0.6] * 5, [0.4] * 5]
    near, far = [[0.52] * 5, [0.58] * 5, [0.45] * 5], [[0.1] * 5, [0.2] * 5, [0.15] * 5]
    assert judge_staleness({"staleness-0": fresh, "staleness-1": near})[1]
    assert not judge_staleness({"staleness-0": fresh, "staleness-1": far})[1]
    assert not judge_staleness({"staleness-0": fresh, "staleness-1": near, IN_FLIGHT: far})[1]
