from __future__ import annotations

import pytest

from rlboost_runtime.money import NS_PER_HOUR, cost_micro_usd, format_usd, split_exactly


def test_an_hour_costs_its_price() -> None:
    assert cost_micro_usd(2_500_000, NS_PER_HOUR) == 2_500_000
    assert cost_micro_usd(0, NS_PER_HOUR) == 0
    assert cost_micro_usd(2_500_000, 0) == 0


def test_half_a_micro_dollar_is_rounded_up_and_less_is_not() -> None:
    assert cost_micro_usd(1, NS_PER_HOUR // 2) == 1
    assert cost_micro_usd(1, NS_PER_HOUR // 2 - 1) == 0
    assert cost_micro_usd(3, NS_PER_HOUR // 2) == 2


def test_large_bills_are_exact() -> None:
    assert cost_micro_usd(98_320_001, 1_000 * NS_PER_HOUR) == 98_320_001_000


def test_negative_money_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        cost_micro_usd(-1, 5)


@pytest.mark.parametrize(
    ("micro", "places", "text"),
    [
        (1_234_567_890_000, 2, "$1,234,567.89"),
        (5_000, 2, "$0.01"),
        (4_999, 2, "$0.00"),
        (-5_000, 2, "-$0.01"),
        (-1, 2, "$0.00"),
        (1, 6, "$0.000001"),
        (1_500_000, 0, "$2"),
    ],
)
def test_dollars_read_as_people_write_them(micro: int, places: int, text: str) -> None:
    assert format_usd(micro, places) == text


def test_a_split_adds_up_and_follows_the_weights() -> None:
    assert split_exactly(100, [1, 1, 1]) == [34, 33, 33]
    assert split_exactly(7, [0, 5, 2]) == [0, 5, 2]
    assert split_exactly(0, [0, 0]) == [0, 0]
    assert sum(split_exactly(999_999, [3, 7, 11, 0, 13])) == 999_999


def test_nothing_to_split_by_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot split"):
        split_exactly(1, [0, 0])
