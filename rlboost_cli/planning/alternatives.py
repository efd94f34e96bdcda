"""Other ways to run a job: a larger or smaller fleet, another region, another GPU. At shipped prices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlboost_cli.terminal.text import counted
from rlboost_providers.base.prices import Quote, parse_accelerator, shipped_book
from rlboost_runtime.job import CloudOffer, Job
from rlboost_runtime.sim.presets import GPUS

MOST_GPUS, MOST_REGIONS = 2, 2


@dataclass(frozen=True, slots=True)
class Alternative:
    """A job that differs from the planned one in one thing."""

    what: str
    job: Job


def alternatives(job: Job) -> Iterator[Alternative]:
    """Yield jobs that differ in the number of spot machines, their region or their GPU."""
    most = job.rollout.spot.max_instances
    for count in dict.fromkeys((most // 2, most + 1, 2 * most)):
        if 0 < count != most:
            yield Alternative(f"at most {counted(count, 'spot machine')}", _changed(job, max_instances=count))
    offers = [offer for offer in job.rollout.spot.any_of if isinstance(offer, CloudOffer)]
    if offers:
        yield from _elsewhere(job, offers)
        yield from _other_gpus(job, offers)


def _elsewhere(job: Job, offers: list[CloudOffer]) -> Iterator[Alternative]:
    """Yield the cheapest regions of the first offer's cloud that the job does not name."""
    first = offers[0]
    named = {(offer.cloud, offer.region) for offer in offers}
    name, count = parse_accelerator(first.accelerators)
    found = shipped_book().find(accelerator=name, count=count or 1, infra=first.cloud)
    others = [q for q in found if q.spot_usd_per_hour and (q.cloud, q.region) not in named]
    for quote in sorted(others, key=_spot_price)[:MOST_REGIONS]:
        yield _bought(job, first, quote)


def _other_gpus(job: Job, offers: list[CloudOffer]) -> Iterator[Alternative]:
    """Yield machines with other GPUs in the first offer's region that decode the most for a dollar."""
    first = offers[0]
    used = {parse_accelerator(offer.accelerators)[0] for offer in offers}
    where = "/".join(first.infra.split("/")[:2])
    parallel = job.rollout.tensor_parallel
    others = [
        quote
        for quote in shipped_book().find(infra=where)
        if quote.spot_usd_per_hour
        and quote.accelerator in GPUS
        and quote.accelerator not in used
        and quote.accelerator_count % parallel == 0
    ]

    def usd_per_bandwidth(quote: Quote) -> float:
        return _spot_price(quote) / (quote.accelerator_count * GPUS[quote.accelerator].bandwidth)

    best: dict[str, Quote] = {}
    for quote in sorted(others, key=usd_per_bandwidth):
        best.setdefault(quote.accelerator, quote)
    for quote in list(best.values())[:MOST_GPUS]:
        yield _bought(job, first, quote)


def _bought(job: Job, first: CloudOffer, quote: Quote) -> Alternative:
    accelerators = f"{quote.accelerator}:{quote.accelerator_count}"
    infra = f"{quote.cloud}/{quote.region}"
    offer = first.model_copy(
        update={
            "infra": infra,
            "accelerators": accelerators,
            "max_price_usd_per_hour": None,
            "instance_type": quote.instance_type,
            "egress_usd_per_gb": None,
        }
    )
    return Alternative(f"spot {accelerators} in {infra}", _changed(job, any_of=[offer]))


def _spot_price(quote: Quote) -> float:
    return quote.spot_usd_per_hour or 0.0


def _changed(job: Job, **spot: object) -> Job:
    changed = job.rollout.spot.model_copy(update=spot)
    return job.model_copy(update={"rollout": job.rollout.model_copy(update={"spot": changed})})
