"""What a head that is bought in a cloud needs: credentials here, an offer, an identity of its own there.

What places elsewhere need: each is asked what it would sell now, as a run would ask it.

That takes credentials, network, region, machine type, quota of nothing and, for hosts, a known host key, so
whatever is wrong with these is said here, in the words that a run would say it in. Nothing is launched.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlboost_cli.doctor.findings import DoctorContext, Finding, fail, failed, ok, warn
from rlboost_providers.base.provider import Offer, Provider
from rlboost_providers.base.traits import cloud_traits, known_clouds
from rlboost_providers.registry import head_provider, providers_of
from rlboost_runtime.errors import NotYet, RLBoostError
from rlboost_runtime.job import CloudOffer, Job, LocalOffer, SshOffer
from rlboost_runtime.money import format_usd
from rlboost_runtime.run.folder import RunFolder


def offer(patient: DoctorContext) -> Iterator[Finding]:
    """Ask the cloud, with the credentials that are here, for such a machine; nothing is bought. Through
    SkyPilot only its catalogue is asked, which needs none."""
    job = patient.wanted
    try:
        provider = head_provider(job, None)
        provider.describe("doctor")  # the clouds' own APIs take the credentials
        offers = provider.offers()
    except RLBoostError as error:
        yield failed("head", error)
        return
    if not offers:
        is_dear = job.trainer.max_price_usd_per_hour is not None
        yield fail(
            "head",
            f"{job.trainer.accelerators} in {job.trainer.infra}"
            f" {'costs more than max_price_usd_per_hour' if is_dear else 'is not sold'}",
            "raise it, or choose another region"
            if is_dear
            else "choose another region or other accelerators",
        )
        return
    price = format_usd(offers[0].price_micro_usd_per_hour, 4)
    untried = "; `sky check` shows whether it may launch there" if job.trainer.via == "skypilot" else ""
    yield ok(
        "head",
        f"{job.trainer.accelerators} in {offers[0].zone}: {price} per hour ({offers[0].source}){untried}",
    )


def identity(patient: DoctorContext) -> Iterator[Finding]:
    """Whether the head could launch the machines that the job wants, and write to its output."""
    yield judge_identity(patient.wanted)


def judge_identity(job: Job) -> Finding:
    """Judge by whom the clouds take the head for."""
    own = job.trainer.cloud
    clouds = {each.cloud for each in job.rollout.spot.any_of if isinstance(each, CloudOffer)}
    clouds = clouds if job.rollout.spot.max_instances else set()
    if job.trainer.bought_nodes:
        clouds |= {own}
    unknown = sorted(cloud for cloud in clouds if not _is_known_to(cloud, job))
    ends_by_itself = job.trainer.via == "skypilot" and cloud_traits(own).head_ends_itself
    if not unknown and ends_by_itself and not _is_known_to(own, job):
        return warn(
            "identity",
            "the head may not delete itself: it stops after its run, and its disk costs money until"
            " you type a command",
            "name trainer.role, or scoped keys in secrets (docs/head.md)",
        )
    if unknown:
        return warn(
            "identity",
            f"the head has no identity in {', '.join(unknown)}: it could not launch machines there",
            "name trainer.role for its own cloud, or scoped keys in secrets (docs/head.md)",
        )
    who = "without a role in its cloud"
    if job.trainer.role:
        who = f"{job.trainer.role} in {own}"
    elif _has_skypilots_role(job):
        who = f"SkyPilot's own service account in {own}"
    if "@PROJECT." in (job.trainer.role or ""):
        return fail(
            "identity",
            f"trainer.role is {job.trainer.role}, as the template has it",
            "write your project's id for PROJECT",
        )
    variables = {name for cloud in known_clouds().values() for name in cloud.credential_variables}
    keys = [name for name in job.secrets if name in variables]
    held = f"{who}, with {', '.join(keys)}" if keys else who
    return ok("identity", f"the head will be {held}; its rights are not checked here")


def _is_known_to(cloud: str, job: Job) -> bool:
    """Whether the head can sign in to a cloud: by a role of its machine, or by keys that the job names."""
    if cloud == job.trainer.cloud and (job.trainer.role or _has_skypilots_role(job)):
        return True
    return any(key in job.secrets for key in cloud_traits(cloud).credential_variables)


def _has_skypilots_role(job: Job) -> bool:
    return job.trainer.via == "skypilot" and cloud_traits(job.trainer.cloud).skypilot_has_role


ASK_S = 300.0
"""SkyPilot is installed when it is first asked, and then started."""


def offers(patient: DoctorContext) -> Iterator[Finding]:
    """One finding for each place that is not this machine: a run does without one that refuses, so that it
    would not be heard of there."""
    job = patient.wanted
    if not job.rollout.spot.max_instances:
        return
    told: list[Finding] = []
    for part in places_of(job):
        with tempfile.TemporaryDirectory(prefix="rlboost-doctor-") as folder:
            for finding in _offers_of(part, RunFolder(Path(folder) / job.name)):
                if finding not in told:  # entries of one cloud fail alike
                    yield finding
                told.append(finding)


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
            f"answered in {seconds:.1f} s, but offers no machine that the job accepts at its price limit",
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
