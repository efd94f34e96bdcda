"""`rlboost audit`."""

from __future__ import annotations

from typing import Annotated

import typer

from rlboost_cli.terminal.completion import RunName


def audit(
    run: RunName,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False,
) -> None:
    """Check a run against what RLBoost promises, from its event log and token journal

    Example: rlboost audit quickstart --json
    """
    from rlboost_cli.runs.audit import audit_lines, audit_of
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
