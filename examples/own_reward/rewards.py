"""The reward of the parcel labels: a plain function in a plain file.

RLBoost calls it in a process of its own, once per response, with those of `prompt`, `response` and `row` that
it has parameters for; `row` is the line of `prompts.jsonl`. It must return a finite number. One that raises,
hangs beyond `reward_timeout_s` or returns something else scores 0, and is counted.
"""

from __future__ import annotations

EXACT = 0.4
"""Share of the reward that only a perfect label gets."""


def score(response: str, row: dict[str, str]) -> float:
    """Return 0 to 1: how much of the label is right, more if all of it is.

    Partial credit is what makes the task learnable: where all responses of a group score 0, nobody learns.
    """
    wanted = row["answer"]
    right = sum(a == b for a, b in zip(response, wanted, strict=False))
    extra = abs(len(response) - len(wanted))
    partial = max(0.0, (right - extra) / len(wanted))
    return (1 - EXACT) * partial + EXACT * (response == wanted)
