"""A job file as something to simulate: its model, lengths, prices, market and offers, on its own machines.

The machines are those of the job's cloud offers, or this computer's for a small model whose machines are
all processes here; a job that names no GPU otherwise runs on the paper's. What the job does not say is
assumed and said in the notes that come with it: the trainer's GPUs, links, boots, how long responses become,
and the paper's prices where the job has none. Where a run like the job was measured here, `calibration` puts
its rates in the place of what is assumed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from rlboost_cli.simulation.calibration import calibrated, spot_pace, with_engine_pace
from rlboost_cli.simulation.market import has_own_market, market_in_words, market_of
from rlboost_cli.simulation.rates import Rates, boots_here, measured_rates
from rlboost_cli.terminal.text import counted
from rlboost_providers.base.prices import parse_accelerator, shipped_book
from rlboost_providers.registry import (
    egress_usd_per_gb,
    expected_usd_per_hour,
    head_offer,
    head_usd_per_hour,
    prices_beside,
    storage_usd_per_hour,
)
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.fit.shape import KNOWN_MODELS, TransformerShape, find_shape
from rlboost_runtime.job import CloudOffer, Job, LocalOffer, SshOffer, TinyModel
from rlboost_runtime.job.rollout import num_devices
from rlboost_runtime.sim.presets import (
    DRAFT_TOKENS,
    GBIT,
    GPUS,
    MODELS,
    RESERVED_8_H100,
    SPOT_2_H100,
    SUFFIX_ACCEPTED_LENGTH,
    Assumptions,
    GpuType,
    MachineShape,
    ModelShape,
    Preset,
    Turns,
    Workload,
)

ADAPTER_SHARE = 0.00035
"""Parameters of adapters of rank 1 over those of a dense model of some 8 billion."""
GBIT_PER_GPU = 25.0
"""Network of a cloud's GPU machines, as the paper's: 50 Gbit/s with two H100, 200 with eight."""
CPU = GpuType("CPU", 200e9, 20e9, 4e9)
"""Judged, not measured: what a core of a present computer does with a small model."""
CPU_DECODE_S = 0.004
"""A decode step of a small model on such a core; a job that paces its engines says it itself."""
LARGEST_ON_CPU = 1e9
"""Parameters up to which a job whose machines are all here is taken to run on this computer's cores."""
LOCAL_BOOT_S = 8.0
"""A local engine's start, where none was measured here yet."""
IMAGE_BOOT_S, INSTALL_BOOT_S = 150.0, 300.0
"""Judged: a cloud machine until its engine is there, from an image that has everything or installed first."""
FEWEST_INSTANCES = 0.2
"""Mean spot instances of a run from which on its steps say how fast these are."""
TOLD_SHARE, TOOL_S = 0.3, 1.0
"""Judged, of episodes that nobody has measured: the share of their tokens that the environment writes, and
what it takes for a turn."""
LOCAL_STARTUP_S, GPU_STARTUP_S, RENTED_STARTUP_S = 20.0, 240.0, 900.0
"""Judged: from a launch to the first step: here; with a large model to load; with a head to rent as well."""


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    """A job as the simulator takes it."""

    preset: Preset
    notes: tuple[str, ...]
    """What was assumed, and what was measured."""
    startup_s: float
    """From the launch to the first step."""
    reserved_storage_usd_per_hour: float
    """Disks and public addresses of the reserved nodes; the price of the machines includes them."""
    spot_storage_usd_per_hour: float
    """The same of one spot machine of the first offer."""
    measured: Rates | None
    """Of the run whose rates calibrate the simulation."""


def simulated_job(job: Job, folder: Path) -> SimulatedJob:
    """Return what to simulate for `job`, whose files are in `folder`. Raises `ConfigError` where its model or
    a GPU is not known."""
    found = measured_rates(job)
    model = _model(job, folder)
    head = head_usd_per_hour(job)
    machines = _machines(job, model.shape, head)
    preset = _preset(job, model.shape, machines, head, folder)
    spread = (
        "response lengths are assumed to be spread as in the paper,"
        f" up to {job.algorithm.max_response_tokens:,} tokens"
    )
    notes = [*machines.notes, *model.notes, market_in_words(job)]
    if preset.assumptions.frozen_bytes:
        adapters = preset.assumptions.wire_share * preset.model.weight_bytes
        notes.append(
            f"a machine pulls the model's {preset.model.weight_bytes / 1e9:,.1f} GB once, then adapters of"
            f" {adapters / 1e9:,.2f} GB per version"
        )
    if preset.assumptions.draft_tokens:
        notes.append(
            f"a decode step with drafts is assumed to bring {preset.assumptions.accepted_length:.1f} tokens,"
            " and drafts are used where that is faster"
        )
    startup_s = _startup_s(job, preset)
    preset, boot = _with_boots(job, preset)
    if found is None:
        notes += [spread, boot, f"the first step is assumed to begin {startup_s:,.0f} s after the launch"]
    else:
        rates, former = found
        assumed, preset = preset.workload.turns, calibrated(preset, job, rates, former)
        pace = _spot_pace(former, model.shape, rates, folder)
        if pace is not None:
            preset = with_engine_pace(preset, pace)
            notes.append(f"spot engines are taken to run at {pace:.0%} of the calibrated speed")
        startup_s = startup_s if rates.startup_s is None else rates.startup_s
        notes.append(f"calibrated with {rates.num_steps} measured steps of run {rates.run}")
    if preset.workload.turns is not None:
        is_measured = found is not None and preset.workload.turns != assumed
        basis = "measured" if is_measured else "assumed"
        notes.append(f"{basis}: {turns_in_words(preset.workload.turns)}")
    affordable = affordable_machines(job, preset)
    if affordable < job.rollout.spot.max_instances:
        notes.append(
            f"budget.max_usd_per_hour has room for {affordable} of"
            f" {counted(job.rollout.spot.max_instances, 'spot machine')}"
        )
    asked, most = job.algorithm.prompts_asked_per_step, job.algorithm.most_prompts_per_step
    if most > job.algorithm.prompts_per_step:
        rollouts = "one rollout" if most == asked else f"{1 + job.algorithm.max_refills} rollouts"
        notes.append(
            f"prompts in the place of groups without spread are not counted: beside"
            f" {job.algorithm.prompts_per_step:,} a step may roll out"
            f" {most - job.algorithm.prompts_per_step:,} more, in at most {rollouts}"
        )
    if isinstance(job.model, TinyModel) and preset.reserved.gpu is not CPU:
        notes.append("a tiny model on such machines is no forecast: it only demonstrates the command")
    head_storage = storage_usd_per_hour(head_offer(job.trainer), spot=False) if job.trainer.is_bought else 0.0
    return SimulatedJob(
        preset=preset,
        notes=tuple(notes),
        startup_s=startup_s,
        reserved_storage_usd_per_hour=head_storage,
        spot_storage_usd_per_hour=storage_usd_per_hour(job.rollout.spot.any_of[0], spot=True),
        measured=None if found is None else found[0],
    )


def _turns(job: Job) -> Turns | None:
    """Return what is assumed of the job's episodes; None where a rollout is one response."""
    settings = job.episodes
    if settings is None:
        return None
    mean = max(1.0, settings.max_turns / 2)
    return Turns(mean, TOLD_SHARE * job.algorithm.max_response_tokens / mean, TOOL_S, settings.concurrency)


def turns_in_words(turns: Turns) -> str:
    """Return what is taken of episodes."""
    return (
        f"episodes have {turns.mean:.3g} turns in the mean, after each of which the environment adds"
        f" {turns.told_tokens:,.0f} tokens in {turns.pause_s:.3g} s; {turns.concurrency:,} are open at once"
    )


def _spot_pace(former: Job, model: ModelShape, rates: Rates, folder: Path) -> float | None:
    """Return how fast the former run's spot engines were; None where it says nothing: without its market, or
    with hardly a spot machine."""
    if not has_own_market(former) or rates.spot_instances < FEWEST_INSTANCES:
        return None
    head = head_usd_per_hour(former)
    preset, _ = _with_boots(former, _preset(former, model, _machines(former, model, head), head, folder))
    try:
        market = market_of(former, folder, 0)
    except ConfigError:  # a trace that is no longer there
        return None
    return spot_pace(calibrated(preset, former, rates, former), market, rates)


def _preset(job: Job, model: ModelShape, machines: _Machines, head: float | None, folder: Path) -> Preset:
    limit, engine = job.algorithm.max_response_tokens, job.rollout.engine_args
    known = Assumptions()
    share = engine.gpu_memory_utilization or known.spot_memory_share
    on_gpus = Assumptions(
        # the paper's spread, in proportion to the limit: the share of responses that reach it stays the same
        length_median=known.length_median * limit / Workload().max_response_tokens,
        max_running=known.max_running if engine.max_running == "auto" else engine.max_running,
        spot_memory_share=share,
        reserved_memory_share=share,
        micro_batch_responses=job.algorithm.micro_batch_responses,
        forward_passes=_forward_passes(job),
        early_passes=float(job.algorithm.early_passes),
        draft_tokens=0 if engine.speculative is None else DRAFT_TOKENS,
        accepted_length=1.0 if engine.speculative is None else SUFFIX_ACCEPTED_LENGTH,
    )
    preset = Preset(
        name=job.name,
        model=model,
        reserved=machines.reserved,
        spot=machines.spot,
        egress_usd_per_gb=prices_beside(job, head).egress_usd_per_gb,
        reserved_nodes=machines.reserved_nodes,
        engines_per_reserved_node=machines.reserved_engines,
        seeding_initial_s=job.rollout.seeding_initial_s,
        workload=Workload(
            prompts=job.algorithm.prompts_per_step,
            group_size=job.algorithm.group_size,
            prompt_tokens=max(1, job.algorithm.max_prompt_tokens // 2),
            max_response_tokens=limit,
            turns=_turns(job),
            max_staleness=job.algorithm.max_staleness,
            in_flight_updates=job.algorithm.in_flight_updates,
        ),
        assumptions=on_gpus,
    )
    preset = _with_adapters(job, preset, folder)
    most = affordable_machines(job, preset) * preset.best_spot.engines  # as live
    preset = replace(preset, max_spot_instances=most)
    return _on_cores(job, preset) if machines.reserved.gpu is CPU else preset


def _with_adapters(job: Job, preset: Preset, folder: Path) -> Preset:
    """Return the preset with what travels where engines add the adapters themselves: the frozen weights once
    per machine, then adapters. A model whose shape is unknown has adapters of `ADAPTER_SHARE` per rank."""
    lora = job.algorithm.lora
    if lora is None or job.weights.transfer != "lora":
        return preset
    shape = None if isinstance(job.model, TinyModel) else find_shape(job.model, folder)
    whole = preset.model.parameters
    adapters = ADAPTER_SHARE * lora.rank * whole if shape is None else shape.adapter_parameters(lora.rank)
    assumed = replace(preset.assumptions, wire_share=adapters / whole, frozen_bytes=preset.model.weight_bytes)
    return replace(preset, assumptions=assumed)


def affordable_machines(job: Job, preset: Preset) -> int:
    """Return how many spot machines the job allows, by their number and by `budget.max_usd_per_hour`."""
    most, cap = job.rollout.spot.max_instances, job.budget.max_usd_per_hour
    cheapest = min((shape.usd_per_hour for shape in preset.spot), default=0.0)
    if cap is None or cheapest <= 0:
        return most
    return min(most, max(0, int((cap - preset.reserved_usd_per_hour) / cheapest + 1e-9)))


def _forward_passes(job: Job) -> float:
    """Return what training a response costs: forward and twice that backward, recomputed activations unless
    the job says that they are kept, that of a critic, and the log-probabilities and values that its objective
    needs beforehand."""
    algorithm = job.algorithm
    trained = 3.0 + (job.trainer.activation_checkpointing is not False)
    critic = 0.0 if algorithm.critic is None else 1.0 + trained  # its values first, as large as the policy
    return trained + critic + sum((algorithm.reference is not None, algorithm.recomputes_old_logprobs))


def _on_cores(job: Job, preset: Preset) -> Preset:
    """Return the preset with the times of a small model: nothing of it waits for gigabytes."""
    pace = job.rollout.engine_args.tokens_per_s_per_response
    return replace(
        preset,
        calibration=replace(
            preset.calibration,
            decode_step_s=CPU_DECODE_S if pace is None else max(CPU_DECODE_S, 1.0 / pace),
            micro_batch_s=0.02,
            growth_headroom_tokens=0,
        ),
        assumptions=replace(
            preset.assumptions,
            wake_s=0.1,
            sleep_s=0.1,
            optimizer_s=0.1,
            gather_s=0.1,
            apply_s=0.2,
            retry_s=1.0 if has_own_market(job) else preset.assumptions.retry_s,
        ),
    )


def _with_boots(job: Job, preset: Preset) -> tuple[Preset, str]:
    """Return the preset with boots as measured here or assumed, and which of the two."""
    measured = boots_here(job)
    if measured is not None:
        boot_s, words = measured, f"machines boot in {measured:.0f} s, as measured here"
    else:
        boot_s = max(_boot_s(offer) for offer in job.rollout.spot.any_of)
        words = f"machines are assumed to boot in {boot_s:,.0f} s"
    return replace(preset, assumptions=replace(preset.assumptions, boot_s=boot_s)), words


def _boot_s(offer: LocalOffer | SshOffer | CloudOffer) -> float:
    match offer:
        case LocalOffer():
            return LOCAL_BOOT_S
        case SshOffer():
            return IMAGE_BOOT_S
    return INSTALL_BOOT_S if offer.image is None else IMAGE_BOOT_S


def _startup_s(job: Job, preset: Preset) -> float:
    if job.trainer.is_bought:
        return RENTED_STARTUP_S
    return LOCAL_STARTUP_S if preset.reserved.gpu is CPU else GPU_STARTUP_S


@dataclass(frozen=True, slots=True)
class _Machines:
    """What the job runs on, as far as it says so."""

    reserved: MachineShape
    spot: tuple[MachineShape, ...]
    notes: tuple[str, ...]
    reserved_nodes: int = 1
    reserved_engines: int | None = None


def _machines(job: Job, model: ModelShape, head: float | None) -> _Machines:
    offers = [offer for offer in job.rollout.spot.any_of if isinstance(offer, CloudOffer)]
    if offers:
        return _of_clouds(job, offers, head)
    is_here = has_own_market(job) and job.trainer.infra == "local"
    if is_here and model.parameters <= LARGEST_ON_CPU:
        return _on_this_computer(job, head)
    return _as_in_the_paper(job, head)


def _on_this_computer(job: Job, head: float | None) -> _Machines:
    spots = job.rollout.spot.local_offers
    link = GBIT_PER_GPU * GBIT
    reserved = MachineShape(CPU, 1, 1, link, head or 0.0)
    machines = tuple(
        MachineShape(CPU, num_devices(offer.accelerators), 1, link, offer.price_usd_per_hour)
        for offer in spots
    )
    notes = ("all machines are processes of this computer; prices are the job's",)
    return _Machines(reserved, machines, notes, 1, job.trainer.local_engines)


def _of_clouds(job: Job, offers: list[CloudOffer], head: float | None) -> _Machines:
    """Machines of the job's offers, with as many engines as live; so has a trainer that names none."""
    parts = [parse_accelerator(offer.accelerators) for offer in offers]
    trainer_gpu = parse_accelerator(job.trainer.accelerators or offers[0].accelerators)[0]
    unknown = [name for name in (trainer_gpu, *(name for name, _ in parts)) if name not in GPUS]
    if unknown:
        raise ConfigError(
            f"the speed of a {unknown[0]} is not known to the simulator",
            f"simulate with one of {', '.join(GPUS)}",
        )
    parallel = job.rollout.tensor_parallel
    spot = tuple(
        MachineShape(
            GPUS[name],
            count or 1,
            parallel,
            GBIT_PER_GPU * GBIT * (count or 1),
            _with_storage(offer),
            egress_usd_per_gb(job, offer),
        )
        for offer, (name, count) in zip(offers, parts, strict=True)
    )
    ranks, nodes = job.trainer.ranks, job.trainer.nodes
    head_storage = storage_usd_per_hour(head_offer(job.trainer), spot=False) if job.trainer.is_bought else 0.0
    reserved = MachineShape(
        GPUS[trainer_gpu],
        ranks,
        min(ranks, parallel),
        GBIT_PER_GPU * GBIT * ranks,
        ((head or 0.0) + head_storage) / (nodes - job.trainer.bought_nodes),
    )
    names = ", ".join(f"{offer.infra} {offer.accelerators}" for offer in offers)
    notes = [
        f"spot machines are the job's cloud offers: {names}",
        f"the trainer is assumed to have {nodes * ranks} {trainer_gpu}, one per rank",
        f"a machine's link is assumed to be {GBIT_PER_GPU:g} Gbit/s per GPU",
    ]
    days = [quote.as_of for offer in offers for quote in shipped_book().of(offer)]
    if days:
        notes.append(
            f"prices are those shipped with rlboost, of {min(days)}; rlboost prices --live has today's of EC2"
        )
    if job.trainer.place is None:
        notes.append(
            "the head is in no known cloud: its weights reach the machines at that speed and free of egress;"
            " trainer.location says where it is"
        )
    if any(expected_usd_per_hour(offer) is None for offer in offers):
        notes.append("an offer without a known price counts as free: give it max_price_usd_per_hour")
    if len(offers) < len(job.rollout.spot.any_of):
        notes.append("machines that are not a cloud's are left out: their GPUs are not known")
    return _Machines(reserved, spot, tuple(notes), nodes, job.trainer.local_engines)


def _with_storage(offer: CloudOffer) -> float:
    """Return the likely price of a machine and what its disk and address cost; 0: nobody knows."""
    price = expected_usd_per_hour(offer)
    return 0.0 if price is None else price + storage_usd_per_hour(offer, spot=True)


def _as_in_the_paper(job: Job, head: float | None) -> _Machines:
    spots = [expected_usd_per_hour(offer) or 0.0 for offer in job.rollout.spot.any_of]
    head = head or 0.0
    assumed = "machines are assumed to be the paper's: 8 H100 reserved, 2 H100 per spot machine"
    if head == 0 and not any(spots):
        note = f"the job has no prices; the paper's are used: ${RESERVED_8_H100.usd_per_hour}"
        note += f" and ${SPOT_2_H100.usd_per_hour} per hour"
        return _Machines(RESERVED_8_H100, (SPOT_2_H100,), (assumed, note))
    machines = tuple(replace(SPOT_2_H100, usd_per_hour=price) for price in spots)
    reserved = replace(RESERVED_8_H100, usd_per_hour=head)
    return _Machines(reserved, machines, (assumed, "prices are the job's"))


@dataclass(frozen=True, slots=True)
class _Model:
    """A model's shape, and what was assumed about it."""

    shape: ModelShape
    notes: tuple[str, ...] = ()


def _model(job: Job, folder: Path) -> _Model:
    name = "tiny" if isinstance(job.model, TinyModel) else job.model.rstrip("/").rpartition("/")[2]
    if name in MODELS:
        return _Model(MODELS[name])
    shape = find_shape(job.model, folder)
    if shape is None:
        return _by_name(str(job.model), name)
    return _Model(model_shape(name, shape))


def _by_name(model: str, name: str) -> _Model:
    """Return the shape of a model whose name says how large it is: the nearest known one, scaled."""
    size = re.search(r"(?:^|[-_])(\d+(?:\.\d+)?)B(?:[-_]|$)", name, re.IGNORECASE)
    if size is None or re.search(r"-A\d", name):
        raise ConfigError(
            f"model: the shape of `{model}` is not known",
            f"give a folder with a config.json, or one of {', '.join(KNOWN_MODELS)}",
        )
    parameters = float(size[1]) * 1e9
    like = min(MODELS.values(), key=lambda known: abs(known.parameters - parameters))
    scale = (parameters / like.parameters) ** (1 / 3)
    shape = replace(
        like,
        name=name,
        parameters=parameters,
        layers=max(1, round(like.layers * scale)),
        hidden=max(1, round(like.hidden * scale)),
    )
    return _Model(shape, (f"{name} is assumed to be shaped like {like.name}, scaled to its size",))


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
