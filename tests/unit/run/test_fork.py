"""A new run from a checkpoint of another: what it takes along, and which jobs are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlboost_cli.runs.run_status import run_status
from rlboost_cli.runs.target import find_target
from rlboost_cli.terminal.screen import ASCII
from rlboost_cli.views.run_view import status_lines
from rlboost_runtime.errors import ConfigError, NotFound
from rlboost_runtime.run.checkpoints import ForkPoint, ancestors_of, saved_steps, step_folder
from rlboost_runtime.run.folder import RunFolder, write_json

JOB = """\
name: NAME
model: {init: tiny}
data: {source: prompts.jsonl, prompt_field: text}
reward: rewards.py:score
algorithm: {steps: 9, learning_rate: 1.0e-5}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text("def score(prompt, response):\n    return 0.0\n")
    (tmp_path / "prompts.jsonl").write_text('{"text": "a"}\n')
    return tmp_path


def job_file(name: str, old: str = "", new: str = "") -> str:
    path = Path(f"{name}.yaml")
    assert old in JOB
    path.write_text(JOB.replace("NAME", name).replace(old, new) if old else JOB.replace("NAME", name))
    return str(path)


@pytest.fixture
def parent(folder: Path) -> RunFolder:
    """Checkpoints after steps 3 and 4, as people count."""
    run = find_target(job_file("parent"), resume=False).prepare(resume=False).run
    for step in (2, 3):
        checkpoint = step_folder(run.checkpoints, step)
        checkpoint.mkdir(parents=True)
        (checkpoint / "optimizer.pt").write_bytes(b"moments")
    run.metrics.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(5)))
    run.evaluations.write_text(json.dumps({"step": 2.0, "evaluation": "held_out", "reward": 0.5}) + "\n")
    return run


def test_a_fork_has_the_checkpoint_the_history_and_its_ancestry(parent: RunFolder) -> None:
    target = find_target(job_file("fork", "1.0e-5", "2.0e-5"), resume=False, start="parent@3")
    assert (target.name, target.num_steps_left, target.is_to_start) == ("fork", 6, True)
    found = target.prepare(resume=False)
    assert found.is_new
    run = found.run
    assert found.job.algorithm.learning_rate == 2e-5
    assert saved_steps(run.checkpoints) == [2]
    copied = step_folder(run.checkpoints, 2) / "optimizer.pt"
    assert copied.samefile(step_folder(parent.checkpoints, 2) / "optimizer.pt"), "no second copy on disk"
    assert run.metrics.read_text() == parent.metrics.read_text()
    assert run.evaluations.read_text() == parent.evaluations.read_text()
    assert ancestors_of(run) == ["parent@3"]
    assert ancestors_of(parent) == []
    child = find_target(job_file("child"), resume=False, start="fork").prepare(resume=False).run
    assert ancestors_of(child) == ["fork@3", "parent@3"]
    assert "step     0/9" in "\n".join(status_lines(run_status(child), ASCII)), (
        "nothing reported yet: the job's"
    )
    write_json(child.status, {"run": "child", "step": 3, "ancestors": ancestors_of(child)})
    write_json(child.outcome, {"state": "done"})
    assert "from     fork@3, from parent@3" in status_lines(run_status(child), ASCII)


def test_the_newest_checkpoint_is_meant_without_a_step(parent: RunFolder) -> None:
    assert ForkPoint.find("parent").step == 4
    with pytest.raises(NotFound, match="no checkpoint after step 1 here; take one of parent@3, parent@4"):
        ForkPoint.find("parent@1")
    with pytest.raises(ConfigError, match="write parent@STEP"):
        ForkPoint.find("parent@last")
    with pytest.raises(NotFound, match="did you mean parent"):
        ForkPoint.find("parnt@3")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "{init: tiny}",
            "{init: tiny, num_layers: 3}",
            "of another model or optimizer: model.num_layers: 2 there, 3 here",
        ),
        ("steps: 9", "steps: 9, lora: {rank: 4}", "algorithm.lora"),
        (
            "steps: 9",
            "steps: 9, weight_decay: 0.1",
            "algorithm.weight_decay: 0 there, 0.1 here, and one is 0",
        ),
        ("steps: 9", "steps: 3", "algorithm.steps is 3, and parent@3 has 3 steps already"),
    ],
)
def test_a_job_that_cannot_go_on_from_the_checkpoint_is_refused(
    parent: RunFolder, old: str, new: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        find_target(job_file("fork", old, new), resume=False, start="parent@3")
    assert not RunFolder.named("fork").path.exists()


def test_a_fork_is_always_a_new_run(parent: RunFolder) -> None:
    with pytest.raises(ConfigError, match="run parent is open, and a fork is a new run"):
        find_target("parent.yaml", resume=False, start="parent@3").prepare(resume=False)
    with pytest.raises(ConfigError, match="parent is no job file"):
        find_target("parent", resume=False, start="parent@3")
    with pytest.raises(ConfigError, match="--from and --resume were given"):
        find_target("parent.yaml", resume=True, start="parent@3")
    write_json(parent.outcome, {"state": "stopped"})
    again = find_target("parent.yaml", resume=False, start="parent@3").prepare(resume=False)
    assert again.run.name == "parent-2"


def test_a_checkpoint_that_is_deleted_meanwhile_leaves_no_run(parent: RunFolder) -> None:
    target = find_target(job_file("fork"), resume=False, start="parent@3")
    (step_folder(parent.checkpoints, 2) / "optimizer.pt").unlink()
    step_folder(parent.checkpoints, 2).rmdir()
    with pytest.raises(NotFound, match="parent@3 cannot be read"):
        target.prepare(resume=False)
    assert not RunFolder.named("fork").path.exists()
