"""What `launch` means by a job file or a run's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlboost_cli.runs.target import NothingLeft, find_target
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.run.create import prepare_run
from rlboost_runtime.run.folder import RunFolder, write_json
from rlboost_runtime.run.index import is_open

JOB = """\
name: demo
model: {init: tiny}
data: {source: prompts.jsonl, prompt_field: text}
reward: rewards.py:score
algorithm: {steps: 3}
"""


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path / "home"))
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "rewards.py").write_text("def score(prompt, response):\n    return 0.0\n")
    (folder / "prompts.jsonl").write_text('{"text": "a"}\n')
    (folder / "job.yaml").write_text(JOB)
    return folder / "job.yaml"


@pytest.fixture
def ended(job_file: Path) -> RunFolder:
    run = find_target(str(job_file), resume=False).prepare(resume=False).run
    write_json(run.outcome, {"state": "failed", "exit_code": 1})
    return run


def test_the_plan_names_the_run_that_will_be_made(job_file: Path) -> None:
    first = find_target(str(job_file), resume=False)
    assert first.name == "demo"
    run = first.prepare(resume=False).run
    assert find_target(str(job_file), resume=False).name == "demo", "it is open"
    write_json(run.outcome, {"state": "failed", "exit_code": 1})
    assert find_target(str(job_file), resume=True).name == "demo"
    second = find_target(str(job_file), resume=False)
    assert second.name == second.prepare(resume=False).run.name == "demo-2"


def test_an_ended_run_is_resumed_by_name_with_its_job_file_as_it_is_now(
    job_file: Path, ended: RunFolder
) -> None:
    job_file.write_text(JOB.replace("steps: 3", "steps: 9"))
    (job_file.parent / "rewards.py").write_text("def score(prompt, response):\n    return 1.0\n")
    found = find_target("demo", resume=True).prepare(resume=True)
    assert found.run == ended
    assert found.job.algorithm.steps == 9
    assert found.renewed_files == ("rewards.py",)
    assert "1.0" in (ended.files / "rewards.py").read_text()
    assert is_open(ended)


def test_a_numbered_run_is_resumed_and_not_the_first_of_its_name(job_file: Path, ended: RunFolder) -> None:
    second = find_target(str(job_file), resume=False).prepare(resume=False).run
    assert second.name == "demo-2"
    write_json(second.outcome, {"state": "failed", "exit_code": 1})
    assert find_target("demo-2", resume=True).prepare(resume=True).run == second
    assert find_target("demo", resume=True).prepare(resume=True).run == ended


def test_a_resumed_run_whose_job_file_is_gone_goes_on_as_it_was(job_file: Path, ended: RunFolder) -> None:
    job_file.unlink()
    found = find_target("demo", resume=True).prepare(resume=True)
    assert (found.run, found.job.algorithm.steps) == (ended, 3)
    assert is_open(ended)


def test_a_job_file_that_became_another_job_leaves_the_run_ended(job_file: Path, ended: RunFolder) -> None:
    job_file.write_text(JOB.replace("steps: 3", "steps: 3, group_size: 2"))
    with pytest.raises(ConfigError, match=r"run demo has another job: algorithm\.group_size"):
        find_target("demo", resume=True).prepare(resume=True)
    assert not is_open(ended)


def test_an_open_run_goes_on_with_its_own_job_whatever_became_of_the_file(job_file: Path) -> None:
    run = prepare_run(job_file, find_target(str(job_file), resume=False).job).run
    job_file.write_text("nonsense: [")
    for resume in (False, True):
        assert find_target("demo", resume=resume).prepare(resume=resume).run == run


def test_an_ended_run_is_not_started_by_its_name_alone(ended: RunFolder) -> None:
    with pytest.raises(ConfigError, match="run demo has ended: failed"):
        find_target("demo", resume=False)


def test_a_run_that_is_done_has_nothing_left_to_launch(job_file: Path, ended: RunFolder) -> None:
    write_json(ended.outcome, {"state": "done", "exit_code": 0})
    write_json(ended.status, {"run": "demo", "state": "done", "step": 3, "steps": 3})
    for name, resume in (("demo", False), ("demo", True), (str(job_file), True)):
        with pytest.raises(NothingLeft, match="all of its 3 steps") as found:
            find_target(name, resume=resume)
        assert found.value.run == ended
    assert find_target(str(job_file), resume=False).run is None, "a job file starts a new run"
    job_file.write_text(JOB.replace("steps: 3", "steps: 9"))
    assert find_target("demo", resume=True).job.algorithm.steps == 9
