"""Supervised warm-up of the tiny model: a few seconds of imitation, so that RL has something to improve.

It learns answer + end-of-text after each prompt from examples that are not the run's own: for reasoning-gym
data the same data set under another seed, for a prompt file with `answer` fields its lines save the held-out
ones. Muon trains the 2-D matrices of the layers, AdamW embeddings and norms. Every 5 steps, and every 2 once
it is half-way there, it samples held-out prompts and stops when their mean reward reaches `warmup.reward`:
early, for a policy that is already sure of itself leaves RL nothing to sharpen.

Plain batched sampling in this process: for the tiny model's warm-up and for offline checks, never for a
run's steps.

Shape suffixes: B prompts, S positions, V vocabulary.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import PromptData, ReasoningGym, Warmup
from rlboost_runtime.logs import event
from rlboost_runtime.trainer.data.chat import PromptEncoder
from rlboost_runtime.trainer.data.reading import Example, generate_examples
from rlboost_runtime.trainer.learn.policy import Policy
from rlboost_runtime.trainer.models.tiny import WarmupReport

log = logging.getLogger(__name__)

BATCH = 64
EVALUATE_EVERY = 5
EVALUATE_EVERY_NEAR = 2
NUM_HELD_OUT = 64
RAMP_STEPS = 20
MUON_RATE = 0.05
ADAMW_RATE = 2e-3
GRAD_CLIP = 1.0
_POOL_SEED_OFFSET = 1_000_003  # far from any seed that a person would pick for another run
_HELD_OUT_SEED_OFFSET = 2_000_003

ScoreTexts = Callable[[list[tuple[Example, str]]], list[float]]
"""Rewards of (example, response text) pairs."""

ReportProgress = Callable[[str, float, float, str], None]
"""Takes a task, how much of it is done, of how much, and the unit."""


@dataclass(frozen=True, slots=True)
class WarmupData:
    """What to imitate, and prompts that are not imitated."""

    pool: list[Example]
    held_out: list[Example]


def warmup_data(data: PromptData | list[PromptData], examples: list[Example]) -> WarmupData:
    """Split what the warm-up learns from; `examples` is the run's own data set.

    Raises `ConfigError` for prompts without answers.
    """
    if isinstance(data, ReasoningGym):
        seed, size, chat = data.seed, max(data.size, BATCH), examples[0].chat
        return WarmupData(
            generate_examples(data, seed=seed + _POOL_SEED_OFFSET, size=size, chat=chat),
            generate_examples(data, seed=seed + _HELD_OUT_SEED_OFFSET, size=NUM_HELD_OUT, chat=chat),
        )
    answered = [example for example in examples if example.answer is not None]
    if len(answered) < 2:
        raise ConfigError(
            f"model.warmup: {len(answered)} rows of the data have an `answer` field to learn from",
            "add an `answer` to the rows, or set model.warmup to null to start from random weights",
        )
    num_held_out = min(NUM_HELD_OUT, max(1, len(answered) // 5))
    return WarmupData(answered[:-num_held_out], answered[-num_held_out:])


def warm_up(
    policy: Policy,
    data: WarmupData,
    score: ScoreTexts,
    warmup: Warmup,
    *,
    max_prompt_tokens: int,
    max_response_tokens: int,
    temperature: float,
    seed: int,
    report: ReportProgress | None = None,
) -> WarmupReport:
    """Train until held-out samples reach `warmup.reward`, at most `warmup.max_seconds`; return a summary.

    `report` is called with the progress, as `StartupProgress.report` is.
    """
    started = time.monotonic()
    pool = _encode(policy, data.pool, max_prompt_tokens, max_response_tokens)
    if not pool:
        raise ConfigError(
            "model.warmup: no example fits max_prompt_tokens and max_response_tokens", "raise them"
        )

    encode = PromptEncoder(policy.tokenizer)

    def evaluate(temperature: float, step: int) -> float:
        prompts = [encode(example)[1][-max_prompt_tokens:] for example in data.held_out]
        responses = sample(
            policy, prompts, max_new_tokens=max_response_tokens, temperature=temperature, seed=step
        )
        texts = [policy.decode(response.token_ids) for response in responses]
        rewards = score(list(zip(data.held_out, texts, strict=True)))
        return sum(rewards) / len(rewards)

    def report_reward(reward: float) -> None:
        if report is not None:
            task = f"warming up the tiny model (at most {warmup.max_seconds:g} s)"
            report(task, reward, warmup.reward, "reward")

    report_reward(0.0)
    optimizers = _optimizers(policy)
    order = random.Random(seed)  # noqa: S311 - not for secrets
    reward, step = 0.0, 0
    while reward < warmup.reward and time.monotonic() - started < warmup.max_seconds:
        for _ in range(EVALUATE_EVERY if reward < warmup.reward / 2 else EVALUATE_EVERY_NEAR):
            _imitate(policy, order.choices(pool, k=BATCH), optimizers, step)
            step += 1
        reward = evaluate(temperature, step)
        event(log, "warmup.evaluated", warmup_step=step, reward=round(reward, 4))
        report_reward(reward)
    seconds = time.monotonic() - started
    summary = WarmupReport(step, seconds, reward, evaluate(0.0, step), reward >= warmup.reward)
    event(
        log, "warmup.done", what=summary.describe(), steps=step, greedy_reward=round(summary.greedy_reward, 4)
    )
    return summary


def _encode(
    policy: Policy, examples: list[Example], max_prompt_tokens: int, max_response_tokens: int
) -> list[tuple[list[int], list[int]]]:
    encode = PromptEncoder(policy.tokenizer)
    end = sorted(policy.stop_token_ids)[:1]
    pairs = [(encode(e)[1], policy.encode(e.answer or "") + end) for e in examples]
    return [(p, a) for p, a in pairs if 0 < len(p) <= max_prompt_tokens and len(a) <= max_response_tokens]


def _optimizers(policy: Policy) -> list[tuple[torch.optim.Optimizer, float]]:
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in policy.model.named_parameters():
        hidden = parameter.dim() == 2 and "embed" not in name and "lm_head" not in name
        (matrices if hidden else others).append(parameter)
    muon = torch.optim.Muon(matrices, lr=MUON_RATE, momentum=0.95, weight_decay=0.0)
    adamw = torch.optim.AdamW(others, lr=ADAMW_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    return [(muon, MUON_RATE), (adamw, ADAMW_RATE)]


def _imitate(
    policy: Policy,
    batch: list[tuple[list[int], list[int]]],
    optimizers: list[tuple[torch.optim.Optimizer, float]],
    step: int,
) -> None:
    """One optimizer step on the mean negative logprob of the answers' tokens."""
    result = policy.forward([prompt for prompt, _ in batch], [answer for _, answer in batch], 1.0)
    loss = -(result.logprobs * result.mask).sum() / result.mask.sum()
    policy.model.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(policy.model.parameters(), GRAD_CLIP)
    for optimizer, rate in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / RAMP_STEPS)
        optimizer.step()
    policy.model.zero_grad(set_to_none=True)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One response: ids with end-of-text, logprobs of the distribution sampled from; `stopped`: not cut
    off."""

    token_ids: list[int]
    logprobs: list[float]
    stopped: bool


@torch.no_grad()
def sample(
    policy: Policy, prompts: list[list[int]], *, max_new_tokens: int, temperature: float, seed: int
) -> list[Sampled]:
    """Return one response per prompt; temperature 0 is greedy (logprobs at temperature 1)."""
    device = policy.device
    generator = torch.Generator(device).manual_seed(seed)
    width = max(map(len, prompts))
    ids_BS = torch.zeros(len(prompts), width, dtype=torch.long, device=device)
    real_BS = torch.zeros_like(ids_BS)
    for i, prompt in enumerate(prompts):  # padded on the left, so that all continue at the same place
        ids_BS[i, width - len(prompt) :] = torch.tensor(prompt, device=device)
        real_BS[i, width - len(prompt) :] = 1
    stop_ids = torch.tensor(sorted(policy.stop_token_ids), device=device)
    ended_B = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    tokens, logprobs, running = [], [], []
    new_BS, cache = ids_BS, None
    for _ in range(max_new_tokens):
        position_BS = (real_BS.cumsum(dim=1) - 1).clamp(min=0)[:, -new_BS.shape[1] :]
        output = policy.model(
            input_ids=new_BS, attention_mask=real_BS, position_ids=position_BS, past_key_values=cache,
            use_cache=True,
        )  # fmt: skip
        cache = output.past_key_values
        log_BV = torch.log_softmax(output.logits[:, -1].float() / (temperature or 1.0), dim=-1)
        if temperature == 0:
            next_B = log_BV.argmax(dim=-1)
        else:
            next_B = torch.multinomial(log_BV.exp(), 1, generator=generator).squeeze(1)
        running.append(~ended_B)
        tokens.append(next_B)
        logprobs.append(log_BV.gather(1, next_B.unsqueeze(1)).squeeze(1))
        ended_B = ended_B | torch.isin(next_B, stop_ids)
        if bool(ended_B.all()):
            break
        new_BS = next_B.unsqueeze(1)
        real_BS = torch.cat([real_BS, torch.ones_like(new_BS)], dim=1)
    lengths = torch.stack(running, dim=1).sum(dim=1).tolist()
    tokens_B = torch.stack(tokens, dim=1).tolist()
    logprobs_B = torch.stack(logprobs, dim=1).tolist()
    stopped = ended_B.tolist()
    return [
        Sampled(tokens_B[i][: lengths[i]], logprobs_B[i][: lengths[i]], stopped[i])
        for i in range(len(prompts))
    ]
