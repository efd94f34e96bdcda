"""What SkyPilot's exceptions mean to us: later, elsewhere or never.

SkyPilot reports a failed launch as `ResourcesUnavailableError` whatever the cause, with the clouds' own words
in its history; those decide, and quota before capacity: a retry elsewhere cures both, but a person has to be
told of a quota.

What a machine wrote, fetched before it is ended: its installation's and its agents' logs, by SSH.

Best effort and bounded: a machine that does not answer is ended all the same.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import subprocess
from pathlib import Path

from rlboost_runtime.errors import (
    ConfigError,
    CredentialsRejected,
    NoCapacity,
    ProviderError,
    QuotaExceeded,
    RLBoostError,
    Throttled,
)
from rlboost_runtime.logs import event

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
            f"SkyPilot lacks permission in this cloud: {words}", "`sky check` shows what is missing"
        )
    if kind in _ASKED_WRONGLY:
        return ConfigError(f"SkyPilot cannot use its configuration: {words}", "correct ~/.sky/config.yaml")
    if _THROTTLED.search(text):
        return Throttled(
            f"the cloud refuses SkyPilot's requests for now: {words}", "wait; the launch is retried"
        )
    if _QUOTA.search(text):
        return QuotaExceeded(
            f"the account may not have this machine: {words}",
            "ask the cloud for more quota, or add an entry to rollout.spot.any_of",
        )
    if _RACE.search(text):
        problem = ProviderError(f"two launches collided: {words}", "retried automatically")
        problem.retry_after_s = RACE_PAUSE_S
        return problem
    if kind == "ResourcesUnavailableError":
        return NoCapacity(
            f"no capacity for this machine now: {words}", "wait, or add an entry to rollout.spot.any_of"
        )
    return ProviderError(
        f"SkyPilot failed ({kind}): {words}", "`sky status` and its log say more; try again later"
    )


def _words(text: str) -> str:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    told = "; ".join(dict.fromkeys(lines))
    return told if len(told) <= _LONGEST else told[: _LONGEST - 3] + "..."


log = logging.getLogger(__name__)

FETCH_S = 15.0
_MOST_BYTES = 262_144  # of each log, from its end
_SCRIPT = (
    "cd ~/.rlboost && for file in install.log install.json agents.log machine/agent-*.log;"
    f' do [ -f $file ] && echo "==> $file" && tail -c {_MOST_BYTES} $file; done'
)


def fetch_logs(cluster: str, folder: Path) -> bool:
    """Write the logs of the cluster's machine to `folder`/machine.log; returns whether it answered.

    Uses the SSH configuration that SkyPilot keeps for each of its clusters.
    """
    configuration = Path.home() / ".sky" / "generated" / "ssh" / cluster
    ssh = shutil.which("ssh")
    if ssh is None or not configuration.exists():
        return False
    options = ("-F", str(configuration), "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [ssh, *options, cluster, _SCRIPT],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=FETCH_S,
            check=False,
        )
        if done.stdout:
            (folder / "machine.log").write_bytes(done.stdout)
            return True
    event(log, "machine.logs_not_fetched", cluster=cluster)
    return False
