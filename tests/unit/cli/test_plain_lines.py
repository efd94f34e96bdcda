"""A followed run as plain lines: what is new is told once, and silence never lasts long."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rlboost_cli.runs.run_status import RunStatus, run_status
from rlboost_cli.terminal import output
from rlboost_cli.views import screens
from rlboost_cli.views.live import HEARTBEAT_S, NewLines
from rlboost_runtime.run.folder import RunFolder, write_json


def live(**data: Any) -> RunStatus:
    return RunStatus(data, is_live=True, has_ended=False, age_s=0.0)


def silent(**data: Any) -> RunStatus:
    return RunStatus(data, is_live=False, has_ended=False, age_s=9.0, problem="the coordinator is silent")


class Hand:
    """A clock turned by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_each_step_and_event_is_told_once() -> None:
    new = NewLines()
    event = {"at": 5.0, "kind": "gone", "text": "spot-0 is gone"}
    assert new.of(live(step=0, steps=5)) == []
    first = new.of(
        live(step=1, steps=5, reward_history=[0.25], events=[event], tokens_per_s=10, cost={"spent_usd": 2.0})
    )
    assert first[0].endswith(" spot-0 is gone")
    assert first[1].startswith("step 1/5  reward 0.250  $2.00")
    assert new.of(live(step=1, steps=5, reward_history=[0.25], events=[event])) == []
    later = new.of(live(step=3, steps=5, reward_history=[0.25, 0.5, 0.75]))
    assert later[0] == "step 2/5  reward 0.500"
    assert later[1].startswith("step 3/5  reward 0.750")
    assert len(later) == 2


def test_the_end_comes_last_and_a_former_one_is_not_told_again() -> None:
    def event(at: float, text: str) -> dict[str, Any]:
        return {"at": at, "kind": "ended", "text": text}

    past = [event(5.0, "spot-0 released: idle"), event(6.0, "run failed: KeyError")]
    now = [*past, event(70.0, "spot-1 released: idle")]
    new = NewLines()
    (line,) = new.of(live(state="rollout", step=0, steps=1, events=now))
    assert line.endswith("spot-1 released: idle")
    lines = new.of(live(state="done", step=1, steps=1, events=[*now, event(80.0, "run done")]))
    assert lines[0].startswith("step 1/1")
    assert lines[1].endswith("run done")


def test_a_steps_speed_is_its_own_and_not_the_moments() -> None:
    new = NewLines()
    said = []
    for step, trained, at in (
        (0, 0, 1000.0),
        (1, 500, 1020.0),
        (1, 500, 1024.0),
        (2, 900, 1030.0),
        (4, 9, 1090.0),
    ):
        said += new.of(live(step=step, steps=5, at=at, tokens={"trained": trained}, tokens_per_s=0))
    assert ["40 tokens/s" in line for line in said] == [False, True, False, False], said
    assert not any(" 0 tokens/s" in line for line in said)


def test_a_late_watcher_is_not_told_the_whole_past() -> None:
    lines = NewLines().of(live(step=100, steps=200, reward_history=[0.5] * 100))
    assert len(lines) == 1
    assert lines[0].startswith("step 100/200")


def test_silence_and_its_end_are_told_once() -> None:
    new = NewLines()
    assert new.of(silent()) == ["the coordinator is silent; it is being restarted"]
    assert new.of(silent()) == []
    assert new.of(live()) == ["the coordinator is answering again"]


def test_a_coordinator_that_leaves_at_a_normal_end_is_no_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path / "demo")
    run.path.mkdir()
    write_json(run.job_json, {})
    write_json(run.status, {"run": "demo", "state": "training", "step": 1})
    monkeypatch.setattr("rlboost_cli.runs.run_status.is_supervised", lambda run: True)
    assert "is not answering" in (run_status(run).problem or "")
    write_json(run.ending, {"state": "done"})
    found = run_status(run)
    assert found.problem is None
    assert not found.has_ended
    assert not any("coordinator" in line for line in NewLines().of(found))
    monkeypatch.setattr("rlboost_cli.runs.run_status.is_supervised", lambda run: False)
    assert run_status(run).problem, "nobody ends it any more"


def test_a_step_is_told_as_a_step_and_not_as_an_event_again() -> None:
    event = {"at": 5.0, "kind": "step", "text": "step 1 trained from policy version 0"}
    (line,) = NewLines().of(live(step=1, steps=5, at=5.0, reward_history=[0.25], events=[event]))
    assert line.endswith("step 1/5  reward 0.250  -")
    assert line[2] == line[5] == ":", "each line has its time"


def test_what_is_prepared_is_told_once() -> None:
    new = NewLines()
    loading = live(state="provisioning", phase="loading the model", at=5.0)
    assert new.of(loading)[0].endswith(" loading the model")
    assert new.of(loading) == []
    assert new.of(live(state="provisioning", phase="warming up", at=6.0))[0].endswith(" warming up")
    assert new.of(live(state="rollout", phase="rollout, 1 of 2 responses finished", at=7.0)) == []


def test_a_quiet_run_shows_that_it_lives() -> None:
    clock = Hand()
    new = NewLines(clock)
    status = live(
        step=2,
        steps=9,
        phase="rollout, 1 of 8 responses finished",
        at=5.0,
        tokens_per_s=12,
        cost={"spent_usd": 0.5},
        instances=[{"state": "ready"}, {"state": "loading"}],
    )
    new.of(status)
    assert new.of(status) == []
    clock.now = HEARTBEAT_S
    (line,) = new.of(status)
    for piece in ("step 2/9", "1 of 8 responses", "1 instances ready", "12 tokens/s", "$0.50"):
        assert piece in line
    assert new.of(status) == []
    clock.now = 2 * HEARTBEAT_S - 1
    assert new.of(status) == []


@pytest.mark.parametrize(("infra", "costs"), [("local", False), ("ssh", False), ("aws/us-east-2", True)])
def test_a_second_interrupt_does_not_hide_that_the_run_goes_on(
    infra: str,
    costs: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = RunFolder(tmp_path / "demo")
    run.path.mkdir()
    write_json(run.job_json, {"rollout": {"spot": {"any_of": [{"infra": infra}]}}})
    said = output.progress

    def interrupted(words: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        said(words)

    monkeypatch.setattr(output, "progress", interrupted)
    assert screens.left_alone(run)
    shown = capsys.readouterr().err
    assert "detached; demo is still running" in shown
    assert ("costs money" in shown) == costs
    assert "rlboost down demo             stops it" in shown
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
