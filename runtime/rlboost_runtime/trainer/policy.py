"""The policy: a Hugging Face causal LM in float32 with its tokenizer, and what the loop asks of it.

It computes the logprobs that the losses need, writes the files of a weight version, and makes the probe by
which an engine proves that it serves exactly these weights.

Shape suffixes: B rows, S input positions (prompt and response, right-padded), T the last positions of S, from
the first one that predicts a generated token of any row, V vocabulary.
"""

from __future__ import annotations

import copy
import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.weights.manifest import Probe, Tied

PROBE_TOKENS = 8
"""Length of the greedy continuation in a probe: eight forward passes, and enough to tell versions apart."""

PROBE_TOLERANCE = {"float32": 5e-3, "bfloat16": 0.25}
"""Nats by which an engine's probe logprobs may differ: kernels sum in another order; bfloat16 rounds to 8
bits."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Results at every generated token of a micro-batch; all [B, T]. Column t predicts input `first` + t +
    1."""

    first: int
    logprobs: Tensor
    """Natural logs under the tempered distribution, with gradient."""
    entropy: Tensor
    """Nats, without gradient."""
    mask: Tensor
    """1.0 where the predicted token was generated, else 0.0."""


class Policy:
    """The model that is trained. Not thread-safe."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.nn.Module.to(model, self.device, torch.float32)
        torch.nn.Module.eval(model)  # no dropout: engine and trainer must compute the same function
        self.stop_token_ids = _stop_token_ids(model, tokenizer)

    @classmethod
    def load(cls, folder: str | Path) -> Policy:
        """Load from a folder in HF format (or a hub name). Raises `ConfigError`."""
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as exc:
            raise ConfigError(
                f"model: {folder} cannot be loaded: {str(exc).splitlines()[0]}",
                "give a folder with config.json, model.safetensors and a tokenizer, or {init: tiny}",
            ) from exc
        return cls(model, tokenizer)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt."""
        return list(self.tokenizer.encode(text))

    def decode(self, token_ids: list[int]) -> str:
        """Return a response's text, as rewards see it: without end-of-text."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        """Write model (float32, exactly) and tokenizer in HF format."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def forward(self, prompts: list[list[int]], responses: list[list[int]], temperature: float) -> Forward:
        """Return logprobs of the responses; each row is prompts[i] + responses[i]. `temperature` 0 reads
        as 1."""
        rows = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        width = max(len(row) for row in rows)
        ids_BS = torch.zeros(len(rows), width, dtype=torch.long)
        real_BS = torch.zeros(len(rows), width, dtype=torch.long)
        first = min(map(len, prompts)) - 1  # no logits for what nobody trains on
        mask = torch.zeros(len(rows), width - 1 - first)
        for i, row in enumerate(rows):
            ids_BS[i, : len(row)] = torch.tensor(row)
            real_BS[i, : len(row)] = 1
            mask[i, len(prompts[i]) - 1 - first : len(row) - 1 - first] = 1.0
        ids_BS = ids_BS.to(self.device)
        output = self.model(
            input_ids=ids_BS,
            attention_mask=real_BS.to(self.device),
            logits_to_keep=width - first,
            use_cache=False,
        )
        log_BTV = torch.log_softmax(output.logits[:, :-1].float() / (temperature or 1.0), dim=-1)
        logprobs = log_BTV.gather(-1, ids_BS[:, first + 1 :].unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            entropy = -(log_BTV.exp() * log_BTV).sum(dim=-1)
        return Forward(first, logprobs, entropy, mask.to(self.device))

    @torch.no_grad()
    def probe(self, token_ids: list[int], dtype: str) -> Probe:
        """Return the greedy continuation of `token_ids` with logprobs at temperature 1, up to end-of-text."""
        sequence = list(token_ids)
        logprobs: list[float] = []
        while len(logprobs) < PROBE_TOKENS:
            logits_V = self.model(input_ids=torch.tensor([sequence], device=self.device)).logits[0, -1]
            log_V = torch.log_softmax(logits_V.float(), dim=-1)
            best = int(log_V.argmax())
            sequence.append(best)
            logprobs.append(float(log_V[best]))
            if best in self.stop_token_ids:
                break
        new = tuple(sequence[len(token_ids) :])
        return Probe(tuple(token_ids), new, tuple(logprobs), PROBE_TOLERANCE[dtype])

    def write_weights(self, folder: Path, dtype: str) -> None:
        """Write what a weight version consists of: model.safetensors in `dtype` (tied tensors once),
        config.json and generation_config.json. The same weights give the same bytes."""
        kind = getattr(torch, dtype)
        tied = {entry.name for entry in self.tied()}
        state = {
            name: tensor.detach().to("cpu", kind if tensor.is_floating_point() else tensor.dtype).contiguous()
            for name, tensor in self.model.state_dict().items()
            if name not in tied
        }
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        config = copy.deepcopy(self.model.config)
        config.dtype = dtype
        config.save_pretrained(folder)
        assert self.model.generation_config is not None
        self.model.generation_config.to_json_file(folder / "generation_config.json")

    def tied(self) -> list[Tied]:
        """Return the parameters that share another one's memory and are not written."""
        first: dict[tuple[int, torch.Size], str] = {}
        found = []
        for name, tensor in self.model.state_dict().items():
            owner = first.setdefault((tensor.data_ptr(), tensor.shape), name)
            if owner != name:
                found.append(Tied(name, owner))
        return found


class Residency:
    """Whether model and optimizer lie on the accelerator; moved away while somebody else has the lease.

    On a CPU there is nothing to move and nothing is cached between micro-batches.
    """

    def __init__(self, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
        self._policy = policy
        self._optimizer = optimizer
        self._resident = True

    def free(self) -> None:
        """Leave the accelerator; idempotent. Accumulated gradients move along and are kept."""
        if self._resident and self._policy.device.type != "cpu":
            self._move(torch.device("cpu"))
            gc.collect()
            torch.cuda.empty_cache()
        self._resident = False

    def take(self) -> None:
        """Come back; idempotent."""
        if not self._resident and self._policy.device.type != "cpu":
            self._move(self._policy.device)
        self._resident = True

    def _move(self, device: torch.device) -> None:
        torch.nn.Module.to(self._policy.model, device)
        for state in self._optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:  # AdamW keeps its step counts on the CPU
                    state[name] = value.to(device)


def _stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    found: Any = getattr(model.generation_config, "eos_token_id", None)  # int, list of int, or None
    if found is None:
        found = tokenizer.eos_token_id
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list) else [found])
