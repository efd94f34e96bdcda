"""What a job takes of GPU, main memory, disk and time, and whether its machines have it.

`auto` in the job means: the fastest way that fits. Offloading the moments costs a copy per step,
checkpointing a third more arithmetic; so they are tried in that order. What is written in the job is kept,
and refused where nothing fits beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import psutil

from rlboost_providers.base.accelerators import memory_bytes
from rlboost_providers.base.traits import cloud_traits
from rlboost_runtime.engines.base import AUTO_ON_CPU
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.fit.memory import (
    CAST,
    GRADIENT,
    MOMENTS,
    USABLE,
    WEIGHT,
    Arithmetic,
    TrainingSetup,
    gpu_bytes,
    peak_bytes,
    step_bytes,
)
from rlboost_runtime.fit.shape import TransformerShape, find_shape
from rlboost_runtime.job import CloudOffer, Job, Trainer, num_devices

GB = 10**9
MIB = 2**20
PASS_TOKENS = (32_768, 16_384, 8_192)
"""What `micro_batch_tokens: auto` may be: a larger pass gathers the weights less often."""
KEPT_VERSIONS = 3
"""Weight versions on a disk: two, and the next one while it is written."""
SOFTWARE_BYTES = 20 * GB
"""torch, vLLM and their CUDA, twice, and the system of a machine that is bought. Judged."""
BESIDE_BYTES = 500 * 2**20
"""Disk for logs, event log, ledger and the journal of a step."""
PROCESS_BYTES = 400 * 2**20
"""A process that has imported torch and transformers: 350 MB resident on Linux, CPU build of torch 2.13."""
LEAST_DISK_GB = 200
SMALL_PARAMETERS = 20_000_000
VLLM_SHARE = 0.9
"""vLLM's own `gpu_memory_utilization`."""
COPY_BYTES_PER_S = 5e9
"""Pageable copies between a GPU and main memory. Judged; pinned memory reaches ten times as much."""
CAST_BYTES_PER_S = 6.6e9
"""Gathering and casting a version in main memory. Judged."""
PUBLISH_S, CHECKPOINT_S = 30.0, 300.0
"""Seconds in which a disk should take a version, on which the next step waits, and a checkpoint."""

FieldProblem = tuple[tuple[str | int, ...], str]
"""The path of a field in the job file; what is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class FitPlan:
    """What a job takes. All figures are computed, in bytes and seconds."""

    setup: TrainingSetup
    accelerator: str
    gpu_has: int | None
    """Bytes of one GPU; None: not known, or a CPU."""
    micro_batch_tokens: int
    version: int
    """One weight version, as engines get it."""
    checkpoint: int
    engine: int
    """Main memory of an engine on a CPU: weights, and a whole context for each response that may run."""
    disk: int
    """The run's folder at its fullest, with what is installed on a machine that is bought."""
    versions: int = 0
    """Main memory for the versions that the head keeps, while they are not on its disk."""
    received: int = 0
    """The same at a machine that receives them."""
    disk_range: tuple[float, float] = (0.0, math.inf)
    """Least and most throughput that its disk can have, in bytes per second; without limits if not known."""

    @property
    def gpu_parts(self) -> dict[str, int]:
        """A GPU's memory during the backward pass, by part."""
        return gpu_bytes(self.setup)

    @property
    def gpu_needs(self) -> int:
        """The most that a GPU holds."""
        return peak_bytes(self.setup)

    @property
    def host_per_rank(self) -> int:
        """What a rank parks in main memory while engines have the GPU."""
        setup = self.setup
        each = WEIGHT * setup.all_parameters + (GRADIENT + MOMENTS) * setup.trained
        return setup.models * each // setup.ranks

    @property
    def host(self) -> int:
        """Main memory of all ranks, with each one's copy for a checkpoint, and the version of rank 0; without
        `versions`, which are on the disk where they have no room."""
        each = self.host_per_rank if self.setup.on_gpu else sum(self.gpu_parts.values())
        beside = self.checkpoint + self.version + self.setup.reference
        return self.setup.ranks * (PROCESS_BYTES + each) + beside

    @property
    def handover_s(self) -> float:
        """Seconds to move weights and moments one way."""
        setup = self.setup
        moved = WEIGHT * setup.all_parameters + (0 if setup.offload else MOMENTS * setup.trained)
        return setup.models * moved / setup.ranks / COPY_BYTES_PER_S

    @property
    def checkpoint_copy_s(self) -> float:
        """Seconds for which training stands still while each rank copies its part of a checkpoint."""
        return self.checkpoint / self.setup.ranks / COPY_BYTES_PER_S

    @property
    def publication_s(self) -> float:
        """Seconds to gather and cast a version, and to write it at `disk_bytes_per_s`."""
        return self.version / CAST_BYTES_PER_S + self.version / self.disk_bytes_per_s

    @property
    def disk_bytes_per_s(self) -> float:
        """Throughput that takes a version within `PUBLISH_S` and a checkpoint within `CHECKPOINT_S`, within
        what the disk can have."""
        least, most = self.disk_range
        return min(max(self.version / PUBLISH_S, self.checkpoint / CHECKPOINT_S, least), most)

    def json(self) -> dict[str, object]:
        """Return it as JSON values; sizes in GB."""
        parts = {name: round(size / GB, 2) for name, size in self.gpu_parts.items()}
        return {
            "basis": "computed from the model's configuration, not measured",
            "accelerator": self.accelerator, "gpu_parts_gb": parts,
            "gpu_needs_gb": round(self.gpu_needs / GB, 2),
            "gpu_step_gb": round(step_bytes(self.setup) / GB, 2),
            "gpu_usable_gb": None if self.gpu_has is None else round(USABLE * self.gpu_has / GB, 2),
            "activation_checkpointing": self.setup.checkpointing, "optimizer_offload": self.setup.offload,
            "context_parallel": self.setup.context,
            "micro_batch_tokens": self.micro_batch_tokens, "largest_pass_tokens": self.setup.tokens,
            "host_gb": round(self.host / GB, 2), "host_per_rank_gb": round(self.host_per_rank / GB, 2),
            "disk_gb": round(self.disk / GB, 2), "disk_mb_per_s": round(self.disk_bytes_per_s / 1e6, 1),
            "version_gb": round(self.version / GB, 2), "checkpoint_gb": round(self.checkpoint / GB, 2),
            "versions_memory_gb": round(self.versions / GB, 2),
            "receiver_memory_gb": round(self.received / GB, 2),
            "handover_s": round(self.handover_s, 2), "publication_s": round(self.publication_s, 2),
            "checkpoint_copy_s": round(self.checkpoint_copy_s, 2),
            "checkpoint_write_s": round(self.checkpoint / self.disk_bytes_per_s, 2),
        }  # fmt: skip

    def lines(self) -> list[str]:
        """Return a compact table for a person; nothing for a model that any machine has room for."""
        if self.setup.shape.parameters < SMALL_PARAMETERS:
            return []
        setup, parts = self.setup, self.gpu_parts
        state = sum(parts.pop(name, 0) for name in ("weights", "gradients", "moments"))
        activations = sum(parts.pop(name, 0) for name in ("activations", "one layer redone", "logits chunk"))
        switches = (
            f"checkpointing {'on' if setup.checkpointing else 'off'},"
            f" moments {'offloaded' if setup.offload else 'on the GPU'}"
        )
        shared = f" on {setup.context} GPUs" if setup.context > 1 else ""
        has = "" if self.gpu_has is None else f" of {USABLE * self.gpu_has / GB:.1f} GB usable"
        return [
            f"  memory   {self.gpu_needs / GB:.1f} GB{has} per {self.accelerator or 'process'}:",
            f"           state {state / GB:.1f}, activations {activations / GB:.1f}, gathered and contexts"
            f" {sum(parts.values()) / GB:.1f}",
            f"           passes of up to {setup.tokens:,} tokens{shared}; {switches}",
            f"           main memory {self.host / GB:,.0f} GB, {self.host_per_rank / GB:.1f} GB per rank",
            *self._version_lines(),
            f"  disk     {self.disk / GB:,.0f} GB; if it writes {self.disk_bytes_per_s / 1e6:,.0f} MB/s,",
            f"           a version of {self.version / GB:.1f} GB takes"
            f" {self.version / self.disk_bytes_per_s:.0f} s,"
            f" a checkpoint of {self.checkpoint / GB:.1f} GB {self.checkpoint / self.disk_bytes_per_s:.0f} s",
            f"  seconds  hand-over {self.handover_s:.1f} each way, publication {self.publication_s:.0f},"
            f" copy for a checkpoint {self.checkpoint_copy_s:.1f}",
            "           (this and the above: computed from config.json, not measured)",
        ]

    def _version_lines(self) -> list[str]:
        if not self.versions:
            return []
        return [
            f"           {self.versions / GB:,.1f} GB more for weight versions, and"
            f" {self.received / GB:,.1f} GB on a machine",
            "           that receives them; where that is not free, they are on the disk",
        ]


def fit_plan(job: Job, shape: TransformerShape, gpu_has: int | None = None) -> FitPlan:
    """Return what `job` takes; `gpu_has`: bytes of one of its GPUs, None for those of `trainer.accelerators`.

    Where nothing fits, the plan is the one that needs least.
    """
    has = memory_bytes(job.trainer.accelerators) if gpu_has is None else gpu_has
    setup, tokens = _choose(job, shape, has)
    element = CAST if job.rollout.engine_args.dtype == "bfloat16" else WEIGHT
    version = shape.parameters * element
    checkpoint = setup.models * (WEIGHT * setup.all_parameters + MOMENTS * setup.trained)
    context = element * shape.kv_elements_per_token * job.max_context_tokens
    return FitPlan(
        setup,
        (job.trainer.accelerators or "").partition(":")[0] or ("" if has is None else "GPU"),
        has,
        tokens,
        version,
        checkpoint,
        engine=PROCESS_BYTES + version + context * _running(job),
        disk=_disk_bytes(job, shape, version, checkpoint),
        versions=_num_versions(job) * version if job.weights.keep_in == "auto" else 0,
        received=KEPT_VERSIONS * version if job.weights.keep_in == "auto" else 0,
        disk_range=_disk_range(job.trainer),
    )


def _num_versions(job: Job) -> int:
    return KEPT_VERSIONS + job.algorithm.max_staleness


def host_bytes_to_come(job: Job, files: Path) -> int:
    """Return the main memory that trainer and engines will take of this machine beyond what this process, a
    trainer that has its model, has now. `files`: the run's copies of the user's files."""
    try:
        shape = find_shape(job.model, files)
    except ConfigError:
        shape = None
    if shape is None:
        return 0
    plan = fit_plan(job, shape)
    on_cpus = job.trainer.local_engines if plan.gpu_has is None else 0
    engines = on_cpus + job.rollout.most_spot_engines(here=True)
    return max(0, plan.host - psutil.Process().memory_info().rss) + engines * plan.engine


def _running(job: Job) -> int:
    """Return the responses that an engine on CPUs decodes at once."""
    written = job.rollout.engine_args.max_running
    return AUTO_ON_CPU if written == "auto" else written


def fit_plan_here(job: Job) -> FitPlan | None:
    """Return what `job` takes; None where no configuration of its model is on this machine."""
    try:
        shape = find_shape(job.model)
    except ConfigError:
        return None
    return None if shape is None else fit_plan(job, shape)


def resolved(job: Job, shape: TransformerShape, gpu_has: int | None = None) -> Job:
    """Return `job` with what it leaves to the plan filled in, as far as its GPUs are known."""
    plan = fit_plan(job, shape, gpu_has)
    written = job.trainer
    found: dict[str, object] = {}
    if plan.gpu_has is not None:
        found = {
            "activation_checkpointing": plan.setup.checkpointing,
            "optimizer_offload": plan.setup.offload,
            "micro_batch_tokens": plan.micro_batch_tokens,
        }
    if job.trainer.is_bought:
        found["disk_gb"] = _disk_gb(plan)
        if plan.disk_range[1] < math.inf:
            found["disk_mib_per_s"] = math.ceil(plan.disk_bytes_per_s / MIB)
    found = {name: value for name, value in found.items() if getattr(written, name) == "auto"}
    return job.model_copy(update={"trainer": written.model_copy(update=found)}) if found else job


def misfits(job: Job, shape: TransformerShape, gpu_has: int | None = None) -> list[FieldProblem]:
    """Return what of `job` cannot fit its machines; `gpu_has` as in `fit_plan`. CPUs are not judged."""
    plan = fit_plan(job, shape, gpu_has)
    found = []
    if not job.only_serves and plan.gpu_has is not None and plan.gpu_needs > USABLE * plan.gpu_has:
        found.append(_misfit(job, shape, plan))
    written = job.trainer.disk_gb
    if job.trainer.is_bought and written != "auto" and plan.disk > written * GB:
        found.append(
            (
                ("trainer", "disk_gb"),
                f"found {written}, but {plan.disk / GB:,.0f} GB are needed: {job.trainer.keep_checkpoints}"
                f" checkpoints of {plan.checkpoint / GB:.0f} GB and the next one, the final model,"
                f" {KEPT_VERSIONS} versions of {plan.version / GB:.0f} GB, and software; write"
                f" {_disk_gb(plan)} or auto",
            )
        )
    return [*found, *_engine_misfits(job, shape), *_too_long(job, shape), *_unlike_the_model(job, shape)]


def _unlike_the_model(job: Job, shape: TransformerShape) -> Iterator[FieldProblem]:
    """Yield settings for which the model has not the parts."""
    for name in ("router_replay", "router_aux_loss_coef"):
        if (value := getattr(job.algorithm, name)) and not shape.experts:
            yield ("algorithm", name), f"found {value}, but the model has no experts; remove it"
    num = job.trainer.context_parallel
    if (most := shared_heads(shape.heads, shape.kv_heads, num)) < num:
        yield (
            ("trainer", "context_parallel"),
            f"found {num}, but the model has {shape.heads} heads of queries and {shape.kv_heads} of keys;"
            f" write {most}",
        )


def shared_heads(heads: int, keys: int, most: int) -> int:
    """Return the largest divisor of `most` among which so many heads, of queries and of keys, can be shared:
    whole ones, or each of a key for several ranks."""
    return max(
        each
        for each in range(1, most + 1)
        if most % each == 0 and heads % each == 0 and (keys % each == 0 or each % keys == 0)
    )


def _too_long(job: Job, shape: TransformerShape) -> list[FieldProblem]:
    prompt, response = job.algorithm.max_prompt_tokens, job.algorithm.max_response_tokens
    if shape.positions is None or prompt + response <= shape.positions:
        return []
    return [
        (
            ("algorithm", "max_response_tokens"),
            f"found {response:,}, but the model's context is {shape.positions:,} tokens"
            f" (max_position_embeddings in its config.json), and prompts take up to {prompt:,};"
            f" write at most {max(shape.positions - prompt, 0):,}, or lower max_prompt_tokens",
        )
    ]


def _largest_pass(job: Job, micro_batch_tokens: int) -> int:
    """Return the positions of the largest forward pass: a response, or dpo's pair, above the budget goes
    alone."""
    together = 2 if job.algorithm.loss == "dpo" else 1
    longest = job.algorithm.max_prompt_tokens + job.algorithm.max_response_tokens
    return max(together * longest, micro_batch_tokens)


def _setup(job: Job, shape: TransformerShape, *, on_gpu: bool) -> TrainingSetup:
    trainer, ranks = job.trainer, job.trainer.ranks * job.trainer.nodes
    kind: Arithmetic = "float32"
    if trainer.dtype == "bfloat16" or (trainer.dtype == "auto" and on_gpu):
        kind = "bfloat16"
    return TrainingSetup(
        shape, kind, ranks, tokens=_largest_pass(job, trainer.pass_tokens),
        checkpointing=trainer.checkpoints_activations, offload=trainer.offloads_optimizer,
        lora_rank=0 if job.algorithm.lora is None else job.algorithm.lora.rank,
        on_gpu=on_gpu, shares_gpu=trainer.local_engines > 0, has_reference=job.algorithm.has_reference_model,
        has_critic=job.algorithm.critic is not None, context=trainer.context_parallel,
    )  # fmt: skip


def _choose(job: Job, shape: TransformerShape, has: int | None) -> tuple[TrainingSetup, int]:
    """Return the fastest setup that fits, with its `micro_batch_tokens`; where none fits, the smallest."""
    trainer = job.trainer
    base = _setup(job, shape, on_gpu=has is not None)
    if has is None:
        return base, trainer.pass_tokens
    checkpointing = _choices(trainer.activation_checkpointing)
    tried = [
        replace(base, checkpointing=c, offload=o)
        for c, o in product(checkpointing, _choices(trainer.optimizer_offload))
    ]
    room = USABLE * has
    found = next((each for each in tried if peak_bytes(each) <= room), min(tried, key=peak_bytes))
    if trainer.micro_batch_tokens == "auto" and base.ranks > 1:
        for tokens in PASS_TOKENS:
            larger = replace(found, tokens=_largest_pass(job, tokens))
            if peak_bytes(larger) <= room:
                return larger, tokens
    return found, trainer.pass_tokens


def _choices(written: bool | str) -> tuple[bool, ...]:
    return (False, True) if isinstance(written, str) else (written,)


def _misfit(job: Job, shape: TransformerShape, plan: FitPlan) -> FieldProblem:
    """Return which field to change: the first whose change alone makes the job fit."""
    assert plan.gpu_has is not None
    setup = plan.setup
    need = (
        f"{setup.tokens:,} tokens in one pass on {setup.ranks} x {plan.accelerator} need"
        f" {plan.gpu_needs / GB:.1f} GB per GPU (state {step_bytes(setup) / GB:.1f}, activations"
        f" {plan.gpu_parts['activations'] / GB:.1f}), but one has {USABLE * plan.gpu_has / GB:.1f} GB to use"
    )
    trainer = job.trainer
    for name in ("micro_batch_tokens", "activation_checkpointing", "optimizer_offload"):
        if getattr(trainer, name) != "auto" and _fits(_with(job, {name: "auto"}), shape, plan.gpu_has):
            return ("trainer", name), f"found {_shown(getattr(trainer, name))}: {need}; write auto"
    free = {"micro_batch_tokens": "auto", "activation_checkpointing": "auto", "optimizer_offload": "auto"}
    most = num_devices(trainer.accelerators) if trainer.accelerators else trainer.ranks
    if trainer.ranks < most and _fits(_with(job, {**free, "ranks": most}), shape, plan.gpu_has):
        return ("trainer", "ranks"), f"found {trainer.ranks}: {need}; write {most}, one rank per GPU"
    for shared in (2, 4, 8):
        divides = setup.ranks % shared == 0 and shared_heads(shape.heads, shape.kv_heads, shared) == shared
        if not divides or shared <= trainer.context_parallel:
            continue
        if _fits(_with(job, {**free, "context_parallel": shared}), shape, plan.gpu_has):
            found = f"found {trainer.context_parallel}: {need}"
            return ("trainer", "context_parallel"), f"{found}; write {shared}, ranks that share a response"
    longest = _longest_response(_with(job, free), shape, plan.gpu_has)
    if longest:
        found = f"found {job.algorithm.max_response_tokens:,}: {need}"
        return (
            ("algorithm", "max_response_tokens"),
            f"{found}; write at most {longest}, or take larger GPUs",
        )
    return ("model",), f"{need}; take more or larger GPUs, a smaller model, or algorithm.lora"


def _longest_response(job: Job, shape: TransformerShape, has: int) -> int:
    """Return the longest responses, in whole 256 tokens, that would fit; 0: none."""
    low, high = 0, job.algorithm.max_response_tokens // 256
    while low < high:
        middle = (low + high + 1) // 2
        algorithm = job.algorithm.model_copy(update={"max_response_tokens": 256 * middle})
        if _fits(job.model_copy(update={"algorithm": algorithm}), shape, has):
            low = middle
        else:
            high = middle - 1
    return 256 * low


def _fits(job: Job, shape: TransformerShape, has: int) -> bool:
    setup, _ = _choose(job, shape, has)
    return peak_bytes(setup) <= USABLE * has


def _with(job: Job, changes: Mapping[str, object]) -> Job:
    return job.model_copy(update={"trainer": job.trainer.model_copy(update=dict(changes))})


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:,}"


def _disk_bytes(job: Job, shape: TransformerShape, version: int, checkpoint: int) -> int:
    """Return the run's folder at its fullest; software and the hub's copy of the model where it is bought.

    Reserved engines read the versions of the head; machines of the local provider have their own.
    """
    here = job.rollout.most_spot_engines(here=True) if job.rollout.spot.local_offers else 0
    versions = (1 + here) * _num_versions(job) * version
    bought = SOFTWARE_BYTES + CAST * shape.parameters if job.trainer.is_bought else 0
    kept = 0 if job.only_serves else (job.trainer.keep_checkpoints + 1) * checkpoint
    return kept + WEIGHT * shape.parameters + versions + bought + BESIDE_BYTES


def _disk_range(trainer: Trainer) -> tuple[float, float]:
    """Return least and most bytes per second of a bought head's disk, which are the same if it is written."""
    sold = cloud_traits(trainer.cloud).throughput_sold(trainer.accelerators)
    if not trainer.is_bought or trainer.via != "direct" or sold is None:
        return 0.0, math.inf
    if trainer.disk_mib_per_s != "auto":
        return MIB * trainer.disk_mib_per_s, MIB * trainer.disk_mib_per_s
    return MIB * sold.included, MIB * sold.most


def _disk_gb(plan: FitPlan) -> int:
    """Return the size to ask for: a tenth more than is needed, in steps of 50 GB."""
    return max(LEAST_DISK_GB, -(-plan.disk * 11 // (10 * 50 * GB)) * 50)


def engine_share(job: Job, has: int) -> float:
    """Return the bytes of a GPU of `has` bytes that a vLLM engine of `job` may use."""
    return (job.rollout.engine_args.gpu_memory_utilization or VLLM_SHARE) * has


def engine_bytes(job: Job, shape: TransformerShape) -> tuple[int, int]:
    """Return what a vLLM engine of `job` holds on each of its GPUs: its weights, and the KV cache of one
    longest response with its prompt."""
    parallel, options = job.rollout.tensor_parallel, job.rollout.engine_args
    element = CAST if options.dtype == "bfloat16" else WEIGHT
    weights = shape.parameters * (1 if options.fp8 else element)
    return weights // parallel, element * shape.kv_elements_per_token * job.max_context_tokens // parallel


def _engine_misfits(job: Job, shape: TransformerShape) -> Iterator[FieldProblem]:
    """Yield the machines on which a vLLM engine has no room for the weights and one longest response."""
    if job.rollout.engine != "vllm":
        return
    needs, parallel = sum(engine_bytes(job, shape)), job.rollout.tensor_parallel
    for path, accelerators in _engine_places(job):
        has = memory_bytes(accelerators)
        share = engine_share(job, has or 0)
        if has is not None and needs > share:
            yield (
                path,
                (
                    f"an engine on {parallel} of {accelerators} needs {needs / GB:.1f} GB per GPU for weights"
                    f" and a response of {job.max_context_tokens:,} tokens, and may use {share / GB:.1f} GB;"
                    " raise rollout.tensor_parallel, or take larger GPUs"
                ),
            )


def _engine_places(job: Job) -> Sequence[tuple[tuple[str | int, ...], str | None]]:
    offers = job.rollout.spot.any_of if job.rollout.spot.max_instances else []
    reserved = [(("trainer", "accelerators"), job.trainer.accelerators)] if job.trainer.local_engines else []
    spot = [
        (("rollout", "spot", "any_of", number, "accelerators"), offer.accelerators)
        for number, offer in enumerate(offers)
        if isinstance(offer, CloudOffer)
    ]
    return [*reserved, *spot]
