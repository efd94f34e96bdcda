"""What a head that is bought in a cloud needs: credentials here, an offer, an identity of its own there."""

from __future__ import annotations

from collections.abc import Iterator

from rlboost_cli.doctor.findings import Finding, Patient, fail, failed, ok, warn
from rlboost_providers.registry import head_provider
from rlboost_runtime.core.money import format_usd
from rlboost_runtime.errors import RLBoostError
from rlboost_runtime.job import CloudOffer, Job

_KEYS = {
    "aws": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    "gcp": ("GOOGLE_APPLICATION_CREDENTIALS",),
}
"""Names in `secrets` by which a head without a role could sign in."""


def offer(patient: Patient) -> Iterator[Finding]:
    """Ask the cloud, with the credentials that are here, for such a machine; nothing is bought. Through
    SkyPilot only its catalogue is asked, which needs none."""
    job = patient.job
    if job is None or not job.trainer.is_bought:
        return
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
            "raise it, or write another region" if is_dear else "write another region, or other accelerators",
        )
        return
    price = format_usd(offers[0].price_micro_usd_per_hour, 4)
    untried = "; `sky check` says whether it may buy there" if job.trainer.via == "skypilot" else ""
    yield ok(
        "head",
        f"{job.trainer.accelerators} in {offers[0].zone}: {price} per hour ({offers[0].source}){untried}",
    )


def identity(patient: Patient) -> Iterator[Finding]:
    """Whether the head could launch the spot machines that the job wants, and write to its output."""
    if patient.job is not None and patient.job.trainer.is_bought:
        yield judge_identity(patient.job)


def judge_identity(job: Job) -> Finding:
    """Judge by whom the clouds take the head for."""
    own = job.trainer.infra.partition("/")[0]
    clouds = {each.cloud for each in job.rollout.spot.any_of if isinstance(each, CloudOffer)}
    clouds = clouds if job.rollout.spot.max_instances else set()
    unknown = sorted(cloud for cloud in clouds if not _is_known_to(cloud, job))
    if not unknown and own == "aws" and job.trainer.via == "skypilot" and not _is_known_to(own, job):
        return warn(
            "identity",
            "the head may not end itself: it stops after its run, and its disk costs until a command looks",
            "name trainer.role, or scoped keys in secrets (docs/head.md)",
        )
    if unknown:
        return warn(
            "identity",
            f"the head is nobody to {', '.join(unknown)}: it could not launch spot machines there",
            "name trainer.role for its own cloud, or scoped keys in secrets (docs/head.md)",
        )
    who = "nobody in its cloud"
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
    keys = [name for name in job.secrets if any(name in each for each in _KEYS.values())]
    return ok("identity", f"the head is {who}{', with ' + ', '.join(keys) if keys else ''}")


def _is_known_to(cloud: str, job: Job) -> bool:
    """Whether the head can sign in to a cloud: by a role of its machine, or by keys that the job names."""
    if cloud == job.trainer.infra.partition("/")[0] and (job.trainer.role or _has_skypilots_role(job)):
        return True
    return any(key in job.secrets for key in _KEYS.get(cloud, ()))


def _has_skypilots_role(job: Job) -> bool:
    return job.trainer.via == "skypilot" and job.trainer.infra.partition("/")[0] == "gcp"
