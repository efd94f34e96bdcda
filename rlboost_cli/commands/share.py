"""Commands that show runs outside the terminal: `dashboard`, `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlboost_cli.terminal import completion
from rlboost_cli.terminal.completion import RunName


def dashboard(
    run: Annotated[
        str | None,
        typer.Argument(
            help="The run to open; without it, the list of all runs",
            metavar="RUN",
            show_default=False,
            autocompletion=completion.runs,
        ),
    ] = None,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 for any free one")
    ] = 7788,
    host: Annotated[
        str,
        typer.Option("--host", help="Address to listen on; others than this machine's own are plain HTTP"),
    ] = "127.0.0.1",
    is_opened: Annotated[bool, typer.Option("--open/--no-open", help="Open a browser")] = True,
    is_link: Annotated[
        bool, typer.Option("--link", help="Only print the address of the page that the run's head serves")
    ] = False,
) -> None:
    """Show runs in a browser: curves, machines, samples and the bill, live

    Example: rlboost dashboard quickstart
    """
    import webbrowser

    from rlboost_cli.dashboard.server import DashboardServer
    from rlboost_cli.terminal import output
    from rlboost_runtime.errors import ConfigError
    from rlboost_runtime.run.index import find_run

    name = None if run is None else find_run(run).name
    if is_link:
        from rlboost_cli.dashboard.head_page import head_page

        if run is None:
            raise ConfigError("--link is for one run", "name it: rlboost dashboard RUN --link")
        address, note = head_page(find_run(run))
        output.show(address)
        output.progress(note)
        return
    try:
        server = DashboardServer(host, port)
    except OSError as problem:
        raise ConfigError(
            f"the dashboard cannot listen on {host}:{port}: {problem.strerror or problem}",
            "choose another --port; 0 takes a free one",
        ) from None
    output.show(server.url(name))
    output.progress("serving until Ctrl-C; the address has a key in it: keep it to yourself")
    if is_opened:
        webbrowser.open(server.url(name))
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    finally:
        server.server_close()


def report(
    run: RunName,
    path: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The HTML file; RUN.html without it", show_default=False),
    ] = None,
    is_markdown: Annotated[bool, typer.Option("--md", help="Print a summary in Markdown instead")] = False,
) -> None:
    """Write a run's curves, machines, samples and bill into one HTML file

    Example: rlboost report quickstart -o quickstart.html
    """
    from rlboost_cli.dashboard.data import run_data
    from rlboost_cli.dashboard.page import frozen_page
    from rlboost_cli.runs.refresh import look_at
    from rlboost_cli.terminal import output
    from rlboost_runtime.errors import ConfigError
    from rlboost_runtime.run.folder import write_atomically
    from rlboost_runtime.run.index import find_run

    folder = find_run(run)
    look_at(folder, output.progress, ledger=True, logs=True)
    if is_markdown:
        from rlboost_cli.dashboard.summary import markdown

        output.show(markdown(run_data(folder)))
        return
    path = Path(f"{folder.name}.html") if path is None else path
    try:
        write_atomically(path, frozen_page(run_data(folder, has_samples=True)).encode(), mode=0o644)
    except OSError as problem:
        raise ConfigError(
            f"{path} cannot be written: {problem.strerror or problem}", "choose another --output"
        ) from None
    output.show(f"{path}")
