"""The policy: a Hugging Face causal LM in float32 with its tokenizer, and what the loop asks of it.

It computes the logprobs that the losses need, writes the files of a weight version, and makes the probe by
which an engine proves that it serves exactly these weights. Weights are float32 whatever the arithmetic runs
in (`trainer.dtype`); they may be divided over several ranks, frozen but for adapters (LoRA), or both: what is
written is always whole and merged.

Shape suffixes: B responses, T tokens of the longest one.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import Algorithm, Lora, Trainer
from rlboost_runtime.trainer import lora as adapters
from rlboost_runtime.trainer.packing import pack
from rlboost_runtime.trainer.ranks import ALONE, Free, GatherModel, Ranks, Take, whole
from rlboost_runtime.trainer.ranks import Probe as ProbeCommand
from rlboost_runtime.trainer.scoring import Scorer
from rlboost_runtime.trainer.sharding import Adam, shard
from rlboost_runtime.weights.manifest import Probe, Tied

PROBE_TOKENS = 8
"""Length of the greedy continuation in a probe: eight forward passes, and enough to tell versions apart."""

PROBE_TOLERANCE = {"float32": 5e-3, "bfloat16": 0.25}
"""Nats by which an engine's probe logprobs may differ: kernels sum in another order; bfloat16 rounds to 8
bits."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Results at every generated token of a micro-batch; all [B, T], column t for token t of the response."""

    logprobs: Tensor
    """Natural logs under the tempered distribution, with gradient."""
    entropy: Tensor
    """Nats, without gradient."""
    mask: Tensor
    """1.0 where there is a token, else 0.0."""


class Policy:
    """The model that is trained. Not thread-safe."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str | Path | None = None
    ) -> None:
        """`folder`: where the model is from, or its hub name; a checkpoint's may hold adapters."""
        self.source = folder
        self.model = model
        self.tokenizer = tokenizer
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.nn.Module.to(model, self.device, torch.float32)
        torch.nn.Module.eval(model)  # no dropout: engine and trainer must compute the same function
        self.stop_token_ids = _stop_token_ids(model, tokenizer)
        self.scorer = Scorer(model)
        self._tied = _find_tied(model)
        self._lora: Lora | None = None
        self._adapter_folder = _adapter_folder(folder)
        self._ranks = ALONE

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
        return cls(model, tokenizer, folder)

    def set_up(self, trainer: Trainer, algorithm: Algorithm, ranks: Ranks = ALONE) -> None:
        """Make it as the job wants it trained: adapters, precision, memory, ranks. Once, before an optimizer
        is made. Raises `ConfigError`."""
        self._ranks = ranks
        if algorithm.lora is not None:
            self._attach(algorithm.lora, algorithm.seed)
        elif self._adapter_folder is not None:
            raise ConfigError(
                f"algorithm.lora: {self._adapter_folder} has adapters, but the job asks for none",
                "go on with the `lora` that the run began with",
            )
        if trainer.dtype == "bfloat16":
            self.scorer.compute_dtype = torch.bfloat16
            self.scorer.autocast = ranks.num == 1
        if trainer.activation_checkpointing:
            _checkpoint_activations(self.model)
        if ranks.num > 1:
            shard(self.scorer, ranks, self.device)

    def _attach(self, lora: Lora, seed: int) -> None:
        adapters.attach(self.model, lora, seed)
        torch.nn.Module.to(self.model, self.device)
        torch.nn.Module.eval(self.model)
        self._lora = lora
        if self._adapter_folder is not None:
            adapters.load(self.model, self._adapter_folder)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt."""
        return list(self.tokenizer.encode(text))

    def decode(self, token_ids: list[int]) -> str:
        """Return a response's text, as rewards see it: without end-of-text."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def full_state(self) -> dict[str, Tensor]:
        """Return all weights by name, whole and on the CPU, tied ones once; on ranks other than 0 nothing."""
        self._ranks.tell(GatherModel())
        tied = {entry.name for entry in self._tied}
        found: dict[str, Tensor] = {}
        for name, tensor in self.model.state_dict().items():
            if name not in tied:
                gathered = whole(tensor.detach())
                if self._ranks.leads:
                    found[name] = gathered.to("cpu")
        return found

    def save(self, folder: Path) -> None:
        """Write what `load` and `set_up` need to go on: model (float32, exactly), tokenizer, and the adapters
        beside the frozen model."""
        state = self.full_state()
        if self._lora is not None:
            adapters.save(state, folder)
        self._save_model(adapters.frozen(state), folder)

    def export(self, folder: Path) -> None:
        """Write the trained model for others: HF format, float32, adapters merged."""
        self._save_model(self._merged_state(), folder)

    def _merged_state(self) -> dict[str, Tensor]:
        state = self.full_state()
        return state if self._lora is None else adapters.merged(state, self._lora)

    def _save_model(self, state: Mapping[str, Tensor], folder: Path) -> None:
        self.model.save_pretrained(folder, state_dict=dict(state))
        self.tokenizer.save_pretrained(folder)

    def forward(
        self, prompts: Sequence[list[int]], responses: Sequence[list[int]], temperature: float
    ) -> Forward:
        """Return logprobs of the responses, each after its prompt (at least one token). `temperature` 0 reads
        as 1."""
        batch = pack(prompts, responses).to(self.device)
        logprobs_N, entropies_N = self.scorer(batch, temperature or 1.0)
        return Forward(
            batch.table(logprobs_N), batch.table(entropies_N), batch.table(torch.ones_like(entropies_N))
        )

    @torch.no_grad()
    def probe(self, token_ids: list[int], dtype: str) -> Probe:
        """Return the greedy continuation of `token_ids` with logprobs at temperature 1, up to end-of-text."""
        self._ranks.tell(ProbeCommand(token_ids, dtype))
        sequence = list(token_ids)
        logprobs: list[float] = []
        while len(logprobs) < PROBE_TOKENS:
            batch = pack([sequence], [[0]]).to(self.device)
            log_1V, _ = self.scorer(batch, 1.0, whole=True)
            best = int(log_1V[0].argmax())
            sequence.append(best)
            logprobs.append(float(log_1V[0, best]))
            if best in self.stop_token_ids:
                break
        new = tuple(sequence[len(token_ids) :])
        return Probe(tuple(token_ids), new, tuple(logprobs), PROBE_TOLERANCE[dtype])

    def write_weights(self, folder: Path, dtype: str) -> None:
        """Write what a weight version consists of: model.safetensors in `dtype` (tied tensors once),
        config.json and generation_config.json. The same weights give the same bytes."""
        kind = getattr(torch, dtype)
        state = {
            name: tensor.to(kind if tensor.is_floating_point() else tensor.dtype).contiguous()
            for name, tensor in self._merged_state().items()
        }
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        config = copy.deepcopy(self.model.config)
        config.dtype = dtype
        config.save_pretrained(folder)
        assert self.model.generation_config is not None
        self.model.generation_config.to_json_file(folder / "generation_config.json")

    def tied(self) -> list[Tied]:
        """Return the parameters that share another one's memory and are not written."""
        return list(self._tied)


class Residency:
    """Whether model and optimizer lie on the accelerator; moved away while somebody else has the lease.

    On a CPU there is nothing to move and nothing is cached between micro-batches.
    """

    def __init__(self, policy: Policy, optimizer: torch.optim.Optimizer, ranks: Ranks = ALONE) -> None:
        self._policy = policy
        self._optimizer = optimizer
        self._ranks = ranks
        self._resident = True

    def free(self) -> None:
        """Leave the accelerator; idempotent. Accumulated gradients move along and are kept."""
        self._ranks.tell(Free())
        if self._resident and self._policy.device.type != "cpu":
            self._move(torch.device("cpu"))
            gc.collect()
            torch.cuda.empty_cache()
        self._resident = False

    def take(self) -> None:
        """Come back; idempotent."""
        self._ranks.tell(Take())
        if not self._resident and self._policy.device.type != "cpu":
            self._move(self._policy.device)
        self._resident = True

    def _move(self, device: torch.device) -> None:
        torch.nn.Module.to(self._policy.model, device)
        if isinstance(self._optimizer, Adam) and self._optimizer.offload:
            return  # its state is never here but for a step
        for state in self._optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:  # AdamW keeps its step counts on the CPU
                    state[name] = value.to(device)


def _find_tied(model: PreTrainedModel) -> list[Tied]:
    first: dict[tuple[int, torch.Size], str] = {}
    found = []
    for name, tensor in model.state_dict().items():
        owner = first.setdefault((tensor.data_ptr(), tensor.shape), name)
        if owner != name:
            found.append(Tied(name, owner))
    return found


def _adapter_folder(folder: str | Path | None) -> Path | None:
    return Path(folder) if folder is not None and (Path(folder) / adapters.FILE).is_file() else None


def _checkpoint_activations(model: PreTrainedModel) -> None:
    """Keep a layer's input only and compute the rest anew in the backward pass.

    `transformers` does so only for a model in training mode, so dropout is taken out of it by hand.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010 - no attribute that nn.Module knows
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.nn.Module.train(model)


def _stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    found: Any = getattr(model.generation_config, "eos_token_id", None)  # int, list of int, or None
    if found is None:
        found = tokenizer.eos_token_id
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list) else [found])
