"""`rlboost simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def simulate(
    job: Annotated[
        Path | None, typer.Argument(help="The job file", metavar="[JOB]", show_default=False)
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="Instead of a job: paper-8b, paper-14b or paper-32b", metavar="P")
    ] = None,
    trace: Annotated[
        str, typer.Option(help="A file or a name from `rlboost traces`", metavar="F")
    ] = "generated-p3",
    window: Annotated[
        str | None, typer.Option(help="Only these hours of the trace, such as 0:2", metavar="A:B")
    ] = None,
    sample: Annotated[float, typer.Option(help="Share of the trace's nodes, drawn by seed")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Seed of lengths, sample and generated trace")] = None,
    seeds: Annotated[
        int | None, typer.Option(help="So many seeds from 0, with intervals", metavar="K")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Only this one; may be repeated", metavar="NAME")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Write pictures into this folder, as SVG and PNG", metavar="DIR")
    ] = None,
) -> None:
    """Replay a spot market under a virtual clock and compare policies

    Example: rlboost simulate --preset paper-14b --trace generated-p3 --window 0:2
    """
    from rlboost_cli.simulation import views as simulation_views
    from rlboost_cli.simulation.arguments import SimulationArguments
    from rlboost_cli.simulation.runs import run
    from rlboost_cli.terminal import output

    given = SimulationArguments(
        job=job,
        preset=preset,
        trace=trace,
        window=window,
        sample=sample,
        seed=seed,
        seeds=seeds,
        policies=tuple(policy or ()),
    )
    wanted = given.checked()
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
