"""Options passed through to vLLM: whose they are, and whether the vLLM on this machine knows them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rlboost_runtime.job.file.load import JobErrors, hints, load_job
from rlboost_runtime.run.engine_python import PYTHON_VARIABLE

SOURCE = "class EngineArgs:\n    block_size: int = 16\n    max_num_seqs: int = 1\n    seed: int = 0\n"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write a job file with these options of vLLM; a Python with a vLLM of three options is found."""
    package = tmp_path / "v" / "lib" / "python3.11" / "site-packages" / "vllm" / "engine"
    package.mkdir(parents=True)
    (package / "arg_utils.py").write_text(SOURCE)
    monkeypatch.setenv(PYTHON_VARIABLE, str(tmp_path / "v" / "bin" / "python"))

    def write(args: dict, engine: str = "vllm", **options) -> Path:
        path = tmp_path / "job.yaml"
        rollout = {"engine": engine, "engine_args": options, "vllm_args": args}
        fields = {"name": "j", "model": {"init": "tiny"}, "reward": "exact", "data": {"source": "p.jsonl"}}
        path.write_text(yaml.safe_dump({**fields, "rollout": rollout}, sort_keys=False))
        return path

    (tmp_path / "p.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    return write


def mistake(path: Path) -> str:
    with pytest.raises(JobErrors) as caught:
        load_job(path)
    (line,) = caught.value.lines
    return line.removeprefix(str(path))


def test_known_options_pass_and_are_kept(job) -> None:
    loaded = load_job(job({"block_size": 32, "max_num_seqs": 64}))
    assert loaded.rollout.vllm_args == {"block_size": 32, "max_num_seqs": 64}
    assert loaded.rollout.engine_args.max_running == "auto"
    assert not [hint for hint in hints(loaded) if "vllm_args" in hint]


@pytest.mark.parametrize(
    ("args", "options", "problem"),
    [
        ({"blok_size": 32}, {}, "unknown option of the vLLM on this machine; did you mean block_size?"),
        ({"seed": 3}, {}, "found 3, but RLBoost sets it; use algorithm.seed instead"),
        ({"port": 80}, {}, "found 80, but RLBoost sets it; remove it"),
        (
            {"max_num_seqs": 9},
            {"max_running": 4},
            "found 9, but rollout.engine_args.max_running is 4; remove one of them",
        ),
    ],
)
def test_others_are_refused_where_they_stand(job, args, options, problem) -> None:
    path = job(args, **options)
    (name,) = args
    line = path.read_text().splitlines().index(f"    {name}: {args[name]}") + 1
    assert mistake(path) == f":{line}: rollout.vllm_args.{name}: {problem}"


def test_they_are_options_of_vllm_only(job) -> None:
    assert "the engine is transformers; write engine: vllm" in mistake(job({"block_size": 3}, "transformers"))


def test_without_vllm_here_the_machine_checks(job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, "/nowhere/bin/python")
    told = hints(load_job(job({"blok_size": 32})))
    assert any("rollout.vllm_args: blok_size: checked on the machine" in hint for hint in told)
