"""`python -m benchmarks.gpu --tiny` as it is typed: the script for GPUs in miniature, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
IN_PROCESS = ("training", "deltas", "cycle", "training_moe")


def check(out: Path, *parts: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--out", str(out), "--only", *parts]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=False, timeout=560,
    )  # fmt: skip
    line: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stderr[-4000:]
    assert line == json.loads(out.read_text())
    return line


@pytest.mark.e2e  # half a minute
def test_training_deltas_and_hand_overs_run_in_miniature(tmp_path: Path) -> None:
    line = check(tmp_path / "result.json", *IN_PROCESS)
    assert line["pass"] is True
    assert line["device"] == "cpu"
    assert set(line["parts"]) == set(IN_PROCESS)
    assert line["parts"]["training"]["figures"]["tokens_per_s"] > 0
    for name in ("training", "training_moe"):
        assert line["parts"][name]["checks"]["kernels_agree"]
        assert "adamw" in line["parts"][name]["figures"]["kernels"]
    assert "experts" in line["parts"]["training_moe"]["figures"]["kernels"]
    assert line["parts"]["cycle"]["figures"]["engine_tokens_per_s"] > 0
