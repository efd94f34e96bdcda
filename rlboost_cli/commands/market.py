"""Commands about prices, traces and simulation: no run is needed."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rlboost_cli.terminal.completion import AsJson


def prices(
    gpu: Annotated[
        str | None, typer.Option(help="Only this GPU, such as H100, or H100:8 per machine", metavar="GPU")
    ] = None,
    infra: Annotated[
        str | None,
        typer.Option(help="Only this cloud or region, such as aws or gcp/us-east4", metavar="CLOUD[/REGION]"),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Ask EC2 for current spot prices; takes a few seconds")
    ] = False,
    as_json: AsJson = False,
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
    if live and book.silent:  # a script must not take shipped prices for live ones
        raise book.silent[0]


class MicroBatches(StrEnum):
    """What the simulated trainer makes micro-batches of."""

    GROUPS = "groups"
    RESPONSES = "responses"


def simulate(
    job: Annotated[
        Path | None, typer.Argument(help="The job file", metavar="JOB", show_default=False)
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="A preset instead of a job: paper-8b, paper-14b or paper-32b", metavar="P"),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            help="A file or a name from `rlboost traces`; default: the job's own market, or generated-p3",
            metavar="F",
            show_default=False,
        ),
    ] = None,
    window: Annotated[
        str | None, typer.Option(help="Only these hours of the trace, such as 0:2", metavar="A:B")
    ] = None,
    sample: Annotated[float, typer.Option(help="Share of the trace's nodes, drawn by seed")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Seed of lengths, sample and generated trace")] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Simulate K seeds, from 0, and show intervals", metavar="K")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Only this policy; may be repeated", metavar="NAME")
    ] = None,
    micro_batches: Annotated[
        MicroBatches,
        typer.Option(help="The trainer takes whole groups, as in live runs, or single responses"),
    ] = MicroBatches.GROUPS,
    as_json: AsJson = False,
    plot: Annotated[
        Path | None, typer.Option(help="Write charts into this folder, as SVG and PNG", metavar="DIR")
    ] = None,
) -> None:
    """Replay a spot market under a virtual clock and compare policies

    Example: rlboost simulate --preset paper-14b --trace generated-p3 --window 0:2
    """
    from rlboost_cli.simulation import views as simulation_views
    from rlboost_cli.simulation.arguments import simulation_request
    from rlboost_cli.simulation.runs import run
    from rlboost_cli.terminal import output

    wanted = simulation_request(
        job=job,
        preset=preset,
        trace=trace,
        window=window,
        sample=sample,
        seed=seed,
        seeds=seeds,
        policies=policy or (),
        whole_groups=micro_batches is MicroBatches.GROUPS,
    )
    if plot is not None:
        from rlboost_cli.simulation.plots import needs_matplotlib

        needs_matplotlib()
    for note in wanted.notes:
        output.progress(f"note: {note}")
    with simulation_views.progress(wanted.num_runs) as done:
        comparison = run(wanted, done)
    if as_json:
        output.as_json(comparison.as_json())
    else:
        simulation_views.print_comparison(comparison)
    if plot is not None:
        from rlboost_cli.simulation.plots import draw

        for path in draw(comparison, plot):
            output.progress(f"wrote {path}")


class Action(StrEnum):
    """What to do with traces."""

    list = "list"
    show = "show"
    fetch = "fetch"


def traces(
    action: Annotated[Action, typer.Argument(help="What to do", metavar="list|show|fetch")] = Action.list,
    trace: Annotated[
        str | None,
        typer.Argument(help="A listed name, or (show) a file", metavar="TRACE", show_default=False),
    ] = None,
    origin: Annotated[
        str | None,
        typer.Option("--from", help="fetch: another URL of the same file", metavar="URL"),
    ] = None,
    seed: Annotated[int, typer.Option(help="show: seed of a generated trace")] = 0,
    window: Annotated[
        str | None, typer.Option(help="show: only these hours of it, such as 2:4", metavar="A:B")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="show: print its events as rows")] = False,
    as_json: AsJson = False,
) -> None:
    """List, show or fetch recorded spot markets to simulate on

    Example: rlboost traces show generated-p3
    """
    from rlboost_cli.simulation import trace_views
    from rlboost_cli.simulation.trace_views import trace_of
    from rlboost_cli.terminal import output
    from rlboost_runtime.errors import ConfigError
    from rlboost_runtime.run.folder import home
    from rlboost_runtime.traces import trace_rows

    cache = home() / "traces"
    if action is Action.list:
        if trace is not None:
            raise ConfigError(f"list takes no name, and `{trace}` was given", f"rlboost traces show {trace}")
        data = trace_views.known_traces(cache)
        output.as_json(data) if as_json else trace_views.print_known(data)
        return
    if trace is None:
        raise ConfigError(
            f"traces {action} needs a trace", f"rlboost traces {action} TRACE, as `list` has them"
        )
    if action is Action.fetch:
        path = trace_views.fetch(trace, cache, origin)
        output.as_json({"trace": trace, "path": str(path)}) if as_json else output.show(str(path))
        return
    found = trace_of(trace, window, seed)
    if as_csv:
        output.show("\n".join(trace_rows(found)))
    elif as_json:
        output.as_json(trace_views.described(found))
    else:
        output.show("\n".join(trace_views.description_lines(found)))
