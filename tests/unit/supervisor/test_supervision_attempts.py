"""When a role is started again: pauses grow, health and progress are rewarded, hopeless cases end."""

from __future__ import annotations

import pytest

from rlboost_runtime.job import Job, ReasoningGym, Rollout, Spot, TinyModel, Trainer
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.supervisor.roles import roles_of
from rlboost_runtime.supervisor.watched import EX_CONFIG, EX_IOERR, EX_TEMPFAIL, Attempts, Tuning


def attempts(measures_progress: bool = False, **tuning) -> Attempts:
    return Attempts(Tuning(**tuning), measures_progress)


def test_pauses_double_up_to_their_limit():
    role = attempts(crashes=100)
    pauses = [role.ended(1, 0.1, 0) for _ in range(8)]
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]


def test_a_healthy_life_makes_pauses_small_again():
    role = attempts()
    for _ in range(4):
        role.ended(1, 0.1, 0)
    assert role.ended(-9, 31.0, 0) == 0.2
    assert role.ended(-9, 0.1, 0) == 0.4


def test_crashes_in_a_row_are_hopeless_and_a_healthy_life_breaks_the_row():
    role = attempts()
    for _ in range(5):
        role.ended(1, 0.1, 0)
        assert not role.is_hopeless(1)
    role.ended(1, 31.0, 0)
    assert not role.is_hopeless(1)
    for _ in range(5):
        role.ended(None, 0.1, 0)
    assert role.is_hopeless(None)


def test_work_rather_than_life_time_counts_where_it_can_be_seen():
    role = attempts(measures_progress=True)
    for step in range(1, 20):
        role.ended(-11, 1.0, step)
        assert not role.is_hopeless(-11)
    for _ in range(5):
        role.ended(-11, 1000.0, 19)
    assert role.is_hopeless(-11)


def test_leaving_of_its_own_accord_is_no_crash_but_is_not_hurried():
    role = attempts()
    assert {role.ended(0, 0.1, 0) for _ in range(20)} == {10.0}
    assert not role.is_hopeless(0)


def test_a_configuration_error_is_hopeless_at_once():
    role = attempts()
    role.ended(EX_CONFIG, 0.1, 0)
    assert role.is_hopeless(EX_CONFIG)


@pytest.mark.parametrize("status", [EX_TEMPFAIL, -9])
def test_what_others_did_to_a_role_is_borne_with_growing_pauses(status):
    role = attempts(kills=1000, disk_patience_s=1e6)
    pauses = [role.ended(status, 0.1, 0) for _ in range(50)]
    assert not role.is_hopeless(status)
    assert pauses[:3] == [0.2, 0.4, 0.8]
    assert set(pauses[10:]) == {10.0}


def test_kills_without_progress_are_borne_for_minutes_but_not_for_ever():
    role = attempts(measures_progress=True)
    waited_s = sum(role.ended(-9, 1.0, 0) for _ in range(19))
    assert not role.is_hopeless(-9)
    assert waited_s > 120
    role.ended(-9, 1.0, 1)  # a step in between: it has room after all
    for _ in range(18):
        role.ended(-9, 1.0, 1)
        assert not role.is_hopeless(-9)
    role.ended(-9, 1.0, 1)
    assert role.is_hopeless(-9)


def test_a_disk_that_refuses_is_borne_for_its_time_and_no_longer():
    role = attempts(disk_patience_s=60.0)
    borne = 0
    while not role.is_hopeless(EX_TEMPFAIL):
        role.ended(EX_TEMPFAIL, 2.0, 0)
        borne += 1
    assert 5 < borne < 15
    role.ended(0, 31.0, 0)
    assert not role.is_hopeless(0)


def test_a_role_that_gave_up_on_the_disk_itself_is_not_started_again():
    role = attempts()
    role.ended(EX_IOERR, 1000.0, 0)
    assert role.is_hopeless(EX_IOERR)


def test_a_full_disk_between_crashes_neither_counts_nor_excuses_them():
    role = attempts()
    for status in (1, EX_TEMPFAIL, 1, -9, 1, 1, 1, EX_TEMPFAIL):
        role.ended(status, 0.1, 0)
        assert not role.is_hopeless(status)
    role.ended(1, 0.1, 0)
    assert role.is_hopeless(1)


def test_a_role_that_got_on_is_started_again_at_once_however_often_it_is_killed():
    role = attempts()
    assert {role.ended(-9, 4.0, tokens) for tokens in range(1, 40)} == {0.2}
    assert not role.is_hopeless(-9)
    assert [role.ended(-9, 1.0, 39) for _ in range(3)] == [0.4, 0.8, 1.6]


def test_tokens_and_steps_of_any_role_are_progress_of_the_coordinator(tmp_path):
    run = RunFolder(tmp_path)
    run.journal.mkdir()
    job = Job(
        name="job", model=TinyModel(init="tiny"), data=ReasoningGym(reasoning_gym=["basic_arithmetic"]),
        trainer=Trainer(local_engines=1), rollout=Rollout(spot=Spot(max_instances=0)),
    )  # fmt: skip
    roles = {role.name: role for role in roles_of(job, run)}
    seen = set()
    for write in (
        lambda: (run.journal / "step-000001.seg").write_bytes(b"12"),
        lambda: (run.journal / "step-000001.seg").write_bytes(b"123"),
        lambda: run.metrics.write_bytes(b"{}\n"),
    ):
        write()
        seen.add(roles["coordinator"].progress())
    assert len(seen) == 3
    assert roles["trainer"].progress() == 1
    assert roles["trainer"].measures_progress
