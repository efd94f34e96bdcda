"""The learning benchmark's own arithmetic: what is compared, what counts as a kill, when the claim holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.learning.analysis import MIN_KILLS_IN_ROLLOUT, difference, summary, verdicts, void_reason
from benchmarks.learning.conditions import QUIET, STORMY, planned
from benchmarks.learning.evidence import RunRecord, interruptions
from rlboost_runtime.coordinator.storage.journal import encode_event
from rlboost_runtime.core.base.messages import Disconnected, NoticeReceived, RunEnding, RunStarted
from rlboost_runtime.run.folder import RunFolder


def record(condition: str, seed: int, last: float, **changes: Any) -> RunRecord:
    stormy = condition == STORMY
    made = RunRecord(
        condition=condition, seed=seed, job_digest="d", commit="c", state="done",
        rewards=[0.3] * 5 + [0.35] * 10 + [last] * 5, seconds=200.0, losses={"reset": 12} if stormy else {},
        kills_in_rollout=12 if stormy else 0, notices_in_rollout=2 if stormy else 0, responses_interrupted=60,
        responses={"migrated": 100}, tokens={}, mismatch_kl_max=1e-12,
        audit_problems=[],
    )  # fmt: skip
    return replace(made, **changes)


def pairs(differences: list[float]) -> list[RunRecord]:
    lasts = [0.44, 0.46, 0.45, 0.47, 0.43, 0.48][: len(differences)]
    runs = [record(QUIET, seed, last) for seed, last in enumerate(lasts)]
    return runs + [
        record(STORMY, k, last + d) for k, (last, d) in enumerate(zip(lasts, differences, strict=True))
    ]


def test_the_difference_is_paired_by_seed() -> None:
    found = difference([1.0, 2.0, 3.0], [1.1, 2.3, 3.2])
    assert found.mean == pytest.approx(0.2)
    assert found.standard_error == pytest.approx(0.1 / 3**0.5)
    assert found.in_standard_errors == pytest.approx(2 * 3**0.5)
    assert found.unpaired_standard_error == pytest.approx(((1 + 1.11) / 3) ** 0.5, abs=0.02)


def test_the_claim_holds_only_within_two_standard_errors() -> None:
    assert all(verdicts(pairs([0.01, -0.01, 0.02, -0.02, 0.005])).values())
    failed = [
        claim for claim, holds in verdicts(pairs([-0.02, -0.021, -0.019, -0.02, -0.02])).items() if not holds
    ]
    assert failed == ["|difference| <= 2 standard errors"]


def test_each_other_condition_is_needed_as_well() -> None:
    good = pairs([0.01, -0.01, 0.02, -0.02, 0.005])
    for spoiled in (
        replace(good[0], losses={"silent": 1}),
        replace(good[5], kills_in_rollout=MIN_KILLS_IN_ROLLOUT - 1),
        replace(good[5], audit_problems=["response 7 never finished"]),
        replace(good[0], commit="other"),
        replace(good[0], state="failed"),
    ):
        runs = [spoiled if (r.condition, r.seed) == (spoiled.condition, spoiled.seed) else r for r in good]
        assert list(verdicts(runs).values()).count(False) == 1, spoiled
    assert not verdicts(pairs([0.01, -0.01, 0.02]))["five seeds or more"]
    flat = [replace(r, rewards=[0.3] * 20 + [r.rewards[-1] / 1000]) for r in good]
    assert not next(holds for claim, holds in verdicts(flat).items() if claim.startswith("both learn"))


def test_a_seed_without_its_pair_is_an_error() -> None:
    with pytest.raises(ValueError, match="quiet and a stormy"):
        summary(pairs([0.0, 0.01])[:-1])


def test_a_run_is_void_for_what_happened_to_it_and_not_for_its_reward() -> None:
    assert void_reason(record(QUIET, 0, 0.0)) is None
    assert void_reason(record(STORMY, 0, 0.0)) is None
    assert "1 instances were lost" in str(void_reason(record(QUIET, 0, 0.9, losses={"silent": 1})))
    assert "7 kills" in str(void_reason(record(STORMY, 0, 0.9, kills_in_rollout=7)))


def test_the_two_runs_of_a_seed_differ_in_the_market_only() -> None:
    runs = planned([3, 4], 40)
    assert [r.name for r in runs] == ["quiet-3", "stormy-3", "stormy-4", "quiet-4"]
    quiet, stormy = runs[0].job, runs[1].job
    (offer,) = stormy["rollout"]["spot"]["any_of"]
    assert offer["market"]["seed"] == 3
    offer["market"] = None
    assert quiet | {"name": ""} == stormy | {"name": ""}


def test_only_what_held_work_counts_as_interrupted_and_nothing_after_the_end(
    new_run: Any, tmp_path: Path
) -> None:
    run, events = new_run(max_spot_instances=0), []
    send = run.send

    def logged(event: Any) -> Any:
        events.append(event)
        return send(event)

    run.send = logged
    run.publish(0)
    run.spot("a", "b", "c", "d")
    run.step(0, 0, groups=3, size=1)
    holders = [name for name in "abcd" if name in run.where().values()]
    (idle,) = set("abcd") - set(holders)
    for name in (holders[0], idle):
        run.send(Disconnected(run.now, name, run.epoch(name)))
    run.until(2.0)
    run.send(NoticeReceived(run.now, holders[1], run.epoch(holders[1]), 5.0))
    run.send(RunEnding(run.now, "done"))
    run.send(Disconnected(run.now, holders[2], run.epoch(holders[2])))
    run.until(5.0)

    folder = RunFolder(tmp_path)
    folder.events.write_bytes(b"".join(map(encode_event, [RunStarted(0.0, run.core.config), *events])))
    found = interruptions(folder)
    assert (found.kills, found.notices) == (1, 1)
    assert found.responses == 1
    assert found.losses == {"reset": 2}


def test_pictures_are_the_same_for_the_same_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.learning.pictures import draw

    runs = pairs([0.01, -0.01, 0.02, -0.02, 0.005])
    drawn = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        drawn.append([path.read_bytes() for path in draw(runs, tmp_path / name)])
    assert drawn[0] == drawn[1]
    assert b"60 kills inside rollouts" in drawn[0][0]
