"""Log files as a person reads them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from rlboost_cli.views.log_lines import LogLines


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def line(at: float, event: str, **fields: object) -> str:
    return (
        json.dumps({"at": at, "level": "info", "role": "x", "run": "demo", "event": event, **fields}) + "\n"
    )


def test_files_are_merged_in_the_order_of_time(tmp_path: Path) -> None:
    trainer, agent = tmp_path / "trainer.log", tmp_path / "machines" / "spot-1" / "agent-0.log"
    shown = LogLines(tmp_path).of(
        [
            (trainer, line(10, "trainer.connected") + line(30.5, "step.trained", step=8, reward=0.33912)),
            (agent, line(20, "version.pulled", version=3)),
        ]
    )
    assert shown == [
        "00:00:10 trainer         trainer connected",
        "00:00:20 spot-1/agent-0  version pulled  version 3",
        "00:00:30 trainer         step 9 trained  reward 0.339",
    ]


def test_lines_of_others_stay_below_the_line_before_them(tmp_path: Path) -> None:
    a, b = tmp_path / "a.log", tmp_path / "b.log"
    merged = LogLines(tmp_path)
    text = "before\n" + line(10, "it broke", level="error", traceback="Traceback:\n  boom")
    shown = merged.of(
        [(a, text + "after\n"), (b, line(11, "trainer.resumed", after_step=2, policy_version=3))]
    )
    assert shown == [
        "         a  before",
        "00:00:10 a  error: it broke",
        "         a    Traceback:",
        "         a      boom",
        "         a  after",
        "00:00:11 b  trainer resumed  after step 3  policy version 3",
    ]
    assert merged.of([(b, "more\n"), (a, "and more\n")]) == ["         a  and more", "         b  more"]


def test_a_line_that_only_looks_like_ours_is_shown_as_it_is(tmp_path: Path) -> None:
    assert LogLines(tmp_path).of([(tmp_path / "a.log", '{"at": 1}\n{"x\n')]) == [
        '         a  {"at": 1}',
        '         a  {"x',
    ]
