from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlboost_runtime.money import NS_PER_HOUR, cost_micro_usd, format_usd, parse_usd, split_exactly


@given(st.integers(0, 10**9), st.integers(0, 10**18))
def test_a_cost_is_the_exact_product_rounded_half_up(price: int, billed_ns: int) -> None:
    exact = Fraction(price * billed_ns, NS_PER_HOUR)
    assert -Fraction(1, 2) < exact - cost_micro_usd(price, billed_ns) < Fraction(1, 2) or (
        cost_micro_usd(price, billed_ns) - exact == Fraction(1, 2)
    )


@given(st.integers(0, 10**12), st.lists(st.integers(0, 10**6), min_size=1).filter(any))
def test_parts_add_up_and_are_at_most_one_off(total: int, weights: list[int]) -> None:
    parts = split_exactly(total, weights)
    assert sum(parts) == total
    assert all(abs(p - Fraction(total * w, sum(weights))) < 1 for p, w in zip(parts, weights, strict=True))


@pytest.mark.parametrize(
    ("text", "micro"),
    [
        ("$1,234.56", 1_234_560_000),
        ("8.4", 8_400_000),
        (8.4, 8_400_000),
        (0.1 + 0.2, 300_000),
        ("-0.5", -500_000),
    ],
)
def test_amounts_are_read_exactly(text: str | float, micro: int) -> None:
    assert parse_usd(text) == micro


@pytest.mark.parametrize("text", ["", "free", "1.2.3", "nan", "inf", "$"])
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an amount"):
        parse_usd(text)


@given(st.integers(-(10**15), 10**15))
def test_what_is_written_in_full_reads_back(micro: int) -> None:
    assert parse_usd(format_usd(micro, 6).replace("-$", "-")) == micro
