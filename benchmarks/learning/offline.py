"""Does the recipe learn? The trainer's real data, reward, loss and optimizer code, **without a fleet**.

Responses come from plain batched sampling in this process; there are no engines, agents or kills, so what
this measures is the algorithm and the tiny model only. It reads a job file with `model: {init: tiny}`
(default: the quickstart) and prints, per seed, the mean reward of the first and the last five steps, as the
plain scorer sees it.

    python -m benchmarks.learning.offline --seeds 0 1 2 3

The last line of stdout is a JSON object. Target: every seed lifts its reward by at least 1.3x.

With `max_staleness` above 0 each step's responses are sampled from the weights from which a run would have
them: which those are is decided by the trainer's own `RequestedSteps`, where a rollout takes no time. With
`in_flight_updates` the next weights come at a random token of those responses, which continue under them.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import torch
import transformers
from ruamel.yaml import YAML

from rlboost_runtime.job import WITHOUT_RATIO, Algorithm, Job, TinyModel
from rlboost_runtime.trainer.data.chat import PromptEncoder
from rlboost_runtime.trainer.data.prompts import Prompt, PromptSource
from rlboost_runtime.trainer.data.reading import Example, read_examples
from rlboost_runtime.trainer.learn.companions import Critic, Reference
from rlboost_runtime.trainer.learn.learner import Learner
from rlboost_runtime.trainer.learn.losses import group_advantages, overlong_penalty
from rlboost_runtime.trainer.learn.policy import Policy
from rlboost_runtime.trainer.learn.sample import Sample, chosen_responses
from rlboost_runtime.trainer.loop import imitated
from rlboost_runtime.trainer.models.tiny import WarmupReport, make_model, make_tokenizer
from rlboost_runtime.trainer.models.warmup import Sampled, sample, warm_up, warmup_data
from rlboost_runtime.trainer.rewards.outcome import require_some_reward
from rlboost_runtime.trainer.rewards.scorer import RewardCall, RewardScorer
from rlboost_runtime.trainer.rollout.groups import RequestedStep, RequestedSteps

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart.yaml"
TARGET_LIFT = 1.3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--job", type=Path, default=QUICKSTART)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--steps", type=int, help="instead of the job's")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    job = Job.model_validate_json(json.dumps(YAML(typ="safe").load(arguments.job)))
    seeds = []
    for seed in arguments.seeds:
        result = run_seed(job, seed, arguments.job.parent, arguments.steps or job.algorithm.steps)
        print(json.dumps(result), flush=True)
        seeds.append(result)
    worst = min(float(result["lift"]) for result in seeds)  # type: ignore[arg-type]
    summary = [
        {name: result[name] for name in ("seed", "first5", "last5", "lift", "what")} for result in seeds
    ]
    print(
        json.dumps(
            {
                "name": "learning-offline",
                "value": worst,
                "unit": "x",
                "target": TARGET_LIFT,
                "pass": worst >= TARGET_LIFT,
                "detail": {
                    "what": "smallest lift of mean reward, last five steps over first five",
                    "seeds": summary,
                },
            }
        )
    )


def run_seed(job: Job, seed: int, files: Path, steps: int) -> dict[str, object]:
    """Make and warm up a model from `seed`, train it, and return what happened."""
    assert isinstance(job.model, TinyModel)
    job = job.model_copy(
        update={
            "model": job.model.model_copy(update={"seed": seed}),
            "algorithm": job.algorithm.model_copy(update={"seed": seed, "steps": steps}),
        }
    )
    with scorer_of(job, files) as scorer:
        policy, report = warmed_up(job, files, scorer)
        started = time.monotonic()
        rows = train(policy, job, files, scorer)
    rewards = [row["reward_mean"] for row in rows]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    return {
        "seed": seed,
        "what": report.describe(),
        "warmup_steps": report.steps,
        "greedy_reward_after_warmup": round(report.greedy_reward, 3),
        "first5": round(first, 3),
        "last5": round(last, 3),
        "lift": round(last / first, 3),
        "train_s": round(time.monotonic() - started, 1),
        "rewards": [round(reward, 3) for reward in rewards],
        "first_step": {name: round(value, 4) for name, value in rows[0].items()},
        "last_step": {name: round(value, 4) for name, value in rows[-1].items()},
    }


@contextmanager
def scorer_of(job: Job, files: Path) -> Iterator[RewardScorer]:
    """Yield the job's reward."""
    with (
        tempfile.TemporaryDirectory() as folder,
        RewardScorer(
            job.reward, files, timeout_s=job.reward_timeout_s, log_file=Path(folder) / "reward.log"
        ) as scorer,
    ):
        yield scorer


def warmed_up(job: Job, files: Path, scorer: RewardScorer) -> tuple[Policy, WarmupReport]:
    """Return the job's tiny model after its warm-up, made anew."""
    tiny, algorithm = job.model, job.algorithm
    assert isinstance(tiny, TinyModel)
    assert tiny.warmup is not None

    def score(pairs: list[tuple[Example, str]]) -> list[float]:
        calls = [RewardCall(example.text, text, example.row) for example, text in pairs]
        return [reward.value for reward in scorer.score(calls)]

    policy = Policy(
        make_model(tiny, algorithm.max_prompt_tokens + algorithm.max_response_tokens), make_tokenizer()
    )
    report = warm_up(
        policy, warmup_data(job.data, read_examples(job.data, files)), score, tiny.warmup,
        max_prompt_tokens=algorithm.max_prompt_tokens, max_response_tokens=algorithm.max_response_tokens,
        temperature=algorithm.temperature, seed=tiny.seed,
    )  # fmt: skip
    return policy, report


def train(policy: Policy, job: Job, files: Path, scorer: RewardScorer) -> list[dict[str, float]]:
    """Train all of the job's steps; return their metrics."""
    algorithm = job.algorithm
    source = PromptSource(
        read_examples(job.data, files), PromptEncoder(policy.tokenizer),
        prompts_per_step=algorithm.prompts_per_step,
        max_prompt_tokens=algorithm.max_prompt_tokens, seed=algorithm.seed,
        encode_response=PromptEncoder(policy.tokenizer).response if algorithm.loss == "sft" else None,
        max_response_tokens=algorithm.max_response_tokens,
    )  # fmt: skip
    reference = None
    if algorithm.reference is not None:
        reference = Reference(policy, Policy(copy.deepcopy(policy.model), policy.tokenizer))
    critic = None
    if algorithm.critic is not None:
        critic = Critic(Policy(copy.deepcopy(policy.model), policy.tokenizer), algorithm)
    learner = Learner(policy, algorithm, reference=reference, critic=critic)
    asked = RequestedSteps[int](algorithm.max_staleness, algorithm.steps)
    sampled: dict[int, list[Sampled]] = {}
    rows = []
    for step in range(algorithm.steps):
        wanted = step if asked.get(step) is None else asked.next_ahead(step)
        while wanted is not None:
            prompts = source.batch(wanted)
            asked.add(RequestedStep(wanted, step, step, prompts, arrived=list(range(len(prompts)))))
            is_ahead = wanted > step and algorithm.in_flight_updates
            sampled[wanted] = roll_out(
                policy,
                prompts,
                algorithm,
                wanted,
                _tokens_before_update(algorithm, wanted) if is_ahead else None,
            )
            wanted = asked.next_ahead(step)
        this = asked.get(step)
        assert this is not None
        responses, lag = sampled.pop(step), this.staleness
        row = train_step(step, learner, this.prompts, responses, scorer, algorithm, staleness=lag)
        rows.append({**row, "staleness": float(this.staleness)})
        asked.remove(step)
        if algorithm.in_flight_updates:
            for ahead, responses in sampled.items():
                now = asked.get(ahead)
                assert now is not None
                sampled[ahead] = _continued(policy, now.prompts, responses, algorithm, ahead)
    return rows


def roll_out(
    policy: Policy,
    prompts: Sequence[Prompt],
    algorithm: Algorithm,
    step: int,
    num_tokens: int | None = None,
) -> list[Sampled]:
    """Sample a step's responses from the weights as they are, group after group; their first `num_tokens`
    where given."""
    return sample(
        policy, [list(prompt.token_ids) for prompt in prompts for _ in range(algorithm.group_size)],
        max_new_tokens=num_tokens or algorithm.max_response_tokens, temperature=algorithm.temperature,
        seed=algorithm.seed * 1_000_003 + step,
    )  # fmt: skip


def _tokens_before_update(algorithm: Algorithm, step: int) -> int:
    """Return how many tokens the responses of a step have when newer weights come."""
    return Random(f"{algorithm.seed}/{step}").randrange(1, algorithm.max_response_tokens)


def _continued(
    policy: Policy, prompts: Sequence[Prompt], begun: list[Sampled], algorithm: Algorithm, step: int
) -> list[Sampled]:
    """Return a step's responses; those that were not over go on under the weights as they are now."""
    asked = [prompt for prompt in prompts for _ in range(algorithm.group_size)]
    left = [
        index
        for index, each in enumerate(begun)
        if not each.stopped and len(each.token_ids) < algorithm.max_response_tokens
    ]
    if not left:
        return begun
    found = sample(
        policy, [[*asked[index].token_ids, *begun[index].token_ids] for index in left],
        max_new_tokens=algorithm.max_response_tokens - len(begun[left[0]].token_ids),
        temperature=algorithm.temperature, seed=algorithm.seed * 1_000_003 + step + 500_000,
    )  # fmt: skip
    whole = list(begun)
    for index, rest in zip(left, found, strict=True):
        first = begun[index]
        whole[index] = Sampled(
            [*first.token_ids, *rest.token_ids], [*first.logprobs, *rest.logprobs], rest.stopped
        )
    return whole


def train_step(
    step: int,
    learner: Learner,
    prompts: Sequence[Prompt],
    responses: Sequence[Sampled],
    scorer: RewardScorer,
    algorithm: Algorithm,
    *,
    staleness: int = 0,
) -> dict[str, float]:
    """Score and train a step; return its metrics."""
    asked = [prompt for prompt in prompts for _ in range(algorithm.group_size)]
    rewards = scorer.score(
        RewardCall(prompt.text, learner.policy.decode(response.token_ids), prompt.row)
        for prompt, response in zip(asked, responses, strict=True)
    )
    require_some_reward(rewards, scorer.name)
    shaped = [
        reward.value
        + overlong_penalty(
            len(response.token_ids), algorithm.max_response_tokens, algorithm.overlong_penalty_tokens
        )
        for reward, response in zip(rewards, responses, strict=True)
    ]
    samples = [
        Sample.of(prompt.token_ids, response.token_ids, response.logprobs, advantage, usable=usable)
        for prompt, response, (advantage, usable) in zip(
            asked, responses, _advantages(shaped, algorithm), strict=True
        )
    ]
    learner.begin_step(step, staleness)
    if algorithm.loss == "sft":
        samples = [imitated(prompt) for prompt in prompts]
    if algorithm.reference is not None:
        samples = learner.score_reference(samples)
    if learner.critic is not None:
        rewarded = [replace(each, reward=reward) for each, reward in zip(samples, shaped, strict=True)]
        samples = learner.critic.judge(learner.score_values(rewarded))
    if algorithm.recomputes_old_logprobs:
        samples = learner.recompute(samples)
    per_minibatch = len(samples) // algorithm.minibatches_per_step
    for start in range(0, len(samples), per_minibatch):
        learner.accumulate(samples[start : start + per_minibatch])
        learner.apply()
    return {
        "reward_mean": sum(reward.value for reward in rewards) / len(rewards),
        "length_mean": sum(len(response.token_ids) for response in responses) / len(responses),
        "truncated_share": sum(not response.stopped for response in responses) / len(responses),
        **learner.metrics(),
    }


def _advantages(rewards: Sequence[float], algorithm: Algorithm) -> list[tuple[float, bool]]:
    """Return each response's advantage, and whether it is trained on."""
    size = algorithm.group_size
    if algorithm.loss not in WITHOUT_RATIO:
        found = group_advantages(torch.tensor(rewards).view(-1, size), kind=algorithm.loss)
        return [(advantage, True) for advantage in found.flatten().tolist()]
    groups = [rewards[i : i + size] for i in range(0, len(rewards), size)]
    chosen = [sign for group in groups for sign in chosen_responses(group, [True] * size, algorithm)]
    return [(sign, sign != 0) for sign in chosen]


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    main()
