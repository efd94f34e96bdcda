"""A job file as something to simulate: its model, lengths, prices and offers, on its own machines.

The machines are those of the job's cloud offers; a job that names no GPU runs on the paper's. What the job
does not say is assumed and said in the notes that come with it: the trainer's GPUs, links, how long responses
become, and the paper's prices where the job has none.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlboost_providers.base.prices import parse_accelerator
from rlboost_providers.registry import expected_usd_per_hour, head_usd_per_hour, prices_of
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import CloudOffer, Job, TinyModel
from rlboost_runtime.job.file.load import load_job
from rlboost_runtime.sim.presets import (
    GBIT,
    GPUS,
    MODELS,
    RESERVED_8_H100,
    SPOT_2_H100,
    MachineShape,
    ModelShape,
    Preset,
    Workload,
)

GBIT_PER_GPU = 25.0
"""Network of a cloud's GPU machines, as the paper's: 50 Gbit/s with two H100, 200 with eight."""


def preset_of_job(path: Path) -> tuple[Preset, tuple[str, ...]]:
    """Return what to simulate for the job in `path`, and what was assumed. Raises `ConfigError`."""
    job = load_job(path)
    machines = _machines(job, path)
    limit, engine = job.algorithm.max_response_tokens, job.rollout.engine_args
    preset = Preset(
        name=job.name,
        model=_model(job, path),
        reserved=machines.reserved,
        spot=machines.spot,
        egress_usd_per_gb=prices_of(job).egress_usd_per_gb,
        reserved_nodes=machines.reserved_nodes,
        engines_per_reserved_node=machines.reserved_engines,
        max_spot_instances=job.rollout.spot.max_instances,
        seeding_initial_s=job.rollout.seeding_initial_s,
        workload=Workload(
            prompts=job.algorithm.prompts_per_step,
            group_size=job.algorithm.group_size,
            prompt_tokens=max(1, job.algorithm.max_prompt_tokens // 2),
            max_response_tokens=limit,
        ),
    )
    known = preset.assumptions
    share = engine.gpu_memory_utilization or known.spot_memory_share
    assumptions = replace(
        known,
        # the paper's spread, in proportion to the limit: the share of responses that reach it stays the same
        length_median=known.length_median * limit / Workload().max_response_tokens,
        max_running=engine.max_running,
        spot_memory_share=share,
        reserved_memory_share=share,
        micro_batch_responses=job.algorithm.micro_batch_responses,
    )
    spread = f"responses are taken to spread as the paper's do, up to {limit:,} tokens"
    notes = [*machines.notes, spread]
    if isinstance(job.model, TinyModel):
        notes.append("a tiny model on such machines says nothing about this one; it shows the command")
    return replace(preset, assumptions=assumptions), tuple(notes)


@dataclass(frozen=True, slots=True)
class _Machines:
    """What the job runs on, as far as it says so."""

    reserved: MachineShape
    spot: tuple[MachineShape, ...]
    notes: tuple[str, ...]
    reserved_nodes: int = 1
    reserved_engines: int | None = None


def _machines(job: Job, path: Path) -> _Machines:
    offers = [offer for offer in job.rollout.spot.any_of if isinstance(offer, CloudOffer)]
    return _of_clouds(job, offers, path) if offers else _as_in_the_paper(job)


def _of_clouds(job: Job, offers: list[CloudOffer], path: Path) -> _Machines:
    """Machines of the job's offers, with as many engines as live; the trainer has such GPUs too."""
    parts = [parse_accelerator(offer.accelerators) for offer in offers]
    unknown = [name for name, _ in parts if name not in GPUS]
    if unknown:
        raise ConfigError(
            f"{path}: rollout.spot.any_of: the speed of a {unknown[0]} is not known here",
            f"simulate with one of {', '.join(GPUS)}",
        )
    parallel = job.rollout.tensor_parallel
    spot = tuple(
        MachineShape(
            GPUS[name],
            count or 1,
            parallel,
            GBIT_PER_GPU * GBIT * (count or 1),
            expected_usd_per_hour(offer) or 0.0,
        )
        for offer, (name, count) in zip(offers, parts, strict=True)
    )
    ranks, nodes = job.trainer.ranks, job.trainer.nodes
    reserved = MachineShape(
        spot[0].gpu,
        ranks,
        min(ranks, parallel),
        GBIT_PER_GPU * GBIT * ranks,
        (head_usd_per_hour(job) or 0.0) / nodes,
    )
    names = ", ".join(f"{offer.infra} {offer.accelerators}" for offer in offers)
    notes = [
        f"spot machines are the job's cloud offers: {names}",
        f"the trainer is taken to have {nodes * ranks} {spot[0].gpu.name}, one per rank",
        f"a machine's link is taken to be {GBIT_PER_GPU:g} Gbit/s per GPU",
    ]
    if not all(shape.usd_per_hour for shape in spot):
        notes.append("an offer without a known price counts as free: give it max_price_usd_per_hour")
    if len(offers) < len(job.rollout.spot.any_of):
        notes.append("machines that are not a cloud's are left out: their GPUs are not known")
    return _Machines(reserved, spot, tuple(notes), nodes, job.trainer.local_engines)


def _as_in_the_paper(job: Job) -> _Machines:
    spots = [expected_usd_per_hour(offer) or 0.0 for offer in job.rollout.spot.any_of]
    head = head_usd_per_hour(job) or 0.0
    assumed = "machines are taken to be the paper's: 8 H100 reserved, 2 H100 per spot machine"
    if head == 0 and not any(spots):
        note = f"the job has no prices; the paper's are used: ${RESERVED_8_H100.usd_per_hour}"
        note += f" and ${SPOT_2_H100.usd_per_hour} per hour"
        return _Machines(RESERVED_8_H100, (SPOT_2_H100,), (assumed, note))
    machines = tuple(replace(SPOT_2_H100, usd_per_hour=price) for price in spots)
    reserved = replace(RESERVED_8_H100, usd_per_hour=head)
    return _Machines(reserved, machines, (assumed, "prices are the job's"))


def _model(job: Job, path: Path) -> ModelShape:
    if isinstance(job.model, TinyModel):
        heads = job.model.hidden_size // 32
        config = {
            "hidden_size": job.model.hidden_size,
            "intermediate_size": 2 * job.model.hidden_size,
            "num_hidden_layers": job.model.num_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": max(1, heads // 2),
            "head_dim": 32,
            "vocab_size": 258,
            "tie_word_embeddings": True,
        }
        return model_of_config("tiny", config)
    name = job.model.rstrip("/").rpartition("/")[2]
    if name in MODELS:
        return MODELS[name]
    config_file = path.parent / job.model / "config.json"
    try:
        return model_of_config(name, json.loads(config_file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: model: the shape of `{job.model}` is not known",
            f"give a folder with a config.json, or one of {', '.join(MODELS)}",
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ConfigError(
            f"{config_file}: not the configuration of a dense transformer: {exc!r}",
            "give a folder in HF format",
        ) from None


def model_of_config(name: str, config: dict[str, Any]) -> ModelShape:
    """Return the shape in a Hugging Face configuration of a dense transformer with gated MLPs. Raises
    `KeyError` or `TypeError` where it is none."""
    hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_size = int(config.get("head_dim") or hidden // heads)
    attention = 2 * hidden * head_size * (heads + kv_heads)  # query and output; key and value
    mlp = 3 * hidden * int(config["intermediate_size"])
    embeddings = hidden * int(config["vocab_size"]) * (1 if config.get("tie_word_embeddings") else 2)
    return ModelShape(
        name=name,
        parameters=float(layers * (attention + mlp) + embeddings),
        layers=layers,
        hidden=heads * head_size,
        kv_heads=kv_heads,
        head_size=head_size,
    )
