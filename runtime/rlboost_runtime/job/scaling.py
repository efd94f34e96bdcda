"""How many spot machines a job that only serves has: by its queue and its latency."""

from __future__ import annotations

from pydantic import Field

from rlboost_runtime.job.base import Model


class Scaling(Model):
    """How the fleet follows its load, between rollout.spot.min_instances and max_instances."""

    fill: float = Field(default=0.75, gt=0, le=1)
    """Share of the engines' slots that the open requests should take; above it another machine is started."""
    max_wait_s: float = Field(default=5.0, gt=0)
    """Longest time that a request should wait for an engine, in seconds; the load is averaged over as
    long."""
    idle_s: float = Field(default=300.0, gt=0)
    """A machine is ended once the load would have fitted without it for so many seconds."""
    min_tokens_per_s: float | None = Field(default=None, gt=0)
    """Slowest decoding that a response should get, in tokens per second: engines that are slower when full
    get fewer responses' worth of slots; null: any."""
