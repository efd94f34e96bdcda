"""Prices for a person: which ones were asked for, what they are, and how much they can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rlboost_cli.terminal.text import usd
from rlboost_providers.base.prices import PriceBook, Quote, parse_accelerator
from rlboost_runtime.errors import ConfigError

Json = dict[str, Any]  # one object as printed by --json

HEADERS = ("where", "machine", "GPUs", "spot/h", "demand/h", "per GPU", "saved")


def wanted(book: PriceBook, gpu: str | None, infra: str | None) -> tuple[Quote, ...]:
    """Return the quotes for `gpu` (`H100`, `H100:8`) at `infra`. Raises `ConfigError` where none are."""
    name, count = (None, None) if gpu is None else parse_accelerator(gpu)
    found = book.find(accelerator=name, count=count, infra=infra)
    if not found:
        asked = " ".join(word for word in (gpu or "any GPU", f"at {infra}" if infra else None) if word)
        places = sorted({f"{quote.cloud}/{quote.region}" for quote in book.quotes})
        raise ConfigError(
            f"{book.source} has no price of {asked}",
            f"it knows {', '.join(book.accelerators)} at {', '.join(places)}",
        )
    return found


def notes(book: PriceBook, quotes: Sequence[Quote]) -> list[str]:
    """Return what to say about where the prices are from, and what was wrong with some of those shown."""
    days = sorted({quote.as_of for quote in quotes})
    lines = [] if book.is_live else [_offline(book, days)]
    if book.is_live and (old := sorted({q.cloud for q in quotes if q.as_of != days[-1]})):
        lines.append(f"{', '.join(old)}: from the shipped table, of {days[0]}; only EC2 was asked")
    shown = {f"{quote.cloud}/{quote.region} {quote.instance_type}" for quote in quotes}
    return [*lines, *(remark for remark in book.remarks if any(each in remark for each in shown))]


def row(quote: Quote) -> tuple[object, ...]:
    """Return a quote under `HEADERS`; the price per GPU is that of spot where it is sold."""
    spot, on_demand = quote.spot_usd_per_hour, quote.on_demand_usd_per_hour
    return (
        quote.place,
        quote.instance_type,
        f"{quote.accelerator}:{quote.accelerator_count}",
        None if spot is None else usd(spot, 2),
        None if on_demand is None else usd(on_demand, 2),
        usd(quote.usd_per_gpu_hour, 2),
        _saved(quote),
    )


def as_json(book: PriceBook, quotes: Sequence[Quote]) -> Json:
    """Return the object that `--json` prints; prices in USD per machine-hour, null where not sold so."""
    return {
        "source": book.source,
        "is_live": book.is_live,
        "as_of": max(quote.as_of for quote in quotes),
        "offers": [{**asdict(quote), "usd_per_gpu_hour": quote.usd_per_gpu_hour} for quote in quotes],
        "remarks": [*(f"no answer: {error.problem}" for error in book.silent), *book.remarks],
    }


def _offline(book: PriceBook, days: Sequence[str]) -> str:
    asked = "answered" if book.silent else "was asked"
    return f"offline: {book.source}, of {days[0]}; no cloud {asked}, and prices change"


def _saved(quote: Quote) -> str | None:
    if quote.spot_usd_per_hour is None or quote.on_demand_usd_per_hour is None:
        return None
    return f"{1 - quote.spot_usd_per_hour / quote.on_demand_usd_per_hour:.0%}"
