"""Commands that show runs and change nothing, such as `status`, `logs`, `metrics`, `cost` and `compare`."""

from __future__ import annotations

from typing import Annotated

import typer

from rlboost_cli.terminal import completion
from rlboost_cli.terminal.completion import AsJson, RunName


def status(
    run: Annotated[
        str | None,
        typer.Argument(
            help="The run; without it, all runs",
            metavar="RUN",
            show_default=False,
            autocompletion=completion.runs,
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Follow the run until it ends; all runs, until Ctrl-C")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show all runs, or one run in detail

    Example: rlboost status quickstart --watch
    """
    from rlboost_cli.runs.refresh import look_at_open
    from rlboost_cli.runs.run_status import run_status, runs_table, status_json
    from rlboost_cli.terminal import output, text
    from rlboost_cli.views import screens
    from rlboost_runtime.errors import ConfigError
    from rlboost_runtime.run.index import find_run

    if watch and as_json:
        raise ConfigError("--watch and --json were given", "leave one of them out")
    if watch and run is None:
        try:
            screens.watch_all(look_at_open)
        except KeyboardInterrupt:
            raise typer.Exit(0) from None
        return
    if run is None:
        with output.working("querying the heads of open runs"):
            look_at_open(output.progress)
        rows = runs_table()
        if as_json:
            output.as_json({"runs": rows})
        elif rows:
            output.show(text.runs_table(rows))
        else:
            output.progress("no runs yet; rlboost launch job.yaml starts one")
        return
    folder = find_run(run)
    if watch:
        from rlboost_cli.views.live import follow

        try:
            screens.follow(follow(folder))
        except KeyboardInterrupt:
            raise typer.Exit(0) from None
        return
    found = run_status(folder)
    if as_json:
        screens.staleness(found)
        output.as_json(status_json(folder, found))
    else:
        screens.status(found)
        if found.has_ended:
            screens.left(folder)


def logs(
    run: RunName,
    instance: Annotated[
        str | None,
        typer.Argument(
            help="An instance, a machine or a process of the head, such as coordinator",
            metavar="INSTANCE",
            show_default=False,
            autocompletion=completion.logs,
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow until the run ends")] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Last lines of each file; 0 for all")
    ] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="Print the raw JSON lines")] = False,
) -> None:
    """Show a run's logs, including those of ended machines

    Example: rlboost logs quickstart coordinator -f
    """
    import time

    from rlboost_cli.runs.files import Tail, log_files
    from rlboost_cli.runs.refresh import looking_at
    from rlboost_cli.terminal import output
    from rlboost_cli.views.log_lines import LogLines
    from rlboost_runtime.run.index import find_run, is_open

    folder = find_run(run)
    tail, merged = Tail(folder, instance, lines), LogLines(folder.logs)
    try:
        with looking_at(folder, output.progress, logs=True) as look:
            has_any = False
            while True:
                look()
                ended = not is_open(folder)  # before reading: what was written by then is shown
                parts = list(tail.read())
                if parts:
                    has_any = True
                    raw = [line for _, text in parts for line in text.splitlines()]
                    output.show("\n".join(raw if as_json else merged.of(parts)))
                if not follow or ended:
                    break
                time.sleep(0.25)
        if not has_any:
            is_empty = bool(log_files(folder, instance))
            what = f"run {run}" if instance is None else f"{instance} of run {run}"
            output.progress(f"{what} has logged nothing" if is_empty else f"run {run} has no logs yet")
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def samples(
    run: RunName,
    step: Annotated[
        int | None,
        typer.Option("--step", min=1, help="The step, counted from 1; default: the last", show_default=False),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Show a step's best, median and worst responses

    Example: rlboost samples quickstart --step 10
    """
    from rlboost_cli.runs.files import sample_lines, samples_of
    from rlboost_cli.runs.refresh import look_at
    from rlboost_cli.terminal import output
    from rlboost_runtime.run.index import find_run

    folder = find_run(run)
    look_at(folder, output.progress, logs=True)
    found = samples_of(folder, step)
    if json:
        output.as_json(found)
    else:
        output.show("\n".join(sample_lines(found)))


def metrics(
    run: RunName,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Metrics to show; default: the important ones",
            metavar="NAME...",
            show_default=False,
            autocompletion=completion.metrics,
        ),
    ] = None,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print a CSV table with a row per step")] = False,
) -> None:
    """Show a run's metrics, with a chart of each

    Example: rlboost metrics quickstart reward_mean entropy
    """
    from rlboost_cli.runs.metrics import history_of
    from rlboost_cli.runs.refresh import look_at
    from rlboost_cli.terminal import output
    from rlboost_cli.views import metrics as view
    from rlboost_cli.views import screens
    from rlboost_runtime.errors import ConfigError
    from rlboost_runtime.run.index import find_run

    if as_json and as_csv:
        raise ConfigError("both --json and --csv were given", "leave one of them out")
    folder = find_run(run)
    look_at(folder, output.progress, logs=True)
    history = history_of(folder)
    chosen = history.chosen(names or [], every=as_json or as_csv)
    if as_json:
        output.as_json(view.metrics_json(history, chosen))
    elif as_csv:
        output.show(view.metrics_csv(history, chosen))
    else:
        screens.metrics(history, chosen)


def cost(
    run: RunName,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print a CSV table of machines and steps")] = False,
) -> None:
    """Show what a run costs, on what, and what it would have cost on demand

    Example: rlboost cost quickstart --json
    """
    from msgspec import to_builtins

    from rlboost_cli.runs.refresh import look_at
    from rlboost_cli.terminal import output
    from rlboost_cli.views.cost import cost_csv, cost_lines
    from rlboost_runtime.billing.books import report_of
    from rlboost_runtime.errors import ConfigError
    from rlboost_runtime.run.index import find_run

    if as_json and as_csv:
        raise ConfigError("both --json and --csv were given", "leave one of them out")
    folder = find_run(run)
    look_at(folder, output.progress, ledger=True)
    with output.working("computing the cost"):
        report = report_of(folder)
    if as_json:
        output.as_json(to_builtins(report))
    elif as_csv:
        output.show(cost_csv(report))
    else:
        output.show("\n".join(cost_lines(report)))


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            help="Two or more runs", metavar="RUN RUN...", show_default=False, autocompletion=completion.runs
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Compare runs: changed job fields, and reward, speed and dollars at the same step

    Example: rlboost compare quickstart quickstart-2
    """
    from msgspec import to_builtins

    from rlboost_cli.runs.compare import compare_runs
    from rlboost_cli.runs.refresh import look_at
    from rlboost_cli.terminal import output
    from rlboost_cli.views.compare import compare_lines
    from rlboost_runtime.run.index import find_run

    folders = [find_run(run) for run in runs]
    for folder in folders:
        look_at(folder, output.progress, ledger=True, logs=True)
    found = compare_runs(folders)
    if as_json:
        output.as_json(to_builtins(found))
    else:
        output.show("\n".join(compare_lines(found)))


def audit(run: RunName, as_json: AsJson = False) -> None:
    """Verify a run's guarantees from its event log and token journal

    Example: rlboost audit quickstart --json
    """
    from rlboost_cli.evidence.audit import audit_lines, audit_of
    from rlboost_cli.terminal import output
    from rlboost_runtime.run.index import find_run

    folder = find_run(run)
    with output.working(f"reading the event log and the journal of {folder.name}"):
        found = audit_of(folder)
    if as_json:
        output.as_json(found)
    else:
        output.show("\n".join(audit_lines(found)))
    if not found["clean"]:
        raise typer.Exit(1)
