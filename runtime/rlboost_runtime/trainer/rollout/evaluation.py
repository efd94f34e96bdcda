"""Evaluations: which prompts are due before which update, how they are asked for, what the responses say.

Their prompts are requested with those of a step, behind them, and those of the final weights after the last
step; none of their tokens is trained on. A response is correct if its reward did not fail and is at least
`correct_from`. Of n responses to a prompt, c of them correct:

- avg@n is c / n;
- pass@k is 1 - C(n - c, k) / C(n, k), the unbiased estimate of the chance that one of k is correct
  (arXiv 2107.03374, equation 1);

both averaged over prompts. Each response's reward stays in `evaluations.jsonl`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from rlboost_runtime.core.base.messages import FinishReason
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import Algorithm, Evaluation, HeldOut, Job
from rlboost_runtime.protocol.messages import PromptSpec, Sampling
from rlboost_runtime.trainer.data.prompts import Encode, Prompt, usable_prompts
from rlboost_runtime.trainer.data.reading import read_examples
from rlboost_runtime.trainer.learn.sample import TokenIds
from rlboost_runtime.trainer.rollout.groups import ScoredGroup, ScoredResponse
from rlboost_runtime.trainer.rollout.metrics import MAX_CHARACTERS


def evaluation_prompts(job: Job, files: Path, encode: Encode, held_out: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts of all evaluations; `held_out`: those of the training data. Raises `ConfigError`."""
    return list(chain.from_iterable(_prompts(job, each, files, encode, held_out) for each in job.evaluations))


def _prompts(
    job: Job, evaluation: Evaluation, files: Path, encode: Encode, held_out: Sequence[Prompt]
) -> list[Prompt]:
    if isinstance(evaluation, HeldOut):
        own = evaluation.reward
        return [replace(each, evaluation=evaluation, reward=own or each.reward) for each in held_out]
    try:
        examples = read_examples(evaluation, files)[: evaluation.prompts]
        usable, _ = usable_prompts(examples, encode, job.algorithm.max_prompt_tokens)
    except ConfigError as exc:
        raise ConfigError(f"evaluation {evaluation.name or ''}: {exc.problem}", exc.remedy) from exc
    return [replace(each, evaluation=evaluation) for each in usable]


def due(prompts: Sequence[Prompt], updates: int, steps: int) -> list[Prompt]:
    """Return the prompts on which weights with so many of `steps` updates are to be evaluated."""
    return [
        each for each in prompts if each.evaluation is not None and each.evaluation.is_due(updates, steps)
    ]


def prompt_spec(group: int, prompt: Prompt, algorithm: Algorithm) -> PromptSpec:
    """Return how a step's `group` is asked for."""
    token_ids, asked = np.asarray(prompt.token_ids, "<i4").tobytes(), prompt.evaluation
    if asked is None:
        return PromptSpec(group, token_ids)
    sampling = prompt.sampling(algorithm)
    is_other = sampling != Sampling(algorithm.temperature, algorithm.top_p)
    return PromptSpec(
        group, token_ids, asked.samples or 0, asked.max_tokens or 0, sampling if is_other else None
    )


def evaluation_metrics(groups: Sequence[ScoredGroup], prompts: Sequence[Prompt]) -> dict[str, float]:
    """Return the metrics of each evaluation that `groups`, the responses to some of `prompts`, are of."""
    found: dict[str, float] = {}
    for evaluation, members in _by_evaluation(groups, prompts):
        for name, value in _metrics(evaluation, members).items():
            found[name.replace("eval_", evaluation.prefix, 1)] = value
    return found


def _metrics(evaluation: Evaluation, groups: Sequence[ScoredGroup]) -> dict[str, float]:
    responses = [response for group in groups for response in group.responses]
    rewards = [[response.reward.value for response in group.responses] for group in groups]
    num = len(groups[0].responses)
    correct = [sum(is_correct(each, evaluation) for each in group.responses) for group in groups]
    return {
        "eval_reward_mean": statistics.fmean(response.reward.value for response in responses),
        "eval_reward_best": statistics.fmean(max(values) for values in rewards),
        f"eval_avg_at_{num}": statistics.fmean(count / num for count in correct),
        **{
            f"eval_pass_at_{k}": statistics.fmean(pass_at(k, num, count) for count in correct)
            for k in evaluation.pass_at or _powers_up_to(num)
        },
        "eval_length_mean": statistics.fmean(response.num_tokens for response in responses),
        "eval_truncated_share": statistics.fmean(
            response.finish_reason == FinishReason.LENGTH for response in responses
        ),
    }


def is_correct(response: ScoredResponse, evaluation: Evaluation) -> bool:
    """Return True for a correct response; see the module."""
    is_whole = response.finish_reason != FinishReason.QUARANTINED
    return is_whole and response.reward.failure is None and response.reward.value >= evaluation.correct_from


def pass_at(k: int, num: int, correct: int) -> float:
    """Return the chance that one of `k` of the `num` responses, drawn without replacement, is correct."""
    return 1.0 - math.comb(num - correct, k) / math.comb(num, k)


def _powers_up_to(num: int) -> list[int]:
    return [*(2**i for i in range(1, num.bit_length()) if 2**i < num), *([num] if num > 1 else [])]


def _by_evaluation(
    groups: Sequence[ScoredGroup], prompts: Sequence[Prompt]
) -> list[tuple[Evaluation, list[ScoredGroup]]]:
    found: dict[str, tuple[Evaluation, list[ScoredGroup]]] = {}
    for group in groups:
        evaluation = prompts[group.group].evaluation
        assert evaluation is not None
        found.setdefault(evaluation.prefix, (evaluation, []))[1].append(group)
    return list(found.values())


def evaluated_rows(
    step: int,
    groups: Sequence[ScoredGroup],
    prompts: Sequence[Prompt],
    decode: Callable[[TokenIds], str],
) -> Iterator[dict[str, str | float | dict[str, float]]]:
    """Yield the lines of `evaluations.jsonl`, one per response. Of each prompt the first response is there as
    text."""
    for group in groups:
        prompt = prompts[group.group]
        assert prompt.evaluation is not None
        for number, response in enumerate(group.responses):
            text = {} if number else {"response": response.text(decode)[:MAX_CHARACTERS]}
            parts = {"rewards": response.reward.parts} if response.reward.parts else {}
            yield {
                "step": float(step),
                "evaluation": prompt.evaluation.name or "",
                "prompt": float(prompt.index),
                "sample": float(number),
                "reward": response.reward.value,
                "correct": float(is_correct(response, prompt.evaluation)),
                "tokens": float(response.num_tokens),
                "finish_reason": str(response.finish_reason),
                **parts,
                **text,
            }
