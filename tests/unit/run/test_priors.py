"""Where what a run measured is kept for the next run like it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlboost_runtime.core.base.prior import EnginePrior, Prior, WindowPrior
from rlboost_runtime.job import Job
from rlboost_runtime.run.folder import write_json
from rlboost_runtime.run.priors import PriorStore, key_of, workload_of

PRIOR = Prior(3, WindowPrior(12.5, n_prem=2.5), (1, 2, 3), (EnginePrior(1_000, 16, 1e-6, 0.01),))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def job(**changes: object) -> Job:
    base = {"name": "a", "model": "m", "data": {"reasoning_gym": ["spell_backward"]}}
    return Job.model_validate({**base, **changes})


def kept_file(home: Path) -> Path:
    (file,) = (home / "priors").iterdir()
    return file


def test_a_run_of_another_name_and_length_finds_it():
    PriorStore(job(), "a").write(PRIOR, at=5.0)
    like = job(name="b", algorithm={"steps": 7, "learning_rate": 1e-5, "seed": 3}, budget={"max_usd": 3})
    found = PriorStore(like, "b").read()
    assert found is not None
    assert (found.run, found.at, found.prior) == ("a", 5.0, PRIOR)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"data": {"reasoning_gym": ["word_sorting"]}},
        {"algorithm": {"max_response_tokens": 100}},
        {"algorithm": {"group_size": 4}},
        {"trainer": {"threads": 2}},
        {"rollout": {"engine": "vllm"}},
        {"rollout": {"spot": {"any_of": [{"infra": "local", "accelerators": "cpu:2"}]}}},
    ],
)
def test_another_workload_does_not(change):
    PriorStore(job(), "a").write(PRIOR, at=5.0)
    assert PriorStore(job(**change), "b").read() is None


def test_a_price_or_the_order_of_offers_makes_no_other_workload():
    offers = [{"infra": "local"}, {"infra": "local", "accelerators": "cpu:2"}]
    one = job(rollout={"spot": {"any_of": offers}})
    dearer = [{**offers[1], "price_usd_per_hour": 3.0}, offers[0]]
    assert key_of(workload_of(one)) == key_of(workload_of(job(rollout={"spot": {"any_of": dearer}})))


def test_an_empty_disk_takes_the_copy_at_the_output(home: Path, tmp_path: Path):
    of = job(output=str(tmp_path / "bucket"))
    store = PriorStore(of, "a")
    store.write(PRIOR, at=5.0)
    store.copy()
    kept_file(home).unlink()
    found = PriorStore(of, "b").read()
    assert found is not None
    assert found.prior == PRIOR


def test_an_output_that_cannot_be_reached_costs_no_run():
    assert PriorStore(job(output="/proc/no/such/folder"), "a").read() is None
    store = PriorStore(job(output="/proc/no/such/folder"), "a")
    store.write(PRIOR, at=5.0)
    store.copy()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run": "a"}'])
def test_a_damaged_file_counts_as_none(home: Path, text: str):
    PriorStore(job(), "a").write(PRIOR, at=5.0)
    kept_file(home).write_text(text)
    assert PriorStore(job(), "b").read() is None


def test_numbers_that_cannot_be_are_not_begun_with(home: Path):
    PriorStore(job(), "a").write(PRIOR, at=5.0)
    file = kept_file(home)
    plain = {"run": "a", "at": 5.0, "workload": {}, "prior": {"num_steps": 1, "window": {"t_seed_s": -4.0}}}
    write_json(file, plain)
    assert PriorStore(job(), "b").read() is None
