"""What places elsewhere need: each is asked what it would sell now, as a run would ask it.

That takes credentials, network, region, machine type, quota of nothing and, for hosts, a known host key, so
whatever is wrong with these is said here, in the words that a run would say it in. Nothing is launched.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlboost_cli.doctor.findings import Finding, Patient, failed, ok, warn
from rlboost_providers.base import Offer, Provider
from rlboost_providers.registry import providers_of
from rlboost_runtime.errors import NotYet, RLBoostError
from rlboost_runtime.job import CloudOffer, Job, LocalOffer, SshOffer
from rlboost_runtime.run_folder import RunFolder

ASK_S = 300.0
"""SkyPilot is installed when it is first asked, and then started."""


def offers(patient: Patient) -> Iterator[Finding]:
    """One finding for each place that is not this machine: a run does without one that refuses, so that it
    would not be heard of there."""
    job = patient.job
    assert job is not None
    if not job.rollout.spot.max_instances:
        return
    for part in places_of(job):
        with tempfile.TemporaryDirectory(prefix="rlboost-doctor-") as folder:
            yield from _offers_of(part, RunFolder(Path(folder) / job.name))


def _offers_of(job: Job, run: RunFolder) -> Iterator[Finding]:
    try:
        providers = providers_of(job, run)
    except RLBoostError as error:
        yield failed("offers", error)
        return
    for name, provider in providers.items():
        try:
            began = time.monotonic()
            found = _ask(provider)
        except RLBoostError as error:
            yield failed(name, error)
        else:
            yield judge_offers(name, found, time.monotonic() - began)
        finally:
            close = getattr(provider, "close", None)
            if close is not None:
                close()


def places_of(job: Job) -> list[Job]:
    """Return the job with each entry of a cloud's own API alone, and with those that SkyPilot, which takes
    long to start, or SSH is to ask together; offers of this machine have checks of their own."""
    far = [offer for offer in job.rollout.spot.any_of if not isinstance(offer, LocalOffer)]
    alone = [offer for offer in far if isinstance(offer, CloudOffer) and offer.via == "direct"]
    together = [offer for offer in far if offer not in alone]
    return [*(_only(job, [offer]) for offer in alone), *([_only(job, together)] if together else [])]


def _only(job: Job, offers: Sequence[SshOffer | CloudOffer]) -> Job:
    spot = job.rollout.spot.model_copy(update={"any_of": list(offers)})
    return job.model_copy(update={"rollout": job.rollout.model_copy(update={"spot": spot})})


def judge_offers(name: str, found: Sequence[Offer], seconds: float) -> Finding:
    """Judge what a provider would sell."""
    if not found:
        return warn(
            name,
            f"answered in {seconds:.1f} s, but has nothing that the job wants, at the prices that it allows",
            "name more regions or accelerators, or raise max_price_usd_per_hour; a run would wait for offers",
        )
    first = found[0]
    what = f"{first.instance_type or first.accelerator} in {first.zone}"
    price = f"${first.price_micro_usd_per_hour / 1e6:.2f} per hour ({first.source})"
    many = f"{len(found)} offers" if len(found) > 1 else "1 offer"
    return ok(name, f"answered in {seconds:.1f} s: {many}, the cheapest {what} at {price}")


def _ask(provider: Provider) -> list[Offer]:
    """Return its offers; waits for one that is still starting, at most `ASK_S`."""
    deadline = time.monotonic() + ASK_S
    while True:
        try:
            return provider.offers()
        except NotYet:
            if time.monotonic() > deadline:
                raise
            time.sleep(1.0)
