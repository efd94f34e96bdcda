"""`rlboost traces`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Action(StrEnum):
    """What to do with traces."""

    list = "list"
    show = "show"
    fetch = "fetch"


def traces(
    action: Annotated[Action, typer.Argument(help="What to do", metavar="[list|show|fetch]")] = Action.list,
    trace: Annotated[
        str | None,
        typer.Argument(help="A listed name, or (show) a file", metavar="TRACE", show_default=False),
    ] = None,
    origin: Annotated[
        str | None,
        typer.Option("--from", help="fetch: the web address of the same file elsewhere", metavar="URL"),
    ] = None,
    seed: Annotated[int, typer.Option(help="show: seed of a generated trace")] = 0,
    window: Annotated[
        str | None, typer.Option(help="show: only these hours of it, such as 2:4", metavar="A:B")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="show: print its events as rows")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False,
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
