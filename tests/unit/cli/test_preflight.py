"""What `launch` checks before anything is bought or started."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlboost_cli.doctor import job, model, preflight
from rlboost_cli.doctor.findings import DoctorContext, Verdict
from rlboost_cli.main import app
from rlboost_cli.runs import supervision
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job.file.load import load_job

JOB = """\
name: demo
model: {init: tiny}
data: {source: prompts.jsonl, prompt_field: text}
reward: rewards.py:score
"""


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC", "MY_KEY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "rewards.py").write_text("def score(response, row):\n    return float(row['answr'])\n")
    (tmp_path / "prompts.jsonl").write_text('{"text": "a", "answer": "1"}\n')
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path / "job.yaml"


def context(job_file: Path, more: str = "") -> DoctorContext:
    job_file.write_text(JOB + more)
    return DoctorContext(job_file.parent / "home", load_job(job_file), job_file)


def test_a_reward_that_cannot_score_a_row_starts_nothing(
    job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: Any) -> None:
        raise ConfigError("started", "")

    monkeypatch.setattr(supervision, "bring_up", started)
    refused = CliRunner().invoke(app, ["launch", str(job_file), "--yes"])
    assert refused.exit_code == 2
    assert "KeyError: 'answr'" in refused.output
    assert "--no-doctor" in refused.output
    assert not (job_file.parent / "home" / "runs").exists()
    assert (
        "error: started" in CliRunner().invoke(app, ["launch", str(job_file), "--yes", "--no-doctor"]).output
    )
    again = CliRunner().invoke(app, ["launch", "demo", "--yes"])
    assert "error: started" in again.output, "an open run goes on"


def test_all_that_is_missing_is_named_at_once(job_file: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        preflight.require_launchable(context(job_file, "secrets: [MY_KEY]\n"), lambda words: None)
    assert "secrets: " in refused.value.problem
    assert "reward: " in refused.value.problem


def test_a_sound_job_passes_without_a_word(job_file: Path) -> None:
    (job_file.parent / "rewards.py").write_text(
        "def score(response, row):\n    return float(row['answer'])\n"
    )
    said: list[str] = []
    preflight.require_launchable(context(job_file), said.append)
    assert said == []


@pytest.mark.parametrize(
    ("wandb", "key", "verdict"),
    [
        ("{project: p}", "", Verdict.FAIL),
        ("{project: p}", "k", Verdict.OK),
        ("{project: p, offline: true}", "", Verdict.OK),
    ],
)
def test_a_tracker_needs_its_key(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, wandb: str, key: str, verdict: Verdict
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("WANDB_API_KEY", key)
    (finding,) = preflight.tracker(context(job_file, f"tracking: {{wandb: {wandb}}}\n"))
    assert finding.verdict is verdict


@pytest.mark.parametrize("field", ["wandb: {project: p}", "tensorboard: true", "otlp: http://a:4318"])
def test_a_tracker_needs_its_package(job_file: Path, monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (finding,) = preflight.tracker(context(job_file, f"tracking: {{{field}}}\n"))
    assert finding.verdict is Verdict.FAIL
    assert finding.found.startswith(f"tracking.{field.partition(':')[0]}: ")
    assert "rlboost[track]" in finding.remedy


@pytest.mark.parametrize(("length", "verdict"), [("len(responses)", Verdict.OK), ("1", Verdict.FAIL)])
def test_a_reward_of_groups_is_given_a_whole_group(job_file: Path, length: str, verdict: Verdict) -> None:
    (job_file.parent / "rewards.py").write_text(
        f"def score(prompt, responses, row):\n    return [1.0] * {length}\n"
    )
    (finding,) = job.reward(context(job_file))
    assert finding.verdict is verdict
    if verdict is Verdict.FAIL:
        assert "returned 1 reward for " in finding.found


def test_an_engine_that_is_not_installed_is_found(job_file: Path) -> None:
    vllm = "rollout: {engine: vllm, engine_args: {python: /nowhere/python}}\n"
    (finding,) = preflight.engine(context(job_file, vllm))
    assert finding.verdict is Verdict.FAIL
    assert "/nowhere/python" in finding.found
    assert list(preflight.engine(context(job_file))) == []


def named(job_file: Path, model: str) -> DoctorContext:
    job_file.write_text(JOB.replace("{init: tiny}", model))
    return DoctorContext(job_file.parent / "home", load_job(job_file), job_file)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str | None]]:
    """A hub that knows acme/known, and acme/moved elsewhere; the tokens that it was shown."""
    tokens: list[str | None] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            tokens.append(self.headers["Authorization"])
            status = {"known": 200, "moved": 307, "busy": 503}.get(self.path.split("/")[2], 401)
            self.send_response(status)
            self.send_header("Location", "http://127.0.0.1:1/elsewhere")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield tokens
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("name", "verdict"),
    [("known", Verdict.OK), ("moved", Verdict.OK), ("busy", Verdict.WARN), ("typo", Verdict.FAIL)],
)
def test_the_hub_is_asked_for_the_model(
    job_file: Path, hub: list[str | None], name: str, verdict: Verdict
) -> None:
    (finding,) = model.resolves(named(job_file, f"acme/{name}"))
    assert finding.verdict is verdict
    assert hub == ["Bearer hf_mine"], "once, and nobody else"


def test_a_model_that_nobody_has_starts_nothing_and_the_folder_that_was_meant_is_named(
    job_file: Path, hub: list[str | None]
) -> None:
    (job_file.parent / "small-llama").mkdir()
    job_file.write_text(JOB.replace("{init: tiny}", "smal-llama").replace("'answr'", "'answer'"))
    refused = CliRunner().invoke(app, ["launch", str(job_file), "--yes"])
    assert refused.exit_code == 2
    assert "the Hugging Face hub has no smal-llama" in refused.output
    assert "write model: small-llama for the folder beside the job file" in refused.output
    assert not (job_file.parent / "home" / "runs").exists()


def test_without_the_hub_only_a_likely_mistake_starts_nothing(
    job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(job_file.parent / "cache"))
    (finding,) = model.resolves(named(job_file, "smal-llama"))
    assert finding.verdict is Verdict.WARN
    (job_file.parent / "small-llama").mkdir()
    (finding,) = model.resolves(named(job_file, "smal-llama"))
    assert finding.verdict is Verdict.FAIL
    assert finding.remedy.startswith("write model: small-llama")


def test_a_cached_model_needs_no_hub(job_file: Path, hub: list[str | None], tmp_path: Path) -> None:
    kept = tmp_path / "cache" / "models--acme--typo" / "snapshots" / "1"
    kept.mkdir(parents=True)
    (kept / "config.json").write_text("{}")
    (finding,) = model.resolves(named(job_file, "acme/typo"))
    assert finding.verdict is Verdict.OK
    assert hub == []


def test_the_templates_bucket_is_nobodys(job_file: Path) -> None:
    (finding,) = preflight.output(context(job_file, "output: s3://my-bucket/runs\n"))
    assert finding.verdict is Verdict.FAIL
    assert finding.found.startswith("output still names")
    assert list(preflight.output(context(job_file, "output: s3://my-buckets/runs\n"))) == []
