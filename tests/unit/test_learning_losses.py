"""The learning runs per loss and staleness: jobs that load, and verdicts that can be no."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.learning.losses import LOSSES, judge_losses, judge_staleness, planned
from rlboost_runtime.job_file import load_job

UP, DOWN = [0.1] * 5 + [0.4] * 5, [0.4] * 5 + [0.1] * 5


@pytest.mark.parametrize(("what", "seeds", "count"), [("losses", 3, 21), ("staleness", 5, 10)])
def test_every_run_is_a_job_of_its_own(what: str, seeds: int, count: int, tmp_path: Path) -> None:
    runs = planned(what, seeds, 12)
    jobs = [load_job(run.write(tmp_path)) for run in runs]
    assert len({job.name for job in jobs}) == len(jobs) == count
    assert all(job.algorithm.steps == 12 and job.rollout.spot.any_of[0].market is None for job in jobs)
    if what == "losses":
        assert {job.algorithm.loss for job in jobs} == set(LOSSES)
    else:
        assert {job.algorithm.max_staleness for job in jobs} == {0, 1}


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
