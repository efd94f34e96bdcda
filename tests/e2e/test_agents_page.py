"""The page "train your agent": its commands as written, to a reward that has risen."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
MINUTES = 10.0


def test_from_a_launch_to_a_reward_that_has_risen(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _, rest = PAGE.partition("## In ten minutes")[2].partition("\n## ")[0].strip().partition("\n\n")
    install, launch = first.strip("`\n").splitlines()
    assert install.startswith("pip install 'rlboost[train]'"), "test_wheel installs it so"
    shutil.copytree(ROOT / "examples", cli.home / "examples")
    monkeypatch.chdir(cli.home)
    program, *words = shlex.split(launch)
    assert program == "rlboost"
    cli(*words, timeout_s=MINUTES * 60)
    lines = cli.run_folder("guess").metrics.read_text().splitlines()
    rewards = [json.loads(line)["reward_mean"] for line in lines]
    assert len(rewards) == 60
    assert fmean(rewards[-10:]) > fmean(rewards[:10]) + 0.05
    assert sum(cli.json("status", "guess")["preemptions"].values()) > 0, "while its spot machines are killed"
    commands = re.findall(r"`rlboost ((?:samples|metrics) guess[^`]*)`", rest)
    samples, turns = (cli(*shlex.split(command)).stdout for command in commands)
    assert "1 to 9?" in samples
    assert "turns_mean" in turns
    cli("down", "guess", "--yes")
    cli.assert_gone("guess")
