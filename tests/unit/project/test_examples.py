"""Examples: each is a valid job, says what to type, and its data are what its generator makes."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from rlboost_cli.main import app
from rlboost_runtime.job import TinyModel
from rlboost_runtime.job.file.load import load_job

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
JOBS = sorted(EXAMPLES.rglob("*.yaml"))
OWN = EXAMPLES / "own_reward"


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_there_are_the_promised_examples() -> None:
    names = {path.relative_to(EXAMPLES).as_posix() for path in JOBS}
    assert names >= {"quickstart.yaml", "count_bits.yaml", "own_reward/job.yaml", "resume/job.yaml"}
    assert len({load_job(path).name for path in JOBS}) == len(JOBS), "two examples would be one run"


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.relative_to(EXAMPLES).as_posix())
def test_check_accepts_it_and_it_is_small(path: Path) -> None:
    done = CliRunner().invoke(app, ["check", str(path), "--json"])
    assert done.exit_code == 0, done.output
    job = load_job(path)
    assert json.loads(done.stdout)["name"] == job.name
    assert isinstance(job.model, TinyModel)
    assert job.trainer.infra == "local"
    assert path.read_text().startswith("# "), "it says what it shows"


def test_own_prompts_are_what_their_generator_writes(tmp_path: Path) -> None:
    (tmp_path / "make_prompts.py").write_bytes((OWN / "make_prompts.py").read_bytes())
    subprocess.run([sys.executable, str(tmp_path / "make_prompts.py")], check=True, timeout=60)
    assert (tmp_path / "prompts.jsonl").read_bytes() == (OWN / "prompts.jsonl").read_bytes()
    rows = [json.loads(line) for line in (OWN / "prompts.jsonl").read_text().splitlines()]
    assert len(rows) >= 200
    assert len({row["prompt"] for row in rows}) == len(rows)
    for row in rows:
        number = re.search(r", (\d\d) kg", row["prompt"])
        assert number is not None
        assert row["answer"] == row["origin"][0] + row["destination"][0] + number[1]


def test_own_reward_gives_more_for_more_of_the_label() -> None:
    score = module(OWN / "rewards.py").score
    row = {"answer": "LO14"}
    rewards = [score(response=text, row=row) for text in ("", "xxxx", "Lxxx", "LO1x", "LO14")]
    assert rewards == sorted(rewards)
    assert (rewards[0], rewards[1], rewards[-1]) == (0.0, 0.0, 1.0)
    assert score(response="LO14 and more", row=row) < score(response="LO1x", row=row)


def test_every_command_of_the_readme_is_one() -> None:
    text = (EXAMPLES / "resume" / "README.md").read_text()
    typed = [line.split("#")[0] for line in text.splitlines() if line.startswith("rlboost ")]
    assert len(typed) >= 6
    for line in typed:
        _, command, *arguments = shlex.split(line)
        done = CliRunner().invoke(app, [command, "--help"])
        assert done.exit_code == 0, line
        for argument in arguments:
            if argument.startswith("--"):
                assert argument in done.output, line
            elif "/" in argument:
                assert (ROOT / argument).is_file(), line
