"""Variables and secrets of a job: where they come from, where they are kept, what is said where one lacks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlboost_cli.runs.teardown import end_run
from rlboost_providers.base.terminate import Terminated
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import Job
from rlboost_runtime.run.create import gather, keep, kept, prepare_run, resume_run
from rlboost_runtime.run.folder import RunFolder, write_json
from rlboost_runtime.supervisor import machines

JOB = """\
name: demo
model: {init: tiny}
data: {source: prompts.jsonl, prompt_field: text}
reward: exact
env: {MARKS: "10"}
secrets: [JUDGE_KEY]
"""


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    (tmp_path / "prompts.jsonl").write_text('{"text": "a", "answer": "b"}\n')
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path / "job.yaml"


def load(path: Path) -> Job:
    from rlboost_runtime.job.file.load import load_job

    return load_job(path)


def test_a_secret_that_is_not_set_is_named_before_there_is_a_run(job_file: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        prepare_run(job_file, load(job_file))
    assert refusal.value.problem == "JUDGE_KEY: not set in the environment"
    assert refusal.value.remedy == "type: export JUDGE_KEY=..., or remove it from the job's secrets"
    assert not RunFolder.named("demo").path.exists()


def test_values_lie_in_one_file_for_the_owner_alone(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "of-the-judge")
    run = prepare_run(job_file, load(job_file)).run
    assert kept(run) == {"MARKS": "10", "JUDGE_KEY": "of-the-judge"}
    holders = [
        path for path in run.path.rglob("*") if path.is_file() and b"of-the-judge" in path.read_bytes()
    ]
    assert holders == [run.environment]
    assert run.environment.stat().st_mode & 0o777 == 0o600


def test_a_resumed_run_takes_a_new_value_and_keeps_one_that_is_not_set_now(
    job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "old")
    job = load(job_file)
    run = prepare_run(job_file, job).run
    for value, expected in (("new", "new"), (None, "new")):
        write_json(run.outcome, {"state": "stopped"})
        if value is None:
            monkeypatch.delenv("JUDGE_KEY")
        else:
            monkeypatch.setenv("JUDGE_KEY", value)
        resume_run(run, job_file, job)
        assert kept(run)["JUDGE_KEY"] == expected


def test_what_the_job_does_not_name_any_more_is_not_kept(tmp_path: Path, job_file: Path) -> None:
    run = RunFolder(tmp_path / "demo")
    run.environment.parent.mkdir(parents=True)
    job = load(job_file)
    job.secrets.clear()
    write_json(run.environment, {"JUDGE_KEY": "old"})
    keep(run, job)
    assert kept(run) == {"MARKS": "10"} == gather(job)


def test_a_run_is_ended_with_the_keys_that_it_was_given(
    job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`down` on a head elsewhere: nobody has typed keys of a cloud there."""
    monkeypatch.setenv("JUDGE_KEY", "of-the-judge")
    run = prepare_run(job_file, load(job_file)).run
    monkeypatch.delenv("JUDGE_KEY")
    had: list[str | None] = []

    def end_machines(job: Job, run: RunFolder, say: object) -> Terminated:
        had.append(os.environ.get("JUDGE_KEY"))
        return Terminated((), ())

    monkeypatch.setattr(machines, "end_machines", end_machines)
    end_run(run, lambda words: None)
    assert had == ["of-the-judge"]
    assert "JUDGE_KEY" not in os.environ
