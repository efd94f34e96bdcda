"""What Compute Engine says when it refuses, in our words: later, elsewhere, or not until a person acts.

A request is refused with an HTTP status and a reason; a stock-out comes later, as a code in the operation
that the request began.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlboost_runtime.errors import (
    ConfigError,
    CredentialsRejected,
    NoCapacity,
    ProviderError,
    QuotaExceeded,
    RLBoostError,
    Throttled,
)

NO_CAPACITY = frozenset(
    {
        "ZONE_RESOURCE_POOL_EXHAUSTED",
        "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS",
        "REGION_RESOURCE_POOL_EXHAUSTED",
        "RESOURCE_POOL_EXHAUSTED",
        "STOCKOUT",
        "UNSUPPORTED_OPERATION",
    }
)
QUOTA = frozenset({"QUOTA_EXCEEDED", "quotaExceeded", "limitExceeded"})
THROTTLED = frozenset({"rateLimitExceeded", "userRateLimitExceeded", "RATE_LIMIT_EXCEEDED"})
NOT_NOW = frozenset({"resourceNotReady", "RESOURCE_NOT_READY"})
"""Another operation is at work on it."""
THROTTLE_PAUSE_S = 60.0
"""Compute Engine counts requests per minute."""

_SIGN_IN = "type `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS"
_CLOCK = f"set this machine's clock, if it is wrong (timedatectl set-ntp true); else {_SIGN_IN}"
_STOCK = "wait, or add a zone, region or machine type to rollout.spot.any_of"
_QUOTA = "ask for more under IAM & Admin > Quotas (Preemptible GPUs of this kind, and GPUs in all regions)"


@contextmanager
def explained(what: str, *, may_be_absent: bool = False) -> Iterator[None]:
    """Turn what the Google libraries raise while they do `what` into errors of ours.

    With `may_be_absent`, `google.api_core.exceptions.NotFound` is left to the caller, who expects it.
    """
    import requests
    from google.api_core import exceptions as google
    from google.auth import exceptions as auth

    try:
        yield
    except google.GoogleAPICallError as error:
        if may_be_absent and isinstance(error, google.NotFound):
            raise
        raise refused(what, error) from error
    except (google.RetryError, auth.TransportError, requests.RequestException) as error:
        raise ProviderError(
            f"Google Cloud cannot be reached to {what}: {_first_line(error)}",
            "check this machine's network; the request is retried",
        ) from error
    except auth.GoogleAuthError as error:
        told = _first_line(error)
        remedy = _CLOCK if "reasonable timeframe" in told else _SIGN_IN
        raise CredentialsRejected(f"no usable Google credentials: {told}", remedy) from error


def refused(what: str, error: Any) -> RLBoostError:
    """Return the error for a refused request (`google.api_core.exceptions.GoogleAPICallError`)."""
    reasons = {str(each.get("reason")) for each in error.errors or () if isinstance(each, dict)}
    said = f"cannot {what}: {error.message} ({', '.join(sorted(reasons)) or error.code})"
    if reasons & QUOTA:
        return QuotaExceeded(said, _QUOTA)
    if reasons & THROTTLED or error.code == 429:
        throttled = Throttled(said, "retried automatically")
        throttled.retry_after_s = THROTTLE_PAUSE_S
        return throttled
    if error.code == 401:
        return CredentialsRejected(said, _SIGN_IN)
    if error.code == 403:
        return CredentialsRejected(
            said,
            "enable the API (`gcloud services enable compute.googleapis.com`) and give yourself the role in"
            " docs/clouds.md",
        )
    if error.code in (400, 404, 412) and not reasons & NOT_NOW:
        return ConfigError(said, "check infra, instance_type and image of this offer in the job file")
    return ProviderError(
        said, "retried automatically; https://status.cloud.google.com shows the status of Google Cloud"
    )


def failed(what: str, errors: list[Any]) -> RLBoostError:
    """Return the error for an operation that failed, from its `error.errors` (each with code and message)."""
    codes = {str(each.code) for each in errors}
    said = f"cannot {what}: {'; '.join(str(each.message) for each in errors)} ({', '.join(sorted(codes))})"
    if codes & NO_CAPACITY:
        return NoCapacity(said, _STOCK)
    if codes & QUOTA:
        return QuotaExceeded(said, _QUOTA)
    if codes & THROTTLED:
        return Throttled(said, "retried automatically")
    return ProviderError(said, "retried automatically")


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
