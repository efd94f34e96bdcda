"""`rlboost prices`."""

from __future__ import annotations

from typing import Annotated

import typer


def prices(
    gpu: Annotated[
        str | None, typer.Option(help="Only this GPU, such as H100, or H100:8 per machine", metavar="GPU")
    ] = None,
    infra: Annotated[
        str | None, typer.Option(help="Only there, such as aws or gcp/us-east4", metavar="CLOUD[/REGION]")
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Ask EC2 what spot machines cost now; takes some seconds")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False,
) -> None:
    """Show what GPU machines cost, spot and on demand, cheapest first

    Example: rlboost prices --gpu H100
    """
    from rlboost_cli.terminal import output
    from rlboost_cli.views import prices as price_views
    from rlboost_providers.base.prices import ShippedTable, price_book

    if live:
        from rlboost_providers.aws.prices import LivePrices

        with output.working("asking EC2 for its spot prices"):
            book = price_book([LivePrices(infra), ShippedTable()])
    else:
        book = price_book([ShippedTable()])
    quotes = price_views.wanted(book, gpu, infra)
    for note in price_views.notes(book, quotes):
        output.progress(f"note: {note}")
    if as_json:
        output.as_json(price_views.as_json(book, quotes))
    else:
        output.table(price_views.HEADERS, [price_views.row(quote) for quote in quotes])
