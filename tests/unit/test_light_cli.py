"""Asking for help costs nothing: no torch, no SDK, no server, not even a YAML parser is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON_PATH = os.pathsep.join(str(ROOT / part) for part in ("", "runtime", "providers", "templates"))
HEAVY = {
    *("torch", "transformers", "safetensors", "reasoning_gym", "vllm", "numpy"),
    *("fastapi", "uvicorn", "aiohttp", "websockets", "cryptography", "ruamel"),
    *("sky", "boto3", "google", "paramiko"),
}
SCRIPT = """
import sys
from rlboost_cli.main import run
sys.argv = ["rlboost", *sys.argv[1:]]
try:
    run()
finally:
    print("LOADED", *sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""


def rlboost(*arguments: str, script: bool = False) -> subprocess.CompletedProcess[str]:
    start = ["-c", SCRIPT] if script else ["-m", "rlboost_cli"]
    return subprocess.run(
        [sys.executable, *start, *arguments],
        env={**os.environ, "PYTHONPATH": PYTHON_PATH, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("arguments", [["--help"], ["launch", "--help"], ["status", "--help"]], ids=" ".join)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    done = rlboost(*arguments, script=True)
    assert done.returncode == 0, done.stderr
    assert "Usage: rlboost" in done.stdout
    loaded = next(line for line in done.stderr.splitlines() if line.startswith("LOADED")).split()[1:]
    assert "typer" in loaded
    assert not HEAVY & set(loaded)


def test_the_module_is_a_program_too() -> None:
    done = rlboost("--help")
    assert done.returncode == 0, done.stderr
    for command in ("check", "up", "launch", "status", "logs", "cost", "preempt", "down"):
        assert f"\n  {command} " in done.stdout, f"{command} is not listed"


def test_a_bad_job_file_is_told_line_by_line_and_exits_2(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("name: a\nmodel: {init: tiny}\ndata: {source: gone.jsonl}\nalgorithm: {group_sise: 8}\n")
    done = rlboost("check", str(job), script=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert f"{job}:3: data.source: found 'gone.jsonl'" in done.stderr
    assert f"{job}:4: algorithm.group_sise: unknown field; did you mean group_size?" in done.stderr
    loaded = next(line for line in done.stderr.splitlines() if line.startswith("LOADED")).split()[1:]
    assert not {"torch", "fastapi", "aiohttp", "numpy"} & set(loaded)
