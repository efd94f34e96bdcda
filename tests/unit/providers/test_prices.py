"""Prices: what is refused, what is named, what is found, and that it all works without a network."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from rlboost_cli.main import app
from rlboost_providers.base.prices import (
    PriceBook,
    Quote,
    ShippedTable,
    check_quotes,
    parse_accelerator,
    price_book,
)
from rlboost_runtime.errors import ConfigError, ProviderError

QUOTE = Quote("aws", "us-east-2", "p5.48xlarge", "H100", 8, 55.0, 12.0, "2026-11-20", "a test", zone="a")


def zones(*spot: float | None) -> list[Quote]:
    return [replace(QUOTE, zone=f"z{k}", spot_usd_per_hour=price) for k, price in enumerate(spot)]


class Source:
    """A source that knows `quotes_`, or does not answer."""

    is_live = True

    def __init__(self, name: str, quotes: list[Quote] | None) -> None:
        self.name, self._quotes = name, quotes

    def quotes(self) -> list[Quote]:
        if self._quotes is None:
            raise ProviderError(f"{self.name} cannot be reached", "try later")
        return self._quotes


def test_a_region_costs_its_zones_median_and_far_zones_are_named() -> None:
    (found,), remarks = check_quotes(zones(12.0, 13.0, 2.0, 14.0, None))
    assert (found.spot_usd_per_hour, found.num_zones, found.zone) == (12.5, 4, "")
    assert remarks == [
        "aws/us-east-2/z2 p5.48xlarge: spot price $2.0000 is far from the median $12.5000; not used"
    ]


def test_spot_above_on_demand_is_left_out_and_named_but_equal_is_kept() -> None:
    (found,), remarks = check_quotes(zones(56.0, 55.0))
    assert found.spot_usd_per_hour == 55.0
    assert remarks == [
        "aws/us-east-2/z0 p5.48xlarge: spot price $56.0000 is above on demand, $55.0000; left out"
    ]


@pytest.mark.parametrize("price", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_prices_are_left_out_and_named(price: float) -> None:
    only_spot = replace(QUOTE, on_demand_usd_per_hour=price)
    (found,), remarks = check_quotes([only_spot])
    assert (found.on_demand_usd_per_hour, found.spot_usd_per_hour) == (None, 12.0)
    assert "on-demand price" in remarks[0]
    assert check_quotes([replace(only_spot, spot_usd_per_hour=None)])[0] == []


def test_the_first_source_that_answers_is_used_and_the_silent_one_named() -> None:
    book = price_book([Source("the live one", None), Source("the other", [QUOTE])])
    assert (book.source, book.is_live, book.quotes) == ("the other", True, (QUOTE,))
    assert [error.problem for error in book.silent] == ["the live one cannot be reached"]
    with pytest.raises(ProviderError, match="a cannot be reached"):
        price_book([Source("a", None)])


def test_found_offers_are_cheapest_per_gpu_first() -> None:
    small = replace(QUOTE, instance_type="small", accelerator_count=1, spot_usd_per_hour=1.4)
    dear = replace(QUOTE, region="eu", spot_usd_per_hour=None)
    book = PriceBook((dear, QUOTE, small), "test", is_live=True)
    assert book.find(accelerator="h100") == (small, QUOTE, dear)
    assert book.find(count=8, infra="aws/us-east-2") == (QUOTE,)
    assert book.find(infra="aws/us-east") == ()


def test_a_gpu_is_a_name_with_or_without_a_number() -> None:
    assert parse_accelerator("H100") == ("H100", None)
    assert parse_accelerator("A100-80GB:8") == ("A100-80GB", 8)
    for wrong in ("", ":8", "H100:", "H100:x", "H100:0", "H100:-1", "H100:²"):
        with pytest.raises(ConfigError, match="names no GPU"):
            parse_accelerator(wrong)


def test_every_shipped_price_is_sound_and_has_a_source_and_a_day() -> None:
    quotes = ShippedTable().quotes()
    checked, remarks = check_quotes(quotes)
    assert len(checked) == len(quotes) >= 20
    assert [remark.split(":")[0] for remark in remarks] == ["aws/us-east-1 p4d.24xlarge"]  # its known outlier
    for quote in quotes:
        assert quote.on_demand_usd_per_hour is not None
        assert quote.spot_usd_per_hour is None or quote.spot_usd_per_hour <= quote.on_demand_usd_per_hour
        assert len(quote.as_of) == 10
        assert "catalogue" in quote.source


def test_shipped_prices_are_no_success_where_live_ones_were_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    done = CliRunner().invoke(app, ["prices", "--live", "--gpu", "H100", "--infra", "aws/us-east-2"])
    assert done.exit_code == 6
    assert "p5.48xlarge" in done.stdout
    assert done.stderr.count("no usable AWS credentials") == 1
    assert "no cloud answered" in done.stderr


def test_the_command_works_offline_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: object) -> None:
        raise AssertionError("prices asked the network")

    monkeypatch.setattr("socket.socket.connect", no_network)
    done = CliRunner().invoke(app, ["prices", "--gpu", "H100"])
    assert done.exit_code == 0, done.output
    rows = done.stdout.splitlines()
    assert rows[1].startswith("aws/us-east-2")
    assert "$11.56" in rows[1]
    assert "79%" in rows[1]
    assert "offline: the table shipped with rlboost, of 2026-11-20" in done.stderr
    data = json.loads(
        CliRunner().invoke(app, ["prices", "--gpu", "h100:8", "--infra", "aws", "--json"]).stdout
    )
    assert data["is_live"] is False
    assert [(o["region"], o["accelerator_count"]) for o in data["offers"]] == [
        ("us-east-2", 8),
        ("us-west-2", 8),
        ("us-east-1", 8),
    ]


@pytest.mark.parametrize("arguments", [["--gpu", "V100"], ["--infra", "azure"], ["--gpu", "H100:x"]])
def test_what_nobody_prices_exits_2_and_says_what_is_known(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, ["prices", *arguments])
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "hint:" in done.stderr
