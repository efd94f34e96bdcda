"""What a job needs on its head beside the pinned versions that every machine is given (`machine.txt`)."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement

from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.job import CloudOffer, Job, SshOffer


def requirements_of(job: Job) -> list[str]:
    """Return lines for pip: the job's own, and those of our extras for its clouds and its tracking.

    Raises `RuntimeFault` where we are not installed and so do not know our extras.
    """
    extras = set(_extras_of(job))
    try:
        known = [Requirement(each) for each in requires("rlboost") or []]
    except PackageNotFoundError as missing:
        raise RuntimeFault(
            "rlboost is not installed here, it only lies in the path", "pip install -e ."
        ) from missing
    ours = {
        str(each).partition(";")[0].strip()
        for each in known
        if each.name != "rlboost" and each.marker is not None
        if any(each.marker.evaluate({"extra": extra}) for extra in extras)
    }
    return [*sorted(ours), *job.requirements]


def _extras_of(job: Job) -> Iterator[str]:
    for offer in job.rollout.spot.any_of:
        if isinstance(offer, SshOffer):
            yield "ssh"
        elif isinstance(offer, CloudOffer):
            yield offer.cloud if offer.via == "direct" else "sky"
    if job.tracking.tensorboard or job.tracking.wandb is not None:
        yield "track"
