"""The policy: a Hugging Face causal LM in float32 with its tokenizer.

It computes the logprobs that the losses need, gives the files of a weight version, and makes the probe by
which an engine proves that it serves exactly these weights. Weights are float32 whatever the arithmetic runs
in (`trainer.dtype`); they may be sharded over several ranks, frozen except for adapters (LoRA), or both: what
is written is always whole and merged.

Shape suffixes: B responses, T tokens of the longest one.
"""

from __future__ import annotations

import copy
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import broadcast
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.file_tensors import FileLayout
from rlboost_runtime.fit.plan import shared_heads
from rlboost_runtime.job import Algorithm, Lora, Trainer
from rlboost_runtime.trainer.device.mover import Mover
from rlboost_runtime.trainer.kernels.checks import (
    NAMES,
    Kernels,
    choose_kernels,
    shape_for_kernels,
    trials_on,
)
from rlboost_runtime.trainer.kernels.context import ContextGroup
from rlboost_runtime.trainer.kernels.experts import use_grouped_experts
from rlboost_runtime.trainer.kernels.norms import use_fused_norms
from rlboost_runtime.trainer.learn import lora as adapters
from rlboost_runtime.trainer.learn.loading import StoredWeights, find_stored, hollow_model
from rlboost_runtime.trainer.learn.logprobs import LogprobModel
from rlboost_runtime.trainer.learn.model_files import (
    find_tied,
    greedy_probe,
    small_files,
    stop_token_ids,
)
from rlboost_runtime.trainer.learn.packing import Ids, pack
from rlboost_runtime.trainer.learn.ranks import (
    ALONE,
    Adam,
    Free,
    GatherModel,
    Ranks,
    Take,
    full_tensor,
    row_range,
    scatter_rows,
    shard,
)
from rlboost_runtime.trainer.learn.ranks import RunProbe as ProbeCommand
from rlboost_runtime.trainer.learn.sharded_state import StoredState, stored_buffers
from rlboost_runtime.weights.manifest import Probe, Tied


@dataclass(frozen=True, slots=True)
class Forward:
    """Results at every generated token of a micro-batch; all [B, T], column t for token t of the response."""

    logprobs: Tensor
    """Natural logs under the tempered distribution, with gradient."""
    entropy: Tensor
    """Nats; with gradient where the job has an entropy bonus."""
    mask: Tensor
    """1.0 where there is a token, else 0.0."""


class Policy:
    """The model that is trained. Not thread-safe."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        folder: str | Path | None = None,
        mover: Mover | None = None,
    ) -> None:
        """`folder`: the folder that the model was loaded from, or its hub name.
        `mover`: None for this process's GPU, if it has one."""
        self.source = folder
        self.model = model
        self.tokenizer = tokenizer
        self.mover = Mover.to_accelerator() if mover is None else mover
        """Moves the model to the device to compute on while we hold the lease."""
        self.is_away = self.mover.moves
        """True while the model must stay in main memory: engines may be using the GPU. It starts there, also
        with several ranks and on resume; `Residency` moves it."""
        torch.nn.Module.to(model, torch.float32)
        torch.nn.Module.eval(model)  # no dropout: engine and trainer must compute the same function
        self.stop_token_ids = stop_token_ids(model, tokenizer)
        self.scorer = LogprobModel(model)
        self._tied = find_tied(model)
        self._layout = FileLayout.of(model)
        self.stored: StoredWeights | StoredState | None = None
        """The files from which `spread` reads the weights of a hollow model; None: the model has them."""
        self._lora: Lora | None = None
        self._small_files: dict[str, bytes] = {}
        self._ranks = ALONE

    @property
    def device(self) -> torch.device:
        """The device that the model is on now."""
        return next(self.model.parameters()).device

    @classmethod
    def load(cls, folder: str | Path, ranks: Ranks = ALONE) -> Policy:
        """Load from a checkpoint, or a folder in HF format (or a hub name). Raises `ConfigError`.

        From a checkpoint, and with several `ranks`, the model is hollow until `set_up` reads each rank's
        part, unless `transformers` has to rename what is stored: then it is whole.
        """
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
            if StoredState.is_in(folder):
                policy = cls(hollow_model(folder), tokenizer, folder)
                policy.stored = StoredState(Path(folder))
                return policy
            if ranks.num > 1 and (stored := find_stored(folder, hollow := hollow_model(folder))) is not None:
                policy = cls(hollow, tokenizer, folder)
                policy.stored = stored
                return policy
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        except (OSError, ValueError) as exc:
            raise ConfigError(
                f"model: {folder} cannot be loaded: {str(exc).splitlines()[0]}",
                "give a folder with config.json, model.safetensors and a tokenizer, or {init: tiny}",
            ) from exc
        return cls(model, tokenizer, folder)

    @classmethod
    def bare(cls, files: Mapping[str, bytes]) -> Policy:
        """Return a policy of the shape given by `small_files`, without weights: rank 0 sends them."""
        with tempfile.TemporaryDirectory() as name:
            for file, content in files.items():
                (Path(name) / file).write_bytes(content)
            return cls(hollow_model(name), AutoTokenizer.from_pretrained(name))

    def small_files(self) -> dict[str, bytes]:
        """Return the files beside the weights, by name."""
        if not self._small_files:
            self._small_files = small_files(self.model, self.tokenizer)
        return self._small_files

    def set_up(
        self, trainer: Trainer, algorithm: Algorithm, ranks: Ranks = ALONE, *, is_sent: bool = False
    ) -> None:
        """Set up adapters, precision, memory and ranks as the job wants them. Call this once, before the
        optimizer is created. Raises `ConfigError`.

        `is_sent`: rank 0 alone has the weights, or their files, and sends the others theirs.
        """
        self._ranks = ranks
        self.scorer.context = self._context(trainer.context_parallel)
        self.scorer.entropy_has_gradient = algorithm.entropy_bonus is not None
        if algorithm.lora is not None:
            self._attach(algorithm.lora, algorithm.seed)
        elif isinstance(self.stored, StoredState) and self.stored.adapters:
            raise ConfigError(
                f"algorithm.lora: {self.source} has adapters, but the job asks for none",
                "use the `lora` that the run began with",
            )
        if trainer.dtype == "bfloat16" or (trainer.dtype == "auto" and self.mover.device.type == "cuda"):
            self.scorer.compute_in(torch.bfloat16, casts=ranks.num == 1)
        use_grouped_experts(self.model)
        if trainer.checkpoints_activations:
            _checkpoint_activations(self.model)
        self.spread(ranks, is_sent=is_sent)
        if not self.mover.moves:
            self.try_kernels()

    def _context(self, num: int) -> ContextGroup:
        """Return this rank's place among those that share a row."""
        config = self.model.config.get_text_config()
        heads = int(config.num_attention_heads)
        keys = int(getattr(config, "num_key_value_heads", None) or heads)
        where = f"trainer.context_parallel: found {num}, but"
        if num > 1 and self.scorer.why_not_packed is not None:
            raise ConfigError(f"{where} {type(self.model).__name__} is trained on padded rows", "remove it")
        if (most := shared_heads(heads, keys, num)) < num:
            raise ConfigError(
                f"{where} {type(self.model).__name__} has {heads} heads of queries and {keys} of keys",
                f"write {most}",
            )
        return ContextGroup.join(self._ranks.rank, self._ranks.num, num)

    def try_kernels(self) -> Kernels:
        """Choose the fast forms of the arithmetic that agree with the plain ones where the model is now, on
        all ranks. The first `Residency.take` calls this: before it, engines may be using the GPU."""
        shape = shape_for_kernels(self.model.config.get_text_config())
        dtype = self.scorer.compute_dtype
        mine = choose_kernels(trials_on(shape, self.device, dtype), dtype)
        lacks = self._ranks.largest([0.0 if getattr(mine, name) else 1.0 for name in NAMES])
        elsewhere = {
            name: "refused on another rank"
            for name, lack in zip(NAMES, lacks, strict=True)
            if lack and getattr(mine, name)
        }
        found = replace(mine, refused={**mine.refused, **elsewhere}, **dict.fromkeys(elsewhere, False))
        use_grouped_experts(self.model, is_on=found.experts)
        use_fused_norms(self.model, is_on=found.norms)
        self.scorer.kernels = found
        return found

    def spread(self, ranks: Ranks, *, is_sent: bool) -> None:
        """Give each rank its rows of the weights; with one rank that is all. `is_sent` as in `set_up`, which
        calls this."""
        self._ranks = ranks
        if ranks.num > 1:
            shard(self.scorer, ranks, self.mover.device, self._sent_rows if is_sent else self._own_rows)
        elif self.stored is not None:
            for name, weight in self.model.named_parameters():
                weight.data = self._own_rows(name, weight.detach()).clone()
        for name, buffer in stored_buffers(self.model):
            if self.stored is not None and name in self.stored:
                buffer.copy_(self.stored.rows(name, 0, len(buffer)))
            if is_sent:
                broadcast(buffer, 0)
        if self.stored is not None:
            self.stored.close()

    def _own_rows(self, name: str, weight: Tensor) -> Tensor:
        """Return this rank's rows of a weight, from the files where these have it."""
        start, stop = row_range(weight.shape[0], self._ranks.num, self._ranks.rank)
        return self._stored_rows(name, weight, start, stop)

    def _stored_rows(self, name: str, weight: Tensor, start: int, stop: int) -> Tensor:
        name = name.removeprefix("model.") if self._ranks.num > 1 else name  # the scorer's, the model's
        if self.stored is not None and name not in self.stored:
            name = name.replace(".base_layer.", ".")  # trained whole until now
        if self.stored is not None and name in self.stored:
            return self.stored.rows(name, start, stop)
        return weight[start:stop]

    def _sent_rows(self, name: str, weight: Tensor) -> Tensor:
        """Return this rank's rows of rank 0's weight, one weight at a time."""
        whole = self._stored_rows(name, weight, 0, weight.shape[0]).float() if self._ranks.leads else None
        return scatter_rows(whole, weight.shape, self._ranks)

    def _attach(self, lora: Lora, seed: int) -> None:
        adapters.attach(self.model, lora, seed)
        torch.nn.Module.to(self.model, self.device)
        torch.nn.Module.eval(self.model)
        self._lora = lora
        if isinstance(self.stored, StoredState) and self.stored.adapters:
            adapters.check_shapes(self.model, self.stored.adapters, self.source)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt."""
        return list(self.tokenizer.encode(text))

    def decode(self, token_ids: Ids) -> str:
        """Return a response's text, as rewards see it: without end-of-text."""
        return str(self.tokenizer.decode(np.asarray(token_ids, np.int32), skip_special_tokens=True))

    def full_state(self) -> dict[str, Tensor]:
        """Return all weights by name, whole and on the CPU, tied ones once; on ranks other than 0 nothing.

        They may share the model's memory."""
        return {name: tensor.to("cpu") for name, tensor in self._gathered()}

    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights by name, whole, tied ones once; on ranks other than 0 nothing.

        All of it must be consumed: every rank walks the same list.
        """
        self._ranks.broadcast(GatherModel())
        tied = {entry.name for entry in self._tied}
        for name, tensor in self.model.state_dict().items():
            if name not in tied:
                gathered = full_tensor(tensor.detach())
                if self._ranks.leads:
                    yield name, gathered

    def save(self, folder: Path) -> None:
        """Write the model in HF format, float32, exactly; without adapters."""
        for name, content in self.small_files().items():
            (folder / name).write_bytes(content)
        own = adapters.frozen(self.full_state()).items()
        model = {name: each.contiguous() for pair in own for name, each in self._layout.split(*pair)}
        save_file(model, folder / "model.safetensors", metadata={"format": "pt"})

    def export(self, folder: Path, dtype: str = "float32") -> None:
        """Write the trained model for others: HF format in `dtype`, adapters merged."""
        kind = getattr(torch, dtype)
        state = {
            name: tensor.to("cpu", kind if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in self._served()
        }
        self.model.save_pretrained(folder, state_dict=state)
        config = json.loads((folder / "config.json").read_bytes())
        (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")
        self.tokenizer.save_pretrained(folder)

    def _served(self, *, frozen: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield what `weights` does, by the model's own names and in its form."""
        if self._lora is None:
            yield from self._gathered()
            return
        state = self.full_state()
        yield from (adapters.frozen(state) if frozen else adapters.merged(state, self._lora)).items()

    def forward(
        self,
        prompts: Sequence[Ids],
        responses: Sequence[Ids],
        temperature: float,
        scorer: LogprobModel | None = None,
    ) -> Forward:
        """Return logprobs of the responses, each after its prompt (at least one token). `temperature` 0 reads
        as 1. `scorer`: what scores them, without entropies: this policy's or another model's, on the same
        device."""
        batch = pack(prompts, responses).to(self.device)
        only_scores = scorer is not None
        logprobs_N, entropies_N = (scorer or self.scorer)(batch, temperature or 1.0, only_scores=only_scores)
        return Forward(
            batch.table(logprobs_N), batch.table(entropies_N), batch.table(torch.ones_like(entropies_N))
        )

    def probe(self, token_ids: list[int], dtype: str) -> Probe:
        """Return the greedy continuation of `token_ids` with logprobs at temperature 1, up to end-of-text.
        `dtype` is the engines'; the coarser one of theirs and the trainer's sets the tolerance.

        While the GPU is not ours, rank 0 of several computes it alone on the gathered weights: the forward
        pass of a sharded model gathers them on the GPU.
        """
        if self._ranks.num > 1 and self.is_away:
            scorer = self._unsharded()
        else:
            scorer = self.scorer
            self._ranks.broadcast(ProbeCommand(token_ids, dtype))

        def next_logprobs(sequence: list[int]) -> Tensor:
            log_1V, _ = scorer(pack([sequence], [[0]]).to(self.device), 1.0, whole=True)
            return log_1V[0]  # type: ignore[no-any-return]

        coarser = dtype if self.scorer.compute_dtype is torch.float32 else "bfloat16"
        return greedy_probe(next_logprobs, token_ids, self.stop_token_ids, coarser)

    def _unsharded(self) -> LogprobModel:
        """Return a whole model with the present weights, in main memory; only rank 0 may call this."""
        weights = {name: tensor.to("cpu") for name, tensor in self._served()}
        weights |= {entry.name: weights[entry.same_as] for entry in self._tied}
        with torch.device("meta"):
            model = type(self.model)(copy.deepcopy(self.model.config))
        model.load_state_dict(weights, assign=True)
        _copy_buffers(self.model, model)
        torch.nn.Module.eval(model)
        scorer = LogprobModel(model)
        scorer.compute_in(self.scorer.compute_dtype, casts=True)
        return scorer

    def weights(self, *, frozen: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that engines compute with, as files have them (`FileLayout`), whole, tied ones
        once, one at a time.

        Each may share the model's memory or be gathered for the moment. Nothing on ranks other than 0.
        `frozen`: the weights under the adapters, without these.
        """
        for name, tensor in self._served(frozen=frozen):
            yield from self._layout.split(name, tensor)

    def adapter_files(self, dtype: str) -> dict[str, bytes]:
        """Return the adapters as files of a version; without content on ranks other than 0."""
        assert self._lora is not None
        found = {name: tensor for name, tensor in self._gathered() if ".lora_" in name}
        return adapters.version_files(found, self._lora, dtype)

    def tied(self) -> list[Tied]:
        """Return the parameters that share another one's memory and are not written."""
        name = self._layout.name
        return [Tied(name(each.name), name(each.same_as)) for each in self._tied]


class Residency:
    """Moves models and optimizers to the accelerator, and away while another process has the lease.

    Both begin in main memory: nothing is on the accelerator before the first `take`, nor after a `free`. On a
    CPU there is nothing to move.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: Adam,
        ranks: Ranks = ALONE,
        critic: tuple[Policy, Adam] | None = None,
    ) -> None:
        """`critic`: moves along, with its optimizer."""
        self._policy = policy
        self._mover = policy.mover
        self._moved = [(policy, optimizer)] + ([] if critic is None else [critic])
        self._ranks = ranks
        self._are_kernels_tried = not self._mover.moves
        self.awake_s = self.asleep_s = 0.0
        """Total seconds that `take` and `free` took in this process: the trainer's share of hand-overs."""

    def free(self) -> None:
        """Leave the accelerator; idempotent. Accumulated gradients move along."""
        self._ranks.broadcast(Free())
        if self._policy.is_away or not self._mover.moves:
            return
        started = time.monotonic()
        self._move(self._mover.off)
        self._mover.release()
        self._say(is_away=True)
        self.asleep_s += time.monotonic() - started

    def take(self) -> None:
        """Come back to the accelerator; idempotent. Only the holder of the lease may call this."""
        self._ranks.broadcast(Take())
        if not self._policy.is_away:
            return
        started = time.monotonic()
        self._move(self._mover.onto)
        self._mover.wait()
        self._say(is_away=False)
        if not self._are_kernels_tried:
            for model, optimizer in self._moved:  # each for itself: a critic may have other widths
                optimizer.use_fused(is_on=model.try_kernels().adamw)
            self._are_kernels_tried = True
        self.awake_s += time.monotonic() - started

    def _say(self, *, is_away: bool) -> None:
        for model, _ in self._moved:
            model.is_away = is_away

    def _move(self, how: Callable[[Tensor], Tensor]) -> None:
        """Move everything. The scorer is moved, not the model inside it: FSDP notices that its shards have
        moved only in the `_apply` of the module that it shards, and the scorer owns embedding, norm and
        head."""
        for model, optimizer in self._moved:
            model.scorer._apply(how)  # type: ignore[no-untyped-call]
            if not optimizer.offload:  # else its state is never here but for a step
                optimizer.move(how)


def _checkpoint_activations(model: PreTrainedModel) -> None:
    """Keep only each layer's input and recompute the rest in the backward pass.

    `transformers` does so only in training mode, so dropout is disabled by hand.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010 - nn.Module declares no such attribute
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.nn.Module.train(model)


def _copy_buffers(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Give `target` the buffers that no checkpoint has, such as rotary frequencies."""
    for name, buffer in source.named_buffers():
        module, _, attribute = name.rpartition(".")
        setattr(target.get_submodule(module), attribute, buffer)
