"""`rlboost gc`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rlboost_cli.terminal.text import counted

if TYPE_CHECKING:
    from rlboost_cli.runs.sweep import Stray


def gc(
    cloud: Annotated[
        list[str] | None,
        typer.Option(
            help="Ask this cloud too, though no job here names it: aws, gcp or skypilot", metavar="CLOUD"
        ),
    ] = None,
    all_owners: Annotated[
        bool, typer.Option("--all-owners", help="End machines that another RLBOOST_HOME started, too")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be ended")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False,
) -> None:
    """Find and end machines that no open run owns

    Example: rlboost gc --dry-run
    """
    from rlboost_cli.runs import sweep
    from rlboost_cli.terminal import output
    from rlboost_runtime.errors import ConfigError

    with output.working() as say:
        found = sweep.look(say, cloud or ())
    wanted = [s for s in found.strays if (s.is_ours or all_owners) and not s.is_head_with_results]
    if as_json:
        output.as_json({"machines": [_plain(stray, stray in wanted) for stray in found.strays]})
    elif found.strays:
        rows = [(s.run, s.machine, s.provider, s.place, s.why) for s in found.strays]
        output.table(("run", "machine", "cloud", "place", "why"), rows)
    for problem in found.silent:
        output.progress(f"note: not everything could be asked: {problem.problem}")
    if wanted and not (dry_run or yes or output.is_terminal()):
        raise ConfigError(
            f"{_question(wanted)} nobody is here to be asked", "add --yes to end them, --dry-run to look only"
        )
    if wanted and not dry_run and (yes or output.confirm(_question(wanted))):
        with output.working() as say:
            problems = sweep.end(wanted, say)
        output.progress(f"ended {counted(len(wanted) - len(problems), 'machine')}")
        if problems:
            raise sweep.remaining(problems)
    elif not found.strays and not found.silent:
        output.progress("no machine is left over")
    if found.silent:
        raise found.silent[0]


def _question(strays: list[Stray]) -> str:
    return f"end {counted(len(strays), 'machine')}?"


def _plain(stray: Stray, is_wanted: bool) -> dict[str, object]:
    return {
        "run": stray.run,
        "machine": stray.machine,
        "provider": stray.provider,
        "place": stray.place,
        "started_at": stray.started_at,
        "why": stray.why,
        "to_end": is_wanted,
    }
