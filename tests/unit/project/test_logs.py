"""Log lines are data: one JSON object each, with the event's own fields."""

from __future__ import annotations

import io
import json
import logging

import pytest

from rlboost_runtime import logs
from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.logs import bind, event, explain, last_explanation, setup


@pytest.fixture
def stream(monkeypatch):
    monkeypatch.setattr(logs, "_context", {})
    monkeypatch.setenv("RLBOOST_RUN", "/somewhere/runs/quickstart")
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    out = io.StringIO()
    setup("agent", stream=out)
    yield out
    root.handlers[:], root.level = before, level
    logging.captureWarnings(False)


def lines(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_event_is_one_json_line_with_role_run_and_fields(stream):
    bind(step=3)
    event(logging.getLogger("x"), "machine.launched", machine="spot-1", price_usd_per_hour=0.0)
    [line] = lines(stream)
    assert line.pop("at") > 0
    assert line == {
        "level": "info",
        "role": "agent",
        "run": "quickstart",
        "event": "machine.launched",
        "step": 3,
        "machine": "spot-1",
        "price_usd_per_hour": 0.0,
    }


def test_a_traceback_stays_on_its_line(stream):
    try:
        raise ValueError("two\nlines")
    except ValueError:
        event(logging.getLogger("x"), "frame.dropped", level=logging.WARNING, exc_info=True)
    [line] = lines(stream)
    assert "ValueError: two\nlines" in line["traceback"]
    assert "exc_info" not in line


def test_the_last_explanation_is_found_between_other_output(tmp_path, stream):
    explain(logging.getLogger("x"), RuntimeFault("old", "old"))
    explain(logging.getLogger("x"), RuntimeFault("disk is full", "free some space"))
    event(logging.getLogger("x"), "process.ended")
    path = tmp_path / "trainer.log"
    path.write_text("Traceback\n" + stream.getvalue() + "process.failed, half a li")
    assert last_explanation(path) == ("disk is full", "free some space", 1)
    assert last_explanation(tmp_path / "absent.log") is None
