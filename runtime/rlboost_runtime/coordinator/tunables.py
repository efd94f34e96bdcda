"""From a job to the core's tunables."""

from __future__ import annotations

from rlboost_providers.registry import cheapest_offer, prices_of
from rlboost_runtime.core.base.autoscaling import Autoscaling
from rlboost_runtime.core.base.messages import DEFAULT_BOOT_S, CoreConfig
from rlboost_runtime.deploy.shipment import Software
from rlboost_runtime.job import Job

VLLM_BOOT_S = 1200.0
"""Time to dial in for a machine that has to fetch vLLM first, some 5 GB with its CUDA."""


def core_config(job: Job) -> CoreConfig:
    """Return the core's tunables for a job; `max_usd_per_hour` bounds the fleet's size by prices that the job
    states, and by no other: a price that is only expected could leave room for none.

    That bound is for the cheapest offer; what is bought is held against the cap by the fleet.
    """
    machines = job.rollout.spot.max_instances
    software = Software.for_engine(job.rollout.engine, job.rollout.engine_args.python)
    per_machine = job.rollout.engines_on(cheapest_offer(job).accelerators)
    stated = min(offer.price_usd_per_hour for offer in job.rollout.spot.any_of)
    cap = job.budget.max_usd_per_hour
    if cap is not None and stated > 0:
        left = cap - job.trainer.price_usd_per_hour
        machines = min(machines, max(0, int(left / stated + 1e-9)))
    return CoreConfig(
        max_spot_instances=machines * per_machine,
        instances_per_machine=per_machine,
        reserved_instances=job.trainer.local_engines * (1 + job.trainer.bought_nodes),
        seeding_initial_s=job.rollout.seeding_initial_s,
        prices=prices_of(job),
        boot_deadline_s=VLLM_BOOT_S if software.vllm else DEFAULT_BOOT_S,
        autoscaling=autoscaling_of(job, machines) if job.only_serves else None,
    )


def autoscaling_of(job: Job, most_machines: int) -> Autoscaling:
    """Return how the fleet of a job that only serves follows its load."""
    assert job.endpoint is not None
    spot, scaling = job.rollout.spot, job.endpoint.scaling
    per_machine = job.rollout.engines_on(cheapest_offer(job).accelerators)
    return Autoscaling(
        min_instances=min(spot.min_instances, most_machines) * per_machine,
        max_instances=most_machines * per_machine,
        fill=scaling.fill,
        max_wait_s=scaling.max_wait_s,
        idle_s=scaling.idle_s,
        min_tokens_per_s=scaling.min_tokens_per_s,
    )
