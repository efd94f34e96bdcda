"""SkyPilot's exceptions mean later, elsewhere or never."""

from __future__ import annotations

import pytest

from rlboost_providers.skypilot.errors import explained
from rlboost_runtime.errors import (
    ConfigError,
    CredentialsRejected,
    NoCapacity,
    ProviderError,
    QuotaExceeded,
    Retry,
    Throttled,
)

UNAVAILABLE = "ResourcesUnavailableError"


@pytest.mark.parametrize(
    ("kind", "text", "meaning", "retry"),
    [
        (UNAVAILABLE, "InsufficientInstanceCapacity in us-west-2a", NoCapacity, Retry.ELSEWHERE),
        (UNAVAILABLE, "ZONE_RESOURCE_POOL_EXHAUSTED", NoCapacity, Retry.ELSEWHERE),
        (UNAVAILABLE, "MaxSpotInstanceCountExceeded: Max spot instance", QuotaExceeded, Retry.ELSEWHERE),
        (UNAVAILABLE, "Quota 'GPUS_ALL_REGIONS' exceeded. Limit: 0.0", QuotaExceeded, Retry.ELSEWHERE),
        (UNAVAILABLE, "An error occurred (AuthFailure) when calling", CredentialsRejected, Retry.NEVER),
        ("NoCloudAccessError", "no cloud is enabled", CredentialsRejected, Retry.NEVER),
        ("ClientError", "RequestLimitExceeded: slow down", Throttled, Retry.LATER),
        ("ApiServerConnectionError", "Could not connect to SkyPilot API server", ProviderError, Retry.LATER),
    ],
)
def test_what_a_cloud_said_decides_where_and_when_to_ask_again(kind, text, meaning, retry):
    error = explained(kind, text)
    assert type(error) is meaning
    assert isinstance(error, ProviderError)
    assert error.retry is retry
    assert text.split()[0] in error.problem


def test_a_configuration_that_cannot_be_used_is_the_users_to_mend():
    assert isinstance(explained("InvalidSkyPilotConfigError", "vpc_name: wrong"), ConfigError)


def test_colours_and_repetition_are_left_out_and_long_words_cut():
    error = explained(UNAVAILABLE, "\x1b[31mno room\x1b[0m\n" * 3 + "x" * 5000)
    assert error.problem.count("no room") == 1
    assert "\x1b" not in error.problem
    assert len(error.problem) < 1000
