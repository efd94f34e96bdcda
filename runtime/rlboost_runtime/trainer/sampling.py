"""Plain batched sampling in this process: for the tiny model's warm-up and for offline checks, never for a
run's steps.

Shape suffixes: B prompts, S positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlboost_runtime.trainer.policy import Policy


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
