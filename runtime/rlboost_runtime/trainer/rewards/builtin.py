"""Rewards that come with RLBoost; each answers with a number for a `RewardCall`.

- `reasoning_gym`: the data set's own scorer, for rows that reasoning-gym made.
- `math`: 1.0 if the response's final answer equals the row's `answer` as mathematics (math-verify: LaTeX,
  boxed or not, fractions, sets, intervals, ...), else 0.0. Of an `answer` like GSM8K's, what follows `####`
  counts. Without an `answer`, veRL's `ground_truth` in `reward_model` is taken, or TRL's `solution`.
- `exact`: 1.0 if response and the row's `answer` are the same text, but for space around them, else 0.0.

Deadlines are the pool's part: a process that takes too long is killed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlboost_runtime.trainer.data.reading import import_reasoning_gym

if TYPE_CHECKING:
    from rlboost_runtime.trainer.rewards.outcome import RewardCall, Score


def built_in(name: str) -> Score:
    """Return the reward called `name`; its imports take seconds."""
    return {"reasoning_gym": _reasoning_gym, "math": _math, "exact": _exact}[name]()


def _reasoning_gym() -> Score:
    make = import_reasoning_gym().get_score_answer_fn
    scorer = functools.cache(make)  # making one reads files: tens of milliseconds

    def score(call: RewardCall) -> object:
        return scorer(call.row["metadata"]["source_dataset"])(call.response, call.row)

    return score


def _math() -> Score:
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of each call without its own timeout
    wanted = functools.lru_cache(maxsize=4096)(functools.partial(_gold, parse))

    def score(call: RewardCall) -> object:
        gold = wanted(_answer(call))
        return float(verify(gold, parse(call.response, parsing_timeout=None), timeout_seconds=None))

    return score


def _gold(parse: Callable[..., list[object]], answer: str) -> list[object]:
    text = answer.rpartition("####")[2].strip()
    found = parse(text if "$" in text or "\\boxed" in text else f"${text}$", parsing_timeout=None)
    if not found:
        raise ValueError(f"the row's answer {answer!r} is no number and no formula")
    return found


def _exact() -> Score:
    return lambda call: float(call.response.strip() == _answer(call).strip())


def _answer(call: RewardCall) -> str:
    verl = call.row.get("reward_model")
    for found in (
        call.row.get("answer"),
        verl.get("ground_truth") if isinstance(verl, dict) else None,
        call.row.get("solution"),
    ):
        if found is not None:
            return str(found)
    raise KeyError("the row has no field 'answer'")
