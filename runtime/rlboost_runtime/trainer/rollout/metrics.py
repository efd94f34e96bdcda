"""Metrics of a step's groups, and the file of one JSON line per step.

All values are floats. Rewards are the plain ones, without the overlong term; lengths are in tokens; a share
is of the step's responses unless its name says otherwise.

Samples for people (`samples.jsonl`, shown by `rlboost samples`): of each step the best, the worst and one in
between by reward, the shortest first among equals: always the same ones for the same step.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlboost_runtime.core.base.messages import FinishReason
from rlboost_runtime.job import Algorithm
from rlboost_runtime.protocol.reward_failures import SCORED_METRIC
from rlboost_runtime.run.folder import write_atomically
from rlboost_runtime.trainer.data.prompts import Prompt
from rlboost_runtime.trainer.episodes.outcome import episode_metrics
from rlboost_runtime.trainer.learn.sample import TokenIds
from rlboost_runtime.trainer.rewards.outcome import Reward, failure_metrics
from rlboost_runtime.trainer.rollout.groups import ScoredGroup, ScoredResponse


def early_metrics(groups: Sequence[ScoredGroup], num_early: int) -> dict[str, float]:
    """Return the share of the responses that had logprobs before their groups were complete."""
    return {"early_share": num_early / max(1, sum(len(group.responses) for group in groups))}


def newer_tokens(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return what share of a step's tokens is of versions that were published while it was rolled out."""
    responses = [response for group in groups for response in group.responses]
    num_tokens = sum(response.num_tokens for response in responses)
    newer = sum(response.newer_tokens for response in responses)
    return {"newer_tokens_share": newer / max(1, num_tokens)}


def group_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return reward, length and ending statistics of a step (at least one group)."""
    episodes = [episode for group in groups for episode in group.episodes]
    if episodes:
        groups = _without_left_out(groups)
    responses = [response for group in groups for response in group.responses]
    rewards = [response.reward.value for response in responses]
    lengths = sorted(response.num_tokens for response in responses)
    by_group = [[response.reward.value for response in group.responses] for group in groups]
    means = [statistics.fmean(values) for values in by_group]

    def share(reason: FinishReason) -> float:
        return sum(response.finish_reason == reason for response in responses) / len(responses)

    return {
        "reward_mean": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "reward_max": max(rewards),
        "group_reward_std": statistics.fmean(statistics.pstdev(values) for values in by_group),
        "group_reward_min": min(means),
        "group_reward_max": max(means),
        "zero_variance_share": sum(group.zero_variance for group in groups) / len(groups),
        "truncated_share": share(FinishReason.LENGTH),
        "quarantined_share": share(FinishReason.QUARANTINED),
        "migrated_share": sum(response.num_segments > 1 for response in responses) / len(responses),
        "not_finite_share": sum(not response.finite for response in responses) / len(responses),
        "length_mean": statistics.fmean(lengths),
        "length_p10": percentile(lengths, 10),
        "length_p50": percentile(lengths, 50),
        "length_p90": percentile(lengths, 90),
        "length_max": float(lengths[-1]),
        SCORED_METRIC: float(len(responses)),
        **failure_metrics(response.reward for response in responses),
        **_part_means([response.reward for response in responses]),
        **(episode_metrics(episodes) if episodes else {}),
    }


def _without_left_out(groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    """Return the groups without the episodes that were left out, and without groups that have no other."""
    found = []
    for group in groups:
        pairs = zip(group.responses, group.episodes, strict=True)
        left = tuple(response for response, episode in pairs if not episode.failure)
        if left:
            found.append(replace(group, responses=left))
    return found


def choice_metrics(groups: Sequence[ScoredGroup], algorithm: Algorithm) -> dict[str, float]:
    """Return what the losses that choose among a group's responses found: dpo's `pairs_tied` are groups whose
    best and worst reward are equal."""
    chosen = [
        sum(any(each.usable for each in response.samples) for response in group.responses) for group in groups
    ]
    match algorithm.loss:
        case "dpo":
            return {"pairs_tied": float(chosen.count(0))}
        case "rejection":
            return {"responses_kept": float(sum(chosen)), "groups_without_kept": float(chosen.count(0))}
        case _:
            return {}


def _part_means(rewards: Sequence[Reward]) -> dict[str, float]:
    """Return `reward_NAME_mean` of named rewards, each over the responses that it scored."""
    values: dict[str, list[float]] = {}
    for reward in rewards:
        for name, value in reward.parts.items():
            values.setdefault(name, []).append(value)
    return {f"reward_{name}_mean": statistics.fmean(found) for name, found in values.items()}


def percentile(ascending: Sequence[int], percent: int) -> float:
    """Return the nearest-rank percentile of a sorted, non-empty sequence."""
    return float(ascending[max(0, -(-len(ascending) * percent // 100) - 1)])


class MetricsLog:
    """`metrics.jsonl`: each step once, ascending. `samples.jsonl` and `evaluations.jsonl` are ones, too, with
    several lines a step."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, *lines: Mapping[str, Any]) -> None:  # JSON values
        """Add lines of a step."""
        with self._path.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())

    def rewind(self, next_step: int) -> int | None:
        """Drop the lines of `next_step` and later, and a half-written last line; return the last step
        kept."""
        kept = [line for line in self._lines() if line["step"] < next_step]
        if self._path.exists():
            write_atomically(self._path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        return kept[-1]["step"] if kept else None

    def last(self) -> dict[str, Any]:  # JSON values
        """Return the last line; {} where there is none."""
        return next(reversed(self._lines()), {})

    def since(self, step: int) -> list[dict[str, Any]]:  # JSON values
        """Return the lines from `step` on."""
        return [line for line in self._lines() if line["step"] >= step]

    def _lines(self) -> list[dict[str, Any]]:  # JSON values
        if not self._path.exists():
            return []
        lines = []
        for text in self._path.read_text().splitlines():
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                continue  # a process was killed while writing it
        return lines


MAX_CHARACTERS = 2000
"""Of a prompt and of a response, so many are kept: the end of a prompt, the beginning of a response."""

Sample = dict[str, str | float | dict[str, float]]


def pick_samples(
    step: int, groups: Sequence[ScoredGroup], prompts: Sequence[Prompt], decode: Callable[[TokenIds], str]
) -> list[Sample]:
    """Return up to three responses of a step, best first."""
    ranked = sorted(
        ((group, response) for group in groups for response in group.responses),
        key=lambda pair: (-pair[1].reward.value, pair[1].num_tokens, pair[0].group),
    )
    places = sorted({0, len(ranked) // 2, len(ranked) - 1})
    return [_entry(step, prompts[ranked[at][0].group], ranked[at][1], decode) for at in places if ranked]


def _entry(step: int, prompt: Prompt, response: ScoredResponse, decode: Callable[[TokenIds], str]) -> Sample:
    return {
        "step": float(step),
        "prompt": prompt.text[-MAX_CHARACTERS:],
        "response": response.text(decode)[:MAX_CHARACTERS],
        "reward": response.reward.value,
        **({"rewards": response.reward.parts} if response.reward.parts else {}),
        "tokens": float(response.num_tokens),
        "finish_reason": str(response.finish_reason),
    }
