"""What EC2 says when it refuses, in our words: later, elsewhere, or not until a person acts.

Codes are those of "Error codes for the Amazon EC2 API" and of CreateFleet's `Errors`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
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
        "InsufficientInstanceCapacity",
        "InsufficientHostCapacity",
        "InsufficientCapacity",
        "InsufficientFreeAddressesInSubnet",
        "UnfulfillableCapacity",
        "InvalidFleetConfiguration",  # the zone does not have this machine type
        "SpotMaxPriceTooLow",
        "Unsupported",
    }
)
QUOTA = frozenset(
    {"MaxSpotInstanceCountExceeded", "VcpuLimitExceeded", "InstanceLimitExceeded", "VolumeLimitExceeded"}
)
CREDENTIALS = frozenset(
    {
        "AuthFailure",
        "ExpiredToken",
        "ExpiredTokenException",
        "RequestExpired",
        "RequestInTheFuture",
        "RequestTimeTooSkewed",
        "InvalidClientTokenId",
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "UnrecognizedClientException",
        "OptInRequired",
        "PendingVerification",
        "Blocked",
    }
)
DENIED = frozenset({"UnauthorizedOperation", "AccessDenied", "AccessDeniedException"})
THROTTLED = frozenset(
    {"RequestLimitExceeded", "Throttling", "ThrottlingException", "TooManyRequestsException"}
)
NOT_SEEN_YET = re.compile(
    r"Invalid(Group|SecurityGroupID|SubnetID|LaunchTemplate(Name|Id))\.(NotFound|NotFoundException)"
)
"""What EC2 says of things that it has just made, as long as not all of it knows them."""
RACES = frozenset({"IdempotentParameterMismatch", "InvalidLaunchTemplateName.NotFoundException"})
"""What the second of two launchers of one machine hears: its parameters differ from the first one's, or the
first has deleted the template by then."""
THROTTLE_PAUSE_S = 15.0
"""Pause after throttling that outlasted the SDK's own retries: EC2's buckets refill within seconds."""

_SIGN_IN = "sign in with `aws configure` or `aws sso login`; `aws sts get-caller-identity` shows as whom"
_CLOCK = f"set this machine's clock if it is wrong (timedatectl set-ntp true); otherwise {_SIGN_IN}"
_SKEWED = re.compile(r"Request(Expired|InTheFuture|TimeTooSkewed)|Signature (expired|not yet current)")
"""A clock that is wrong looks like wrong credentials: a signature counts for some minutes."""


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn what boto3 raises while it does `what` into errors of ours."""
    from botocore import exceptions as boto
    from botocore.parsers import ResponseParserError

    try:
        yield
    except boto.ClientError as error:
        told: dict[str, Any] = error.response.get("Error", {})  # AWS's JSON
        raise problem_of(what, str(told.get("Code", "")), str(told.get("Message", error))) from error
    except (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError) as error:
        raise CredentialsRejected(f"no usable AWS credentials: {error}", _SIGN_IN) from error
    except (boto.TokenRetrievalError, boto.UnauthorizedSSOTokenError, boto.SSOTokenLoadError) as error:
        raise CredentialsRejected(f"the AWS sign-in has expired: {error}", _SIGN_IN) from error
    except (boto.NoRegionError, boto.InvalidRegionError) as error:
        raise ConfigError(
            f"cannot {what}: {error}", "write infra as aws/REGION, such as aws/us-east-2"
        ) from error
    except boto.EndpointConnectionError as error:
        raise ProviderError(
            f"cannot {what}: {error}",
            "check the region in infra and this machine's network; the request is retried",
        ) from error
    except (boto.BotoCoreError, ResponseParserError) as error:  # no answer in time, or a proxy's
        raise ProviderError(
            f"AWS cannot be reached to {what}: {error}",
            "check this machine's network; the request is retried",
        ) from error


def code_of(error: Exception) -> str:
    """Return the code in boto3's `ClientError`, empty in anything else."""
    response: dict[str, Any] = getattr(error, "response", {})
    return str(response.get("Error", {}).get("Code", ""))


def problem_of(what: str, code: str, message: str) -> RLBoostError:
    """Return the error for one of EC2's codes."""
    said = f"cannot {what}: {message} ({code})"
    if code in NO_CAPACITY:
        return NoCapacity(said, "wait, raise max_price_usd_per_hour, or add an entry to rollout.spot.any_of")
    if code in QUOTA:
        return QuotaExceeded(
            said, "ask for more in the Service Quotas console (All P or G Spot Instance Requests, in vCPUs)"
        )
    if code in CREDENTIALS:
        return CredentialsRejected(said, _CLOCK if _SKEWED.search(said) else _SIGN_IN)
    if code in DENIED:
        return CredentialsRejected(said, "give your user or role the policy in docs/clouds.md")
    if code in THROTTLED:
        throttled = Throttled(said, "retried automatically")
        throttled.retry_after_s = THROTTLE_PAUSE_S
        return throttled
    if NOT_SEEN_YET.fullmatch(code):
        return ProviderError(said, "retried automatically: EC2 may not list new machines yet")
    if code.startswith("Invalid") or code in ("MissingParameter", "ValidationError"):
        return ConfigError(said, "check infra, instance_type and image of this offer in the job file")
    return ProviderError(said, "retried automatically; https://health.aws.amazon.com shows the status of AWS")


def fleet_problem(what: str, errors: Sequence[dict[str, Any]]) -> RLBoostError:
    """Return the error for a CreateFleet that gave nothing: of its zones' reasons, the one that says most.

    The job file is at fault only where every zone says so: what one zone would sell may be had later.
    """
    found = [
        problem_of(what, str(each.get("ErrorCode", "")), str(each.get("ErrorMessage", ""))) for each in errors
    ]
    if not found:
        return problem_of(what, "UnfulfillableCapacity", "no zone has such a machine")
    for kind in (CredentialsRejected, ConfigError):
        if all(isinstance(each, kind) for each in found):
            return found[0]
    for telling in (QuotaExceeded, Throttled, NoCapacity):
        for each in found:
            if isinstance(each, telling):
                return each
    return next(each for each in found if not isinstance(each, ConfigError))
