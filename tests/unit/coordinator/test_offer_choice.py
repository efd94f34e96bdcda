"""Which place is asked next, and for how long one that had nothing is left alone."""

from __future__ import annotations

import pytest

from rlboost_providers.base.provider import Offer
from rlboost_runtime.coordinator.fleet.offer_choice import (
    CREDENTIALS_PAUSE_S,
    ERROR_PAUSE_S,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    QUOTA_PAUSE_S,
    OfferChoice,
)
from rlboost_runtime.errors import (
    ConfigError,
    CredentialsRejected,
    NoCapacity,
    ProviderError,
    QuotaExceeded,
    Throttled,
)


def offer(zone: str, price: int = 100, provider: str = "aws") -> Offer:
    return Offer(provider, zone, "H100:8", price, True, "test", instance_type="p5.48xlarge")


A, B, G = offer("a", 100), offer("b", 200), offer("g", 300, "gcp")
OFFERS = [G, B, A]


def of(kind: type[ProviderError] | type[ConfigError], **more: float) -> ProviderError | ConfigError:
    error = kind("said by a test", "do something")
    for name, value in more.items():
        setattr(error, name, value)
    return error


def test_the_cheapest_open_place_is_taken() -> None:
    assert OfferChoice().cheapest(OFFERS, 0.0) is A


def test_a_stock_out_leaves_its_place_for_twice_as_long_each_time_and_never_too_long() -> None:
    choice, now, pauses = OfferChoice(), 0.0, []
    for _ in range(9):
        choice.failed(A, of(NoCapacity), now)
        assert choice.cheapest(OFFERS, now) is B
        until = now
        while choice.cheapest([A, G], until) is not A:
            until += 0.5
        pauses.append(until - now)
        now = until
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    choice.came(A)
    choice.failed(A, of(NoCapacity), now)
    assert choice.cheapest([A, G], now + FIRST_PAUSE_S) is A


def test_a_place_that_says_when_to_come_back_is_asked_then() -> None:
    choice = OfferChoice()
    choice.failed(A, of(NoCapacity, retry_after_s=0.5), 0.0)
    with pytest.raises(NoCapacity) as refusal:
        choice.cheapest([A], 0.1)
    assert refusal.value.retry_after_s == pytest.approx(0.4)
    assert "a: said by a test" in refusal.value.problem
    assert choice.cheapest([A], 0.5) is A


@pytest.mark.parametrize(
    ("error", "pause_s", "whole_cloud"),
    [
        (of(QuotaExceeded), QUOTA_PAUSE_S, False),
        (of(CredentialsRejected), CREDENTIALS_PAUSE_S, True),
        (of(Throttled, retry_after_s=15.0), 15.0, True),
        (of(ProviderError), ERROR_PAUSE_S, False),
        (OSError("reset"), ERROR_PAUSE_S, False),
    ],
)
def test_each_kind_of_error_pauses_what_it_is_about(
    error: ProviderError | OSError, pause_s: float, whole_cloud: bool
) -> None:
    choice = OfferChoice()
    choice.failed(A, error, 0.0)
    assert choice.cheapest(OFFERS, pause_s - 0.1) is (G if whole_cloud else B)
    assert choice.cheapest(OFFERS, pause_s) is A


def test_what_the_job_file_has_wrong_is_not_asked_for_again() -> None:
    choice = OfferChoice()
    choice.failed(A, of(ConfigError), 0.0)
    with pytest.raises(NoCapacity) as refusal:
        choice.cheapest([A], 1e9)
    assert refusal.value.retry_after_s == LONGEST_PAUSE_S


def test_nothing_offered_is_a_stock_out_too() -> None:
    with pytest.raises(NoCapacity) as refusal:
        OfferChoice().cheapest([], 0.0)
    assert refusal.value.retry_after_s is not None
