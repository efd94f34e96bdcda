"""Does the recipe learn? The trainer's real data, reward, loss and optimizer code, **without a fleet**.

Responses come from plain batched sampling in this process; there are no engines, agents or kills, so what
this measures is the algorithm and the tiny model only. It reads a job file with `model: {init: tiny}`
(default: the quickstart) and prints, per seed, the mean reward of the first and the last five steps, as the
plain scorer sees it.

    python benchmarks/learning/offline.py --seeds 0 1 2 3

The last line of stdout is a JSON object. Target: every seed lifts its reward by at least 1.3x.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from pathlib import Path

import torch
import transformers
from ruamel.yaml import YAML

from rlboost_runtime.job import Job, TinyModel
from rlboost_runtime.trainer.data import Example, PromptSource, read_examples
from rlboost_runtime.trainer.losses import group_advantages, overlong_penalty
from rlboost_runtime.trainer.policy import Policy
from rlboost_runtime.trainer.reward_outcome import require_some_reward
from rlboost_runtime.trainer.rewards import RewardCall, RewardScorer
from rlboost_runtime.trainer.sample import Sample
from rlboost_runtime.trainer.sampling import sample
from rlboost_runtime.trainer.tiny import make_model, make_tokenizer
from rlboost_runtime.trainer.update import Learner
from rlboost_runtime.trainer.warmup import warm_up, warmup_data

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
    warmup = job.model.warmup
    assert warmup is not None
    algorithm = job.algorithm.model_copy(update={"seed": seed})
    tiny = job.model.model_copy(update={"seed": seed})
    examples = read_examples(job.data, files)
    policy = Policy(
        make_model(tiny, algorithm.max_prompt_tokens + algorithm.max_response_tokens), make_tokenizer()
    )
    source = PromptSource(
        examples, policy.encode, prompts_per_step=algorithm.prompts_per_step,
        max_prompt_tokens=algorithm.max_prompt_tokens, seed=seed,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        scorer = RewardScorer(
            job.reward, files, timeout_s=job.reward_timeout_s, log_file=Path(folder) / "reward.log"
        )
        with scorer:

            def score(pairs: list[tuple[Example, str]]) -> list[float]:
                calls = [RewardCall(example.text, text, example.row) for example, text in pairs]
                return [reward.value for reward in scorer.score(calls)]

            report = warm_up(
                policy, warmup_data(job.data, examples), score, warmup,
                max_prompt_tokens=algorithm.max_prompt_tokens,
                max_response_tokens=algorithm.max_response_tokens,
                temperature=algorithm.temperature, seed=seed,
            )  # fmt: skip
            learner = Learner(policy, algorithm)
            started = time.monotonic()
            rows = [train_step(step, learner, source, scorer, job) for step in range(steps)]
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


def train_step(
    step: int, learner: Learner, source: PromptSource, scorer: RewardScorer, job: Job
) -> dict[str, float]:
    """Sample, score and train one step; return its metrics."""
    algorithm, policy = job.algorithm, learner.policy
    prompts = [prompt for prompt in source.batch(step) for _ in range(algorithm.group_size)]
    responses = sample(
        policy, [list(prompt.token_ids) for prompt in prompts], max_new_tokens=algorithm.max_response_tokens,
        temperature=algorithm.temperature, seed=algorithm.seed * 1_000_003 + step,
    )  # fmt: skip
    rewards = scorer.score(
        RewardCall(prompt.text, policy.decode(response.token_ids), prompt.row)
        for prompt, response in zip(prompts, responses, strict=True)
    )
    require_some_reward(rewards, scorer.name)
    shaped = [
        reward.value
        + overlong_penalty(
            len(response.token_ids), algorithm.max_response_tokens, algorithm.overlong_penalty_tokens
        )
        for reward, response in zip(rewards, responses, strict=True)
    ]
    rewards_GR = torch.tensor(shaped).view(-1, algorithm.group_size)
    advantages = group_advantages(rewards_GR, kind=algorithm.loss).flatten().tolist()
    samples = [
        Sample(list(prompt.token_ids), response.token_ids, response.logprobs, advantage)
        for prompt, response, advantage in zip(prompts, responses, advantages, strict=True)
    ]
    learner.begin_step(step)
    per_minibatch = len(samples) // algorithm.minibatches_per_step
    for start in range(0, len(samples), per_minibatch):
        learner.accumulate(samples[start : start + per_minibatch])
        learner.apply()
    return {
        "reward_mean": sum(reward.value for reward in rewards) / len(rewards),
        "length_mean": sum(len(response.token_ids) for response in responses) / len(responses),
        "truncated_share": sum(not response.stopped for response in responses) / len(responses),
        **learner.sums.metrics(),
    }


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    main()
