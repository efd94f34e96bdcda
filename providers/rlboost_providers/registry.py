"""Which provider a job's spot machines come from."""

from __future__ import annotations

from rlboost_providers.base import Provider
from rlboost_providers.local import LocalProvider
from rlboost_runtime.job import Job
from rlboost_runtime.run_folder import RunFolder


def provider_for(job: Job, run: RunFolder) -> Provider:
    """Return the provider of the job's spot offers. Raises `ConfigError` where a trace is unusable."""
    spot = job.rollout.spot
    return LocalProvider(run.path, spot.any_of, max_instances=spot.max_instances)


def has_market(job: Job) -> bool:
    """Whether a market process has to run beside the job."""
    return any(offer.market is not None for offer in job.rollout.spot.any_of)
