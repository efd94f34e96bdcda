"""What SkyPilot's exceptions mean to us: later, elsewhere or never.

SkyPilot reports a failed launch as `ResourcesUnavailableError` whatever the cause, with the clouds' own words
in its history; those decide, and quota before capacity: a retry elsewhere cures both, but a person has to be
told of a quota.
"""

from __future__ import annotations

import re

from rlboost_runtime.errors import (
    ConfigError,
    CredentialsRejected,
    NoCapacity,
    ProviderError,
    QuotaExceeded,
    RLBoostError,
    Throttled,
)

_QUOTA = re.compile(
    r"VcpuLimitExceeded|MaxSpotInstanceCountExceeded|InstanceLimitExceeded|QuotaExceeded|QUOTA_EXCEEDED"
    r"|quota .*exceeded|quotas? .*zero",
    re.IGNORECASE,
)
_CREDENTIALS = re.compile(
    r"AuthFailure|UnauthorizedOperation|InvalidClientTokenId|ExpiredToken"
    r"|credentials? .*(expired|invalid|not)"
    r"|NoCredentialsError|PERMISSION_DENIED|cannot find .*credential",
    re.IGNORECASE,
)
_THROTTLED = re.compile(r"RequestLimitExceeded|Throttling|rateLimitExceeded|HTTP 429", re.IGNORECASE)
_RACE = re.compile(r"InvalidPermission\.Duplicate|InvalidGroup\.Duplicate")
"""What the second of two launches hears that make SkyPilot's firewall rules at once: seen on the lab."""
RACE_PAUSE_S = 0.0  # the rules are there by now: nothing is to be bought elsewhere for that
_CREDENTIAL_KINDS = {
    "InvalidCloudCredentials",
    "NoCloudAccessError",
    "CloudUserIdentityError",
    "ClusterOwnerIdentityMismatchError",
    "ApiServerAuthenticationError",
    "PermissionDeniedError",
}
_ASKED_WRONGLY = {"InvalidCloudConfigs", "InvalidSkyPilotConfigError", "InvalidClusterNameError"}
_LONGEST = 600  # characters of SkyPilot's words that are repeated


def explained(kind: str, text: str) -> RLBoostError:
    """Return our error for SkyPilot's exception class `kind` that said `text`."""
    words = _words(text)
    if kind in _CREDENTIAL_KINDS or _CREDENTIALS.search(text):
        return CredentialsRejected(
            f"SkyPilot may not act in the cloud: {words}", "`sky check` says what is missing"
        )
    if kind in _ASKED_WRONGLY:
        return ConfigError(f"SkyPilot cannot use its configuration: {words}", "mend ~/.sky/config.yaml")
    if _THROTTLED.search(text):
        return Throttled(f"the cloud refuses SkyPilot's requests for now: {words}", "wait; it is tried again")
    if _QUOTA.search(text):
        return QuotaExceeded(
            f"the account may not have this machine: {words}",
            "ask the cloud for more quota, or add an entry to rollout.spot.any_of",
        )
    if _RACE.search(text):
        problem = ProviderError(f"two launches were in each other's way: {words}", "asked again by itself")
        problem.retry_after_s = RACE_PAUSE_S
        return problem
    if kind == "ResourcesUnavailableError":
        return NoCapacity(
            f"no such machine is to be had now: {words}", "wait, or add an entry to rollout.spot.any_of"
        )
    return ProviderError(
        f"SkyPilot failed ({kind}): {words}", "`sky status` and its log say more; try again later"
    )


def _words(text: str) -> str:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    told = "; ".join(dict.fromkeys(lines))
    return told if len(told) <= _LONGEST else told[: _LONGEST - 3] + "..."
