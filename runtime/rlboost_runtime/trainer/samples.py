"""What the policy said, for people: a few responses per step in `samples.jsonl`, shown by `rlboost samples`.

Of each step the best, the worst and one in between by reward, the shortest first among equals: always the
same ones for the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlboost_runtime.trainer.data import Prompt
from rlboost_runtime.trainer.groups import ScoredGroup, ScoredResponse

MAX_CHARACTERS = 2000
"""Of a prompt and of a response, so many are kept: the end of a prompt, the beginning of a response."""

Sample = dict[str, str | float]


def pick_samples(
    step: int, groups: Sequence[ScoredGroup], prompts: Sequence[Prompt], decode: Callable[[list[int]], str]
) -> list[Sample]:
    """Return up to three responses of a step, best first."""
    ranked = sorted(
        ((group, response) for group in groups for response in group.responses),
        key=lambda pair: (-pair[1].reward.value, len(pair[1].sample.token_ids), pair[0].group),
    )
    places = sorted({0, len(ranked) // 2, len(ranked) - 1})
    return [_told(step, prompts[ranked[at][0].group], ranked[at][1], decode) for at in places if ranked]


def _told(step: int, prompt: Prompt, response: ScoredResponse, decode: Callable[[list[int]], str]) -> Sample:
    return {
        "step": float(step),
        "prompt": prompt.text[-MAX_CHARACTERS:],
        "response": decode(response.sample.token_ids)[:MAX_CHARACTERS],
        "reward": response.reward.value,
        "tokens": float(len(response.sample.token_ids)),
        "finish_reason": str(response.finish_reason),
    }
