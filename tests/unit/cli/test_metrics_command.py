"""`rlboost metrics`: a table on 80 columns, JSON, CSV, runs without a step, and names that do not exist."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlboost_cli.main import app
from rlboost_cli.runs.metrics import MetricHistory, history_of
from rlboost_cli.runs.run_status import RunStatus, status_json
from rlboost_cli.terminal.screen import ASCII, UNICODE, Glyphs, Size
from rlboost_cli.views.ending import WIDTH
from rlboost_cli.views.health import full_warnings
from rlboost_cli.views.metrics import metric_lines, resampled
from rlboost_cli.views.run_view import live_lines, status_lines
from rlboost_runtime.health.glossary import GLOSSARY, IMPORTANT
from rlboost_runtime.health.monitor import HealthMonitor
from rlboost_runtime.protocol.status import Status, read_status
from rlboost_runtime.run.folder import RunFolder, write_json


def row(step: int) -> dict[str, float]:
    line = dict.fromkeys(GLOSSARY.keys() - {"tokens_per_s"}, 0.5) | {"step": float(step)}
    line |= {
        "reward_mean": step / 200,
        "tokens_trained": 123_456.0,
        "step_s": 10.0,
        "entropy": 1 / (step + 1),
    }
    if step % 10:
        del line["eval_reward_mean"], line["eval_reward_best"]
    return line


def make_run(home: Path, name: str, rows: list[dict[str, Any]]) -> RunFolder:
    run = RunFolder(home / "runs" / name)
    run.path.mkdir(parents=True)
    write_json(run.job_json, {})
    write_json(run.outcome, {"state": "done"})
    if rows:
        run.metrics.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return run


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path))
    make_run(tmp_path, "long", [row(step) for step in range(150)])
    make_run(tmp_path, "empty", [])
    return tmp_path


def rlboost(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_the_important_metrics_fit_eighty_columns(home: Path) -> None:
    done = rlboost("metrics", "long")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "long: 150 steps trained"
    assert lines[2].split() == ["metric", "first", "last", "best", "steps", "1", "to", "150"]
    assert [line.split()[0] for line in lines[3:] if not line.startswith("  ")] == [
        *IMPORTANT,
        "reference_kl",
    ]
    reward = next(line for line in lines if line.startswith("reward_mean"))
    assert reward.split()[1:4] == ["0.0000", "0.7450", "0.7450"]
    assert any("prompts that are never trained on" in line for line in lines), "each has its meaning"
    assert next(line for line in lines if line.startswith("tokens_per_s")).split()[1] == "12,346"


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
@pytest.mark.parametrize("width", [60, 80])
def test_any_metrics_fit_any_terminal(home: Path, glyphs: Glyphs, width: int) -> None:
    history = history_of(RunFolder(home / "runs" / "long"))
    lines = list(metric_lines(history, list(GLOSSARY), glyphs, width))
    assert max(map(len, lines)) <= width
    assert glyphs is UNICODE or all(line.isascii() for line in lines)


def test_a_run_without_a_step_says_so(home: Path) -> None:
    done = rlboost("metrics", "empty")
    assert (done.exit_code, done.stdout) == (0, "empty: no metrics, as no step is trained\n")
    assert json.loads(rlboost("metrics", "empty", "--json").stdout) == {
        "run": "empty", "steps": [], "metrics": {}
    }  # fmt: skip
    assert rlboost("metrics", "empty", "--csv").stdout == "step\n"
    assert rlboost("metrics", "empty", "entropy").exit_code == 0


def test_json_and_csv_count_steps_from_one_and_have_every_metric(home: Path) -> None:
    found = json.loads(rlboost("metrics", "long", "--json").stdout)
    assert found["steps"][:2] == [1, 2]
    assert set(found["metrics"]) == GLOSSARY.keys() - {"step"}
    assert found["metrics"]["eval_reward_mean"]["values"][:2] == [0.5, None]
    assert found["metrics"]["reward_mean"]["best"] == 149 / 200
    table = list(csv.DictReader(io.StringIO(rlboost("metrics", "long", "entropy", "--csv").stdout)))
    assert table[0] == {"step": "1", "entropy": "1.0"}
    assert len(table) == 150


def test_names_can_be_chosen_and_wrong_ones_are_corrected(home: Path) -> None:
    done = rlboost("metrics", "long", "grad_norm")
    assert "Otherwise: Lower learning_rate" in done.stdout
    assert "reward_mean" not in done.stdout
    wrong = rlboost("metrics", "long", "grad_nrom")
    assert wrong.exit_code == 2
    assert "there is no metric grad_nrom" in wrong.output
    assert "grad_norm" in wrong.output
    assert rlboost("metrics", "long", "--json", "--csv").exit_code == 2
    assert rlboost("metrics", "nothing").exit_code == 3


def test_figures_that_are_not_finite_and_half_lines_do_no_harm(home: Path) -> None:
    run = make_run(home, "odd", [{"step": 0.0, "grad_norm": math.nan}, {"step": 1.0, "grad_norm": 2.0}])
    with run.metrics.open("a") as file:
        file.write('{"step": 2.0, "grad')
    found = json.loads(rlboost("metrics", "odd", "--json").stdout)
    assert found["metrics"]["grad_norm"]["values"] == [None, 2.0]
    assert rlboost("metrics", "odd", "grad_norm").exit_code == 0


def test_resampling_keeps_the_ends_and_the_width() -> None:
    assert resampled([1.0, None, 3.0], 8) == [1.0, 3.0]
    assert len(resampled([float(n) for n in range(1000)], 37)) == 37
    assert MetricHistory("r", [], []).values("x") == []


# --- warnings and the evaluation in status -----------------------------------------------------------------


def unhealthy() -> Status:
    bad = {"reward_mean": 0.0, "reward_std": 0.0, "truncated_share": 1.0}
    held_out = {"eval_aime_reward_mean": 0.25, "eval_aime_avg_at_8": 0.5}
    monitor = HealthMonitor((n, bad | held_out | {"eval_updates": float(n)}) for n in range(4))
    evaluations = list(monitor.evaluations.values())
    return Status(run="r", state="training", step=4, warnings=monitor.active, evaluations=evaluations)


def found() -> RunStatus:
    import msgspec

    return RunStatus(msgspec.to_builtins(unhealthy()), is_live=True, has_ended=False, age_s=0.0)


def test_status_shows_warnings_with_advice_and_the_evaluation(home: Path) -> None:
    text = "\n".join(status_lines(found(), UNICODE, 80))
    assert "warning  Rewards flat at 0: mean within 0.000 since step 1" in text
    assert "rlboost samples" in text
    assert "Length limit reached by 100%" in text
    assert "eval     aime: reward 0.250 after 3 updates, avg@8 0.500" in text
    data = status_json(RunFolder(home / "runs" / "empty"), found())
    assert [warning["code"] for warning in data["warnings"]] == ["reward_zero", "truncated"]
    assert data["warnings"][0]["advice"]
    assert read_status(data).warnings == unhealthy().warnings


def test_the_live_view_has_a_line_per_warning() -> None:
    lines = live_lines(found(), Size(80, 24), UNICODE)
    shown = [line.text for line in lines if line.style == "warn"]
    assert [text[9:26] for text in shown] == ["Rewards flat at 0", "Length limit reac"]
    assert all(len(line.text) < 80 for line in lines)


def test_warnings_at_the_end_fit_the_summary() -> None:
    lines = full_warnings(unhealthy().warnings, WIDTH)
    assert max(map(len, lines)) <= WIDTH
    assert sum(line.startswith("warning") for line in lines) == 1


def test_the_kl_to_a_reference_is_shown_where_there_is_a_reference(home: Path) -> None:
    make_run(home, "held", [row(step) | {"reference_kl": step / 100} for step in range(3)])
    assert "\nreference_kl " in rlboost("metrics", "held").stdout
    make_run(home, "free", [row(step) | {"reference_kl": 0.0} for step in range(3)])
    assert "\nreference_kl " not in rlboost("metrics", "free").stdout
