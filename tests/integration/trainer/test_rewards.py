"""Rewards in their child process: whatever a user's function does, its response scores 0 and we go on."""

import json
import time
from pathlib import Path

import psutil
import pytest

from rlboost_runtime.errors import ConfigError, RuntimeFault
from rlboost_runtime.job.task import PythonReward
from rlboost_runtime.protocol.reward_failures import RewardFailure
from rlboost_runtime.trainer.data.reading import generate_examples
from rlboost_runtime.trainer.rewards.outcome import Reward, failure_metrics, require_some_reward
from rlboost_runtime.trainer.rewards.pool import OUTPUT_LIMIT_BYTES
from rlboost_runtime.trainer.rewards.scorer import RewardCall, RewardScorer

pytestmark = pytest.mark.integration

MISBEHAVING = """
import os, subprocess, sys, time

def score(prompt, response, row):
    if response == "raise": raise ValueError("no idea")
    if response == "exit": sys.exit(3)
    if response == "hang": subprocess.Popen(["sleep", "1000"]); time.sleep(1000)
    if response == "nan": return float("nan")
    if response == "text": return "1.0"
    if response == "none": return None
    if response == "die": os._exit(7)
    if response == "print":
        for _ in range(64): print("x" * 65536)
        sys.stderr.write("y" * 65536)
        return 0.5
    if response == "stdout": os.close(1); return 0.25
    if response == "greedy": return len(bytearray(2 << 30))
    return len(response) + row["bonus"]
"""


def scorer(
    folder: Path,
    code: str = MISBEHAVING,
    *,
    timeout_s: float = 1.0,
    children: int = 1,
    memory_bytes: int | None = None,
) -> RewardScorer:
    (folder / "rewards.py").write_text(code)
    return RewardScorer(
        "rewards.py:score", folder, timeout_s=timeout_s, log_file=folder / "reward.log",
        num_children=children, memory_bytes=memory_bytes,
    )  # fmt: skip


def calls(*responses: str) -> list[RewardCall]:
    return [RewardCall("p", response, {"bonus": 10}) for response in responses]


def test_every_kind_of_failure_scores_zero_and_the_next_call_works(tmp_path):
    kinds = {
        "raise": RewardFailure.RAISED,
        "exit": RewardFailure.RAISED,
        "hang": RewardFailure.TIMEOUT,
        "nan": RewardFailure.NOT_FINITE,
        "text": RewardFailure.NOT_A_NUMBER,
        "none": RewardFailure.NOT_A_NUMBER,
        "die": RewardFailure.DIED,
    }
    with scorer(tmp_path) as rewards:
        found = rewards.score(calls(*(r for kind in kinds for r in (kind, "fine"))))
    assert found[1::2] == [Reward(14.0)] * len(kinds)
    assert [r.failure for r in found[::2]] == list(kinds.values())
    assert {r.value for r in found[::2]} == {0.0}
    assert "no idea" in found[0].problem
    assert "exit code 7" in found[-2].problem
    metrics = failure_metrics(found)
    assert (metrics["reward_failures_raised"], metrics["reward_failures_timeout"]) == (2, 1)
    assert sum(metrics.values()) == len(kinds)


def test_a_function_that_takes_too_much_memory_fails_alone(tmp_path):
    with scorer(tmp_path, timeout_s=10.0, memory_bytes=1 << 30) as rewards:
        greedy, fine = rewards.score(calls("greedy", "ab"))
    assert greedy.failure is RewardFailure.MEMORY
    assert "MemoryError" in greedy.problem
    assert fine == Reward(12.0)
    assert failure_metrics([greedy, fine])["reward_failures_memory"] == 1
    with scorer(tmp_path, timeout_s=30.0, memory_bytes=8 << 30) as rewards:
        assert rewards.score(calls("greedy")) == [Reward(float(2 << 30))]


def test_a_row_that_cannot_be_handed_over_fails_alone(tmp_path):
    with scorer(tmp_path) as rewards:
        found = rewards.score([RewardCall("p", "ab", {"of the data set": lambda: 1}), *calls("ab")])
    assert found[0].failure is RewardFailure.RAISED
    assert "cannot be sent to the reward process" in found[0].problem
    assert found[1] == Reward(12.0)


def test_nothing_outlives_a_killed_child(tmp_path):
    with scorer(tmp_path, timeout_s=0.5) as rewards:
        rewards.score(calls("hang", "fine"))
        mine = psutil.Process().children(recursive=True)
        assert not [p for p in mine if p.name() == "sleep"]
    assert not [
        p for p in psutil.Process().children(recursive=True) if "reward_child" in " ".join(p.cmdline())
    ]


def test_closing_in_the_middle_of_a_call_is_quiet_and_starts_nothing(tmp_path, caplog):
    log_file = tmp_path / "reward.log"
    code = "import time\ndef score(response):\n    print(response)\n    time.sleep(60)\n"
    with scorer(tmp_path, code, timeout_s=30.0) as rewards:
        (pool,) = rewards._backends.values()
        asked = rewards.submit(calls("asked")[0])
        while not (log_file.exists() and "asked" in log_file.read_text()):
            assert not asked.done()
            time.sleep(0.01)
    assert asked.result().failure is RewardFailure.DIED
    assert caplog.text == ""
    (late,) = pool._children[0].score(calls("late"))
    assert late.failure is RewardFailure.DIED
    assert "late" not in log_file.read_text()


def test_output_is_bounded_and_never_mixes_with_answers(tmp_path):
    with scorer(tmp_path, timeout_s=10.0) as rewards:
        assert [r.value for r in rewards.score(calls("print", "stdout", "ab"))] == [0.5, 0.25, 12.0]
    size = (tmp_path / "reward.log").stat().st_size
    assert OUTPUT_LIMIT_BYTES <= size < OUTPUT_LIMIT_BYTES + 100


def test_several_children_keep_order(tmp_path):
    with scorer(tmp_path, timeout_s=5.0, children=2) as rewards:
        found = rewards.score(calls(*("x" * n for n in range(20))))
    assert [r.value for r in found] == [n + 10 for n in range(20)]


def test_only_the_parameters_that_a_function_has_are_passed(tmp_path):
    with scorer(tmp_path, "def score(response, *, row=None): return len(response)") as rewards:
        assert rewards.score(calls("abc")) == [Reward(3.0)]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (
            "def score(completion): return 1",
            "takes completion, but a reward gets prompt, response, row",
        ),
        ("def other(): return 1", "no function score"),
        ("def score(:", "SyntaxError"),
        ("raise RuntimeError('at import')", "at import"),
        (
            "def score(responses, answer): return []",
            "takes answer, but a reward gets prompt, responses, row",
        ),
        ("import os; os._exit(1)", "its process ended"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_said_at_the_start(tmp_path, code, told):
    with pytest.raises(ConfigError, match=told):
        scorer(tmp_path, code)


GROUP = """
def score(prompt, responses, row):
    if responses[0] == "few": return [1.0]
    if responses[0] == "one": return 1.0
    best = max(map(len, responses))
    return [len(r) / best if r != "nan" else float("nan") for r in responses]
"""


def test_a_function_of_responses_gets_the_whole_group_in_one_call(tmp_path):
    with scorer(tmp_path, GROUP, timeout_s=10.0) as rewards:
        found = [future.result() for future in rewards.submit_group(calls("abcd", "ab", "nan"))]
        assert [(each.value, each.failure) for each in found] == [
            (1.0, None), (0.5, None), (0.0, RewardFailure.NOT_FINITE),
        ]  # fmt: skip
        few = [future.result() for future in rewards.submit_group(calls("few", "x"))]
        assert {(each.value, each.failure) for each in few} == {(0.0, RewardFailure.RAISED)}
        assert "returned 1 reward for 2 responses" in few[1].problem
        assert "returned a float, not a list" in rewards.submit(calls("one")[0]).result().problem
        assert rewards.submit(calls("alone")[0]).result() == Reward(1.0)


ASYNC = """
import asyncio
import time
running = most = 0
async def score(response):
    global running, most
    if response == "late": await asyncio.sleep(60)
    if response == "raise": raise KeyError("answer")
    running += 1
    most = max(most, running)
    await asyncio.sleep(0.2)
    running -= 1
    return most
"""


def test_an_async_function_scores_a_group_at_the_same_time_each_with_its_deadline(tmp_path):
    with scorer(tmp_path, ASYNC, timeout_s=3.0) as rewards:
        futures = rewards.submit_group(calls("a", "late", "b", "raise", "c"))
        found = [future.result() for future in futures]
        assert [each.failure for each in found] == [
            None, RewardFailure.TIMEOUT, None, RewardFailure.RAISED, None,
        ]  # fmt: skip
        assert max(each.value for each in found) == 3.0, "three ran at once"
        assert [f.result() for f in rewards.submit_group(calls("d"))] == [Reward(3.0)], "the process lives on"


NAMED = """
async def judged(responses): return [float(len(r)) for r in responses]
def formatted(response):
    if response == "bad": raise ValueError("no")
    return float(response.startswith("a"))
"""


def test_named_rewards_are_added_by_their_weights_and_kept_apart(tmp_path):
    (tmp_path / "rewards.py").write_text(NAMED)
    wanted = [
        PythonReward(name="length", weight=0.5, python="rewards.py:judged"),
        PythonReward(name="format", weight=-2.0, python="rewards.py:formatted"),
        PythonReward(name="exact", weight=0.0, python="exact"),
    ]
    rows = [RewardCall("p", text, {"answer": "ab"}) for text in ("ab", "bcde", "bad")]
    with RewardScorer(wanted, tmp_path, timeout_s=20, log_file=tmp_path / "log") as rewards:
        assert rewards.name == "rewards.py:judged + rewards.py:formatted + exact"
        found = [future.result() for future in rewards.submit_group(rows)]
    assert found[0] == Reward(0.5 * 2 - 2.0, parts={"length": 2.0, "format": 1.0, "exact": 1.0})
    assert found[1] == Reward(0.5 * 4, parts={"length": 4.0, "format": 0.0, "exact": 0.0})
    assert (found[2].value, found[2].failure) == (1.5, RewardFailure.RAISED)
    assert found[2].problem.startswith("format: rewards.py:4: ValueError")


@pytest.mark.parametrize("reward", ["rewards.py", "maths", "missing.py:score"])
def test_a_reward_that_is_no_function_is_explained(tmp_path, reward):
    with pytest.raises(ConfigError):
        RewardScorer(reward, tmp_path, timeout_s=1, log_file=tmp_path / "log")


def test_a_step_in_which_every_reward_failed_ends_the_run():
    failed = Reward(0.0, RewardFailure.RAISED, "Traceback ...\nKeyError: 'x'")
    require_some_reward([failed, Reward(0.0)], "rewards.py:score")
    with pytest.raises(RuntimeFault, match=r"(?s)rewards.py:score failed for all 2.*KeyError: 'x'"):
        require_some_reward([failed, failed], "rewards.py:score")


def answered(reward: str, folder: Path, *pairs: tuple[str, str]) -> list[Reward]:
    with RewardScorer(reward, folder, timeout_s=30, log_file=folder / "log") as rewards:
        return rewards.score(RewardCall("q", said, {"answer": answer}) for answer, said in pairs)


def test_answers_compared_as_mathematics(tmp_path):
    found = answered(
        "math", tmp_path,
        ("42", r"so it is \boxed{42}"), ("1/2", r"we get $\frac{2}{4}$"), ("x^2+1", "$1 + x^2$"),
        ("2 + 3 = 5\n#### 5", "The answer is 5."), ("42", "The answer is 41."), ("7", "I do not know"),
    )  # fmt: skip
    assert [reward.value for reward in found] == [1, 1, 1, 1, 0, 0]
    assert not any(reward.failure for reward in found)


def test_a_row_without_an_answer_is_a_failure_that_says_so(tmp_path):
    with RewardScorer("exact", tmp_path, timeout_s=30, log_file=tmp_path / "log") as rewards:
        (found,) = rewards.score([RewardCall("q", "said", {})])
    assert found.failure is RewardFailure.RAISED
    assert "no field 'answer'" in found.problem


def test_answers_compared_as_text(tmp_path):
    found = answered("exact", tmp_path, ("yes", " yes\n"), ("yes", "yes!"))
    assert [reward.value for reward in found] == [1.0, 0.0]


def test_answers_are_found_where_verl_and_trl_have_them(tmp_path):
    rows = [
        {"reward_model": {"ground_truth": "yes"}},
        {"solution": "yes"},
        {"answer": "no", "solution": "yes"},
    ]
    with RewardScorer("exact", tmp_path, timeout_s=30, log_file=tmp_path / "log") as rewards:
        found = rewards.score([RewardCall("q", "yes", row) for row in rows])
    assert [reward.value for reward in found] == [1.0, 1.0, 0.0]


def test_the_built_in_scorer(tmp_path):
    from rlboost_runtime.job import ReasoningGym

    # graph_color's rows are keyed by integers, which JSON would turn into text: they must arrive as they are
    data = ReasoningGym(reasoning_gym=["spell_backward", "graph_color"], size=2)
    word, graph = generate_examples(data, seed=1, size=2)
    with RewardScorer("reasoning_gym", tmp_path, timeout_s=30, log_file=tmp_path / "log") as rewards:
        good = RewardCall(word.text, word.answer, word.row)
        bad = RewardCall(word.text, "zzz", word.row)
        colours = RewardCall(graph.text, json.dumps(graph.row["metadata"]["possible_answer"]), graph.row)
        found = [r.value for r in rewards.score([good, bad, colours])]
    assert found[0] == found[2] == 1.0
    assert found[1] < 0.2
