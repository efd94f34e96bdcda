"""A job file as something to simulate: its model, lengths and prices, on the paper's machines.

What the job does not say is assumed and said in the notes that come with it: which GPUs, how long responses
become, and the paper's prices where the job has none.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import Job, TinyModel
from rlboost_runtime.job_file import load_job
from rlboost_runtime.sim.hardware import MODELS, ModelShape
from rlboost_runtime.sim.presets import RESERVED_8_H100, SPOT_2_H100, MachineShape, Preset, Workload


def preset_of_job(path: Path) -> tuple[Preset, tuple[str, ...]]:
    """Return what to simulate for the job in `path`, and what was assumed. Raises `ConfigError`."""
    job = load_job(path)
    reserved, spot, price_note = _machines(job)
    limit = job.algorithm.max_response_tokens
    preset = Preset(
        name=job.name,
        model=_model(job, path),
        reserved=reserved,
        spot=spot,
        max_spot_instances=job.rollout.spot.max_instances,
        workload=Workload(
            prompts=job.algorithm.prompts_per_step,
            group_size=job.algorithm.group_size,
            prompt_tokens=max(1, job.algorithm.max_prompt_tokens // 2),
            max_response_tokens=limit,
        ),
    )
    # the paper's spread, in proportion to the limit: the share of responses that reach it stays the same
    median = preset.assumptions.length_median * limit / Workload().max_response_tokens
    preset = replace(preset, assumptions=replace(preset.assumptions, length_median=median))
    notes = [
        "machines are taken to be the paper's: 8 H100 reserved, 2 H100 per spot machine",
        f"responses are taken to spread as the paper's do, up to {limit:,} tokens",
        price_note,
    ]
    if isinstance(job.model, TinyModel):
        notes.append("a tiny model on such machines says nothing about this one; it shows the command")
    return preset, tuple(notes)


def _machines(job: Job) -> tuple[MachineShape, tuple[MachineShape, ...], str]:
    offers = job.rollout.spot.any_of
    reserved, spots = job.trainer.price_usd_per_hour, [offer.price_usd_per_hour for offer in offers]
    if reserved == 0 and not any(spots):
        note = f"the job has no prices; the paper's are used: ${RESERVED_8_H100.usd_per_hour}"
        return RESERVED_8_H100, (SPOT_2_H100,), f"{note} and ${SPOT_2_H100.usd_per_hour} per hour"
    machines = tuple(replace(SPOT_2_H100, usd_per_hour=price) for price in spots)
    return replace(RESERVED_8_H100, usd_per_hour=reserved), machines, "prices are the job's"


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
    """Return the shape in a Hugging Face configuration of a dense transformer with gated MLPs.

    Raises `KeyError` or `TypeError` where it is none.
    """
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
