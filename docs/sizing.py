"""Writes docs/sizing.md from the arithmetic by which `rlboost check` and `plan` judge a job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from rlboost_providers.base.accelerators import memory_bytes
from rlboost_runtime.fit.memory import GRADIENT, MOMENTS, USABLE, WEIGHT
from rlboost_runtime.fit.plan import (
    GB,
    SOFTWARE_BYTES,
    VLLM_SHARE,
    FitPlan,
    engine_bytes,
    engine_share,
    fit_plan,
)
from rlboost_runtime.fit.shape import KNOWN_MODELS, TransformerShape
from rlboost_runtime.job import Job

PROMPT_TOKENS, RESPONSE_TOKENS, MOST_TOKENS, LORA_RANK = 1_024, 8_192, 131_072, 32
GBIT_PER_S = (1, 10, 25)
MODELS = (
    *("Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B", "Qwen/Qwen2.5-1.5B"),
    *("Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B", "Qwen/Qwen2.5-7B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B"),
    *("Qwen/Qwen3-14B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-32B"),
)


class _Gpus(NamedTuple):
    name: str
    per_node: int
    nodes: int = 1

    @property
    def words(self) -> str:
        each = f"{self.per_node} x {self.name}"
        return each if self.nodes == 1 else f"{self.nodes} nodes of {each}"


TRAINERS = (
    *(_Gpus("L4", 1), _Gpus("L40S", 1), _Gpus("H100", 1), _Gpus("H100", 2), _Gpus("H100", 4)),
    *(_Gpus("H100", 8), _Gpus("H200", 8), _Gpus("H100", 8, 2)),
)
"""From the smallest; the first on which a model fits is named."""
ENGINES = (_Gpus("L4", 1), _Gpus("L40S", 1), _Gpus("H100", 1), _Gpus("H100", 2), _Gpus("H200", 1))

INTRODUCTION = f"""\
Which GPUs, how much main memory and disk, and how fast a link a model needs. `rlboost plan JOB` says it of
your job and your machines, and `rlboost check JOB` refuses what does not fit, with the line to change; this
page is for the choice before there is a job. All figures are computed by the same arithmetic from the models'
configurations. None was measured on a GPU.

They are for prompts of {PROMPT_TOKENS:,} tokens and responses of {RESPONSE_TOKENS:,}, in bfloat16, with an
engine on the trainer's GPUs that sleeps while they train. GB are 10^9 bytes."""
TRAINER = f"""\
The fewest GPUs on which the trainer fits, what it takes of each at its fullest, and what the head needs
besides: main memory, in which weights and optimizer wait while engines have the GPUs, and disk for
checkpoints, weight versions and the final model. A head that is bought has {SOFTWARE_BYTES // GB} GB of
software on the disk, too; its size follows from the plan (`trainer.disk_gb: auto`).

*c*: with activation checkpointing; *o*: with the optimizer's moments in main memory between steps. Both are
chosen where they are needed, if the job leaves them to `auto`. *Responses up to*: the longest power of two
that fits these GPUs; the model's own context may be shorter."""
TRAINER_NOTES = f"""\
- A weight that is trained takes {WEIGHT + GRADIENT + MOMENTS} bytes, spread over all GPUs: itself, its
  gradient and AdamW's moments, in float32. {100 * USABLE:.0f} % of a GPU's memory is planned for.
- More GPUs than the fewest train faster: with more room the plan takes larger passes, and neither
  checkpoints nor offloads.
- [PPO](losses.md) with a critic trains two models, and takes twice the state. A KL penalty has a reference
  model in main memory."""
ENGINE = f"""\
How many responses of {RESPONSE_TOKENS:,} tokens with their prompts an engine of vLLM holds at once, by its
weights and KV cache in {100 * VLLM_SHARE:.0f} % of the memory
(`rollout.engine_args.gpu_memory_utilization`). Real engines hold less, as vLLM's workspace and CUDA graphs
come off; `rlboost status RUN --json` shows the measured cache as `kv_tokens`. Of shorter responses it holds
more, in proportion. A dash: `rlboost check` refuses it."""
ENGINE_NOTES = """\
- Two GPUs are `rollout.tensor_parallel: 2`. Machines are preempted whole: several with one engine each lose
  less at once than one with many.
- How many machines are useful depends on lengths and training: see the alternatives of `rlboost plan JOB`
  ([what it will cost](cost.md))."""
LINK = """\
What a new machine pulls before it serves, and how long that takes on its link if the other end keeps up. The
head's link is shared by all that pull from it at once; with `weights.peers: true` or `weights.bucket` it is
not the only source ([weights](weights.md))."""
LINK_NOTES = """\
- Between steps a machine pulls a delta, which is some 10 to 130 times smaller, by learning rate (measured
  with a model of 105 M parameters: [benchmarks](../benchmarks/weights/README.md#deltas)).
- With `algorithm.lora` and `weights.transfer: lora` a machine pulls the full version once, then the adapters
  alone.
- What leaves a cloud or a region is billed: [egress](cost-report.md#egress).
- Tokens take next to nothing: some bytes each, as they are generated."""


def sizing_page() -> str:
    """Return docs/sizing.md."""
    parts = [
        "# Sizing",
        "<!-- Written by docs/generate.py from runtime/rlboost_runtime/fit/: do not edit. -->",
        INTRODUCTION,
        "## The trainer",
        TRAINER,
        _table(
            ("model", "parameters", "all weights trained", "GB per GPU", "responses up to", "main memory, GB",
             "disk, GB", f"LoRA, rank {LORA_RANK}", "GB per GPU"),
            (_trainer_row(model) for model in MODELS),
        ),
        TRAINER_NOTES,
        "## Engines",
        ENGINE,
        _table(
            ("model", "weights, GB", "cache per token, kB", *(gpus.words for gpus in ENGINES)),
            (_engine_row(model) for model in MODELS),
        ),
        ENGINE_NOTES,
        "## The link",
        LINK,
        _table(
            ("model", "full version, GB", *(f"at {rate} Gbit/s" for rate in GBIT_PER_S),
             f"adapters of rank {LORA_RANK}, MB"),
            (_link_row(model) for model in MODELS),
        ),
        LINK_NOTES,
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def job_of(gpus: _Gpus, *, lora: bool = False, response_tokens: int = RESPONSE_TOKENS) -> Job:
    """Return a job whose trainer and engines have these GPUs."""
    algorithm: dict[str, Any] = {"lora": {"rank": LORA_RANK}} if lora else {}
    fields = {
        "name": "sizing",
        "model": "any",
        "data": {"source": "prompts.jsonl"},
        "algorithm": {
            "max_prompt_tokens": PROMPT_TOKENS,
            "max_response_tokens": response_tokens,
            **algorithm,
        },
        "trainer": {"dtype": "bfloat16", "ranks": gpus.per_node, "nodes": gpus.nodes}
        | ({} if gpus.nodes == 1 else {"node_address": "head:29400"}),
        "rollout": {
            "engine": "vllm",
            "engine_args": {"dtype": "bfloat16"},
            "tensor_parallel": gpus.per_node,
            "spot": {"any_of": [{"infra": "local"}], "max_instances": 0},
        },
    }
    return Job.model_validate(fields)


def fewest(shape: TransformerShape, *, lora: bool = False) -> tuple[_Gpus, FitPlan] | None:
    """Return the first of `TRAINERS` on which the model fits, and its plan."""
    for gpus in TRAINERS:
        plan = fit_plan(job_of(gpus, lora=lora), shape, memory_bytes(gpus.name))
        assert plan.gpu_has is not None
        if plan.gpu_needs <= USABLE * plan.gpu_has:
            return gpus, plan
    return None


def contexts(shape: TransformerShape, gpus: _Gpus) -> int:
    """Return how many whole prompts and responses an engine on all of these GPUs holds; 0: it is refused."""
    has = memory_bytes(gpus.name)
    assert has is not None
    job = job_of(gpus)
    weights, response = engine_bytes(job, shape)
    return max(0, int(engine_share(job, has) - weights) // response)


def longest_response(shape: TransformerShape, gpus: _Gpus) -> int:
    """Return the longest responses, of `RESPONSE_TOKENS` times a power of two, that fit these GPUs."""
    tokens = RESPONSE_TOKENS
    while tokens < MOST_TOKENS:
        plan = fit_plan(job_of(gpus, response_tokens=2 * tokens), shape, memory_bytes(gpus.name))
        assert plan.gpu_has is not None
        if plan.gpu_needs > USABLE * plan.gpu_has:
            break
        tokens *= 2
    return tokens


def _trainer_row(model: str) -> Iterator[str]:
    shape = KNOWN_MODELS[model]
    yield from (model, f"{shape.parameters / 1e9:.1f} B")
    whole, adapters = fewest(shape), fewest(shape, lora=True)
    if whole is None:
        yield from ("-",) * 5
    else:
        gpus, plan = whole
        yield from _trained(gpus, plan)
        yield f"{longest_response(shape, gpus):,}"
        yield from (f"{(plan.host + plan.versions) / GB:,.0f}", f"{plan.disk / GB:,.0f}")
    yield from ("-", "-") if adapters is None else _trained(*adapters)


def _trained(gpus: _Gpus, plan: FitPlan) -> tuple[str, str]:
    switches = [sign for sign, on in (("c", plan.setup.checkpointing), ("o", plan.setup.offload)) if on]
    return gpus.words, f"{plan.gpu_needs / GB:.0f}" + (f" *{' '.join(switches)}*" if switches else "")


def _engine_row(model: str) -> Iterator[str]:
    shape, alone = KNOWN_MODELS[model], _Gpus("H100", 1)
    weights, response = engine_bytes(job_of(alone), shape)
    yield from (model, f"{weights / GB:.1f}", f"{response / (PROMPT_TOKENS + RESPONSE_TOKENS) / 1e3:.0f}")
    yield from (f"{contexts(shape, gpus):,}" if contexts(shape, gpus) else "-" for gpus in ENGINES)


def _link_row(model: str) -> Iterator[str]:
    shape = KNOWN_MODELS[model]
    full, lora = (fit_plan(job_of(_Gpus("H100", 8), lora=is_lora), shape) for is_lora in (False, True))
    yield from (model, f"{full.version / GB:.1f}")
    seconds = [8 * full.version / (rate * 1e9) for rate in GBIT_PER_S]
    yield from (f"{each:.1f} s" if each < 9.95 else f"{each:,.0f} s" for each in seconds)
    adapters = lora.setup.trained * (full.version // shape.parameters)
    yield f"{adapters / 1e6:,.0f}"


def _table(head: tuple[str, ...], rows: Iterator[Iterator[str]]) -> str:
    lines = [head, *(tuple(row) for row in rows)]
    head_line, *others = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([head_line, "|" + "---|" * len(head), *others])
