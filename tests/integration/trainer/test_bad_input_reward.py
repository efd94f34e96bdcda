"""Rewards that misbehave, as real files in real processes: what is told, what is scored, what is left."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rlboost_runtime.coordinator.observers.steps import StepWarnings
from rlboost_runtime.errors import ConfigError, RuntimeFault
from rlboost_runtime.protocol.reward_failures import (
    SCORED_METRIC,
    FailureCount,
    RewardFailure,
    count_failures,
)
from rlboost_runtime.trainer.rewards.outcome import (
    FAILED_SCORE,
    HOPELESS,
    Reward,
    RewardWatch,
    failure_metrics,
    require_some_reward,
)
from rlboost_runtime.trainer.rewards.scorer import RewardCall, RewardScorer

pytestmark = pytest.mark.integration

CODE = """\
import sys, time

def raises(prompt, response, row):
    answers = {}
    return answers[response]

def hangs(response):
    time.sleep(1000)

def nan(response):
    return float("nan")

def loud(response):
    for _ in range(64):
        print("x" * 65536)
    sys.stderr.write("y" * 4_000_000)
    return 1

def text(response):
    return "0.5"

def deep(response):
    import helper
    return helper.judge(response)

def multi(response):
    raise ValueError("first line\\nsecond line")
"""
HELPER = "def judge(response):\n    return 1 / 0\n"


def score(folder: Path, function: str, count: int = 1) -> list[Reward]:
    (folder / "rewards.py").write_text(CODE)
    (folder / "helper.py").write_text(HELPER)
    with RewardScorer(
        f"rewards.py:{function}",
        folder,
        timeout_s=0.3 if function == "hangs" else 20.0,
        log_file=folder / "reward.log",
    ) as scorer:
        assert reward_processes() == 1
        rewards = scorer.score([RewardCall("p", f"r{n}", {}) for n in range(count)])
    assert reward_processes() == 0
    return rewards


def reward_processes() -> int:
    """How many processes below this one compute rewards."""
    found = 0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it ends at this moment, or has and nobody has asked how
            found += "rlboost_runtime.trainer.rewards.child" in child.cmdline()
    return found


@pytest.mark.parametrize(
    ("function", "kind", "told"),
    [
        ("raises", RewardFailure.RAISED, "rewards.py:5: KeyError: 'r0'"),
        ("hangs", RewardFailure.TIMEOUT, "no answer within 0.3 s"),
        ("nan", RewardFailure.NOT_FINITE, "returned nan"),
        ("text", RewardFailure.NOT_A_NUMBER, "returned '0.5'"),
        ("deep", RewardFailure.RAISED, "helper.py:2: ZeroDivisionError: division by zero"),
        ("multi", RewardFailure.RAISED, "ValueError: first line second line"),
    ],
)
def test_a_reward_that_fails_scores_by_the_rule_and_says_where(
    tmp_path: Path, function: str, kind: RewardFailure, told: str
) -> None:
    (reward,) = score(tmp_path, function)
    assert (reward.value, reward.failure) == (FAILED_SCORE, kind)
    assert told in reward.problem
    assert "\n" not in reward.problem
    with pytest.raises(RuntimeFault) as error:
        require_some_reward([reward, reward], f"rewards.py:{function}")
    assert f"reward rewards.py:{function} failed for all 2 responses of the step" in error.value.problem
    assert told in error.value.problem
    assert error.value.remedy.startswith("correct it, then launch the run again with --resume")
    assert error.value.remedy.endswith("`rlboost logs RUN reward` shows what it printed")


def test_the_traceback_is_in_the_log_for_whoever_wants_it(tmp_path: Path) -> None:
    score(tmp_path, "deep")
    assert "ZeroDivisionError" in (tmp_path / "reward.log").read_text()
    assert 'helper.py", line 2' in (tmp_path / "reward.log").read_text()


def test_megabytes_of_prints_cost_a_megabyte_of_disk_and_no_reward(tmp_path: Path) -> None:
    assert score(tmp_path, "loud", 3) == [Reward(1.0)] * 3
    assert os.path.getsize(tmp_path / "reward.log") < (1 << 20) + 200
    assert "further output of this process is dropped" in (tmp_path / "reward.log").read_text()


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("def score(:\n", "rewards.py:1: SyntaxError: invalid syntax"),
        ("import os\n\nraise RuntimeError('at import')\n", "rewards.py:3: RuntimeError: at import"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_told_with_its_line(tmp_path: Path, code: str, told: str) -> None:
    (tmp_path / "rewards.py").write_text(code)
    with pytest.raises(ConfigError) as error:
        RewardScorer("rewards.py:score", tmp_path, timeout_s=1.0, log_file=tmp_path / "reward.log")
    assert error.value.problem == f"reward: rewards.py:score cannot be loaded: {told}"
    assert error.value.exit_code == 2


def test_nobody_waits_a_night_for_timeouts() -> None:
    late = Reward(FAILED_SCORE, RewardFailure.TIMEOUT, "no answer within 10 s")
    watch = RewardWatch("rewards.py:score")
    watch.saw([late] * (HOPELESS - 1))
    with pytest.raises(RuntimeFault, match=rf"failed for the first {HOPELESS} responses; .* took too long"):
        watch.saw([late])
    worked = RewardWatch("rewards.py:score")
    worked.saw([late] * (HOPELESS - 1))
    worked.saw([Reward(1.0)])
    worked.saw([late] * 1000)  # single failures are scored and counted, not fatal


def test_failures_are_counted_told_calmly_and_survive_a_restart() -> None:
    bad = [Reward(0.0, RewardFailure.TIMEOUT), Reward(0.0, RewardFailure.RAISED)]
    good = failure_metrics([Reward(1.0)] * 8) | {SCORED_METRIC: 8.0}
    some = failure_metrics([*bad, *[Reward(1.0)] * 6]) | {SCORED_METRIC: 8.0}
    concerns = StepWarnings([])
    assert concerns.trained(0, good) == []
    words = "2 of 8 responses scored 0 because their reward failed (1 raised an error, 1 took too long)"
    assert concerns.trained(1, some) == [("reward", f"step 2: {words}")]
    told = [bool(concerns.trained(step, some)) for step in range(2, 9)]
    assert told == [True, False, True, False, False, False, True]  # at 4, 8 and 16 failures
    again = StepWarnings([good, *[some] * 8])
    assert again.rewards == concerns.rewards
    assert FailureCount.from_json(again.rewards.as_json()) == concerns.rewards
    assert concerns.rewards.in_words().startswith("16 of 72 responses scored 0")
    assert count_failures([{}]).failed == 0  # metrics of an older version
