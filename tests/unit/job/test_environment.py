"""What a job file says of its environment is checked before anything is rented."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlboost_runtime.job import Environment
from rlboost_runtime.job.file.load import JobErrors, load_job

JOB = """name: game
model: {init: tiny}
data: {reasoning_gym: [spell_backward]}
"""


def written(folder: Path, environment: str, rest: str = "") -> Path:
    (folder / "env.py").write_text("class Game:\n    pass\n\nasync def play(client, row):\n    return 1\n")
    path = folder / "job.yaml"
    path.write_text(f"{JOB}environment: {environment}\n{rest}")
    return path


def test_advantages_of_turns_need_an_environment_and_a_loss_that_has_them(tmp_path: Path) -> None:
    def job(loss: str, environment: str = "environment: env.py:Game\n") -> Path:
        path = written(tmp_path, "null")
        algorithm = f"algorithm: {{loss: {loss}, advantage_level: turn}}\n"
        path.write_text(path.read_text().replace("environment: null\n", environment) + algorithm)
        return path

    assert load_job(job("dr_grpo")).algorithm.advantage_level == "turn"
    with pytest.raises(JobErrors, match="advantage_level: is turn, but loss gspo has one advantage per resp"):
        load_job(job("gspo"))
    with pytest.raises(JobErrors, match="is turn, but there is no environment"):
        load_job(job("grpo", ""))


def test_versions_in_flight_are_for_single_turns_of_our_own_trainer_that_may_be_behind(
    tmp_path: Path,
) -> None:
    def job(algorithm: str, environment: str = "null", rest: str = "") -> Path:
        return written(tmp_path, environment, f"algorithm: {algorithm}\n{rest}")

    in_flight = "{max_staleness: 1, in_flight_updates: true}"
    assert load_job(job(in_flight)).algorithm.in_flight_updates
    with pytest.raises(JobErrors, match=r"max_staleness is 0: .* write max_staleness: 1"):
        load_job(job("{in_flight_updates: true}"))
    with pytest.raises(JobErrors, match="turns of an environment's episodes have one version"):
        load_job(job(in_flight, "env.py:Game"))
    (tmp_path / "train.py").write_text("")
    with pytest.raises(JobErrors, match=r"for RLBoost.s own trainer, but trainer\.script is set"):
        load_job(job(in_flight, rest="trainer: {script: train.py}\n"))


@pytest.mark.parametrize("environment", ["env.py:Game", "env.py:play", "{python: 'env.py:Game', tries: 1}"])
def test_a_class_or_a_function_of_a_file_is_an_environment(tmp_path: Path, environment: str) -> None:
    found = load_job(written(tmp_path, environment)).episodes
    assert isinstance(found, Environment)
    assert found.file == "env.py"


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ("enw.py:Game", "environment: found 'enw.py', which does not exist; did you mean env.py?"),
        ("env.py:Gam", "environment: found env.py:Gam, but env.py has no class or function Gam; "),
        ("env.py", "environment: found env.py without a class or function; write env.py:Game or env.py:play"),
        ("game", "environment: found 'game'; write FILE.py:NAME, such as game.py:Env"),
        ("{python: 'env.py:G'}", "environment.python: found env.py:G, but "),
        ("{pyton: 'env.py:Game'}", "environment.pyton: unknown field; did you mean python?"),
        ("7", "environment: found 7 (a number); write FILE.py:NAME, {python: FILE.py:NAME}, {command: "),
        ("[a]", "environment: found a list; write FILE.py:NAME, "),
        ("{tries: 2}", "environment has none of python, command, verifiers, openenv; write one of them"),
        ("{command: [a], python: 'env.py:Game'}", "environment has python and command; write one of them"),
        ("{verifiers: {}}", "environment.verifiers.taskset: "),
        ("{openenv: {}}", "openenv has neither url nor command; write one of them"),
        ("{openenv: {url: 'http://a', command: [a]}}", "openenv has both url and command"),
        ("{openenv: {command: [python, a.py]}}", "openenv.command does not contain {port}"),
        (
            "{openenv: {url: 'http://a'}}",
            "elsewhere (openenv.url), but the sandbox has no network; write reward_network: true",
        ),
        ("{command: [python, a.py]}", "the sandbox has no network; write reward_network: true"),
    ],
)
def test_a_mistake_is_told_with_its_line_and_what_to_do(
    tmp_path: Path, environment: str, problem: str
) -> None:
    with pytest.raises(JobErrors) as refusal:
        load_job(written(tmp_path, environment))
    assert problem in str(refusal.value)
    assert "job.yaml:4: " in str(refusal.value)


@pytest.mark.parametrize("rest", ["reward_network: true", "reward_sandbox: off"])
def test_a_program_needs_a_way_to_the_model(tmp_path: Path, rest: str) -> None:
    assert load_job(written(tmp_path, "{command: [python, a.py]}", rest)).episodes is not None


@pytest.mark.parametrize("rest", ["algorithm: {loss: dpo}", "endpoint: {trains: false}"])
def test_some_jobs_have_no_use_for_one(tmp_path: Path, rest: str) -> None:
    with pytest.raises(JobErrors, match=r"job\.yaml:4: environment: is for "):
        load_job(written(tmp_path, "env.py:Game", rest))
