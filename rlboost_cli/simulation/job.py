"""A job file as something to simulate: its model, lengths, prices and offers, on its own machines.

The machines are those of the job's cloud offers; a job that names no GPU runs on the paper's. What the job
does not say is assumed and said in the notes that come with it: the trainer's GPUs, links, how long responses
become, and the paper's prices where the job has none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rlboost_providers.base.prices import parse_accelerator
from rlboost_providers.registry import expected_usd_per_hour, head_usd_per_hour, prices_of
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.fit.shape import KNOWN_MODELS, TransformerShape, find_shape
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
    name = "tiny" if isinstance(job.model, TinyModel) else job.model.rstrip("/").rpartition("/")[2]
    if name in MODELS:
        return MODELS[name]
    shape = find_shape(job.model, path.parent)
    if shape is None:
        raise ConfigError(
            f"{path}: model: the shape of `{job.model}` is not known",
            f"give a folder with a config.json, or one of {', '.join(KNOWN_MODELS)}",
        )
    return model_shape(name, shape)


def model_shape(name: str, shape: TransformerShape) -> ModelShape:
    """Return what the simulator computes with; a model with experts is taken for a dense one."""
    return ModelShape(
        name=name,
        parameters=float(shape.parameters),
        layers=shape.layers,
        hidden=shape.queries,
        kv_heads=shape.kv_heads,
        head_size=shape.head_dim,
    )
