"""What the agents of one machine of a run are told: made from the job and what lies in the run's folder."""

from __future__ import annotations

from rlboost_runtime.agent.bootstrap import Bootstrap
from rlboost_runtime.core.base.messages import Pool
from rlboost_runtime.engines.base import EngineSettings, VllmOptions
from rlboost_runtime.errors import NotYet
from rlboost_runtime.job import Job, LocalOffer
from rlboost_runtime.protocol.messages import Sampling
from rlboost_runtime.run.credentials import make_credential
from rlboost_runtime.run.folder import RunFolder, read_json
from rlboost_runtime.run.head import node_address, url_seen_by
from rlboost_runtime.run.reserved import RESERVED_MACHINE, node_of
from rlboost_runtime.run.security import read_token


def reserved_instances(job: Job) -> tuple[str, ...]:
    """Return the names of the engines on the head's GPUs."""
    return instances_of(RESERVED_MACHINE, job.trainer.local_engines)


def instances_of(machine: str, num_engines: int) -> tuple[str, ...]:
    """Return the names of a machine's engines."""
    return tuple(f"{machine}/{index}" for index in range(num_engines))


def make_bootstrap(
    job: Job, run: RunFolder, machine: str, pool: str, instances: tuple[str, ...]
) -> Bootstrap:
    """Return the bootstrap of `machine`, whose agents are `instances` ("spot-3/0") in `pool` (a `core` Pool).

    Stop tokens are not in it: they come with the model, in every weight version. Raises `NotYet` until the
    coordinator has said where it listens.
    """
    endpoint = read_json(run.endpoint)
    if endpoint is None:
        raise NotYet("the coordinator does not listen yet", "ask again once endpoint.json is there")
    is_head, node = machine == RESERVED_MACHINE, node_of(machine)
    return Bootstrap(
        run=run.name,
        machine=machine,
        pool=str(pool),
        instances=instances,
        coordinator_url=url_seen_by(machine, endpoint),
        token=make_credential(read_token(run), machine),
        certificate=run.certificate.read_text(),
        engine=_engine(job, pool),
        weight_streams=job.weights.streams,
        weight_transfer="auto" if job.weights.transfer == "lora" else job.weights.transfer,
        weight_store=str(run.weights) if is_head else "",
        weights_in=job.weights.keep_in,
        weight_bucket=run.place_in(job.weights.bucket) if job.weights.bucket else "",
        weight_peers=job.weights.peers and pool != Pool.RESERVED,
        trainer_node=() if node is None else _trainer_node(job, run, node[0]),
    )


def _trainer_node(job: Job, run: RunFolder, number: int) -> tuple[str, ...]:
    """Return the arguments of `rlboost_runtime.trainer.node` on node `number`."""
    trainer = job.trainer
    return (node_address(trainer), run.name, str(number), str(trainer.nodes), str(trainer.ranks))


VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Room for adapters that vLLM can be started with."""


def _lora_room(job: Job) -> int:
    """Return the rank that an engine must have room for; 0: no adapters come by themselves."""
    lora = job.algorithm.lora
    if lora is None or job.weights.transfer != "lora":
        return 0
    return next((rank for rank in VLLM_RANKS if rank >= lora.rank), lora.rank)


def _promised_gpus(job: Job, pool: str) -> int:
    """Return how many GPUs an engine was bought with; 0: none, or not all machines of its pool have any."""
    if job.trainer.allow_cpu:
        return 0
    places: list[str | None] = [job.trainer.accelerators]
    if pool != Pool.RESERVED:
        offers = job.rollout.spot.any_of
        places = [None if isinstance(offer, LocalOffer) else offer.accelerators for offer in offers]
    has_gpus = all(place is not None and not place.lower().startswith("cpu") for place in places)
    return job.rollout.tensor_parallel if has_gpus else 0


def _engine(job: Job, pool: str) -> EngineSettings:
    algorithm, options = job.algorithm, job.rollout.engine_args
    return EngineSettings(
        kind=job.rollout.engine,
        sampling=Sampling(temperature=algorithm.temperature, top_p=algorithm.top_p),
        max_context_tokens=job.max_context_tokens,
        max_running=None if options.max_running == "auto" else options.max_running,
        dtype=options.dtype,
        seed=algorithm.seed,
        threads=options.threads,
        tokens_per_s_per_response=options.tokens_per_s_per_response,
        count_tokens=job.evidence.count_tokens,
        tensor_parallel=job.rollout.tensor_parallel,
        promised_gpus=_promised_gpus(job, pool),
        vllm=VllmOptions(
            python=options.python,
            enforce_eager=options.enforce_eager,
            gpu_memory_utilization=options.gpu_memory_utilization,
            kv_cache_mib=options.kv_cache_mib,
            fp8=options.fp8,
            speculative=options.speculative,
            args=job.rollout.vllm_args,
            max_lora_rank=_lora_room(job),
            may_sleep=pool == Pool.RESERVED,
        ),
    )
