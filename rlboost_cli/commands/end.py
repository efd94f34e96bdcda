"""Commands that end an instance, a run or what is left over: `preempt`, `down`, `rm` and `gc`."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from rlboost_cli.terminal import completion
from rlboost_cli.terminal.completion import AsJson, RunName
from rlboost_cli.terminal.text import counted

if TYPE_CHECKING:
    from rlboost_cli.runs.sweep import Stray
    from rlboost_runtime.run.folder import RunFolder

_TRIES = 5


def preempt(
    run: Annotated[
        str,
        typer.Argument(
            help="The run", metavar="RUN", show_default=False, autocompletion=completion.open_runs
        ),
    ],
    instance: Annotated[
        str | None,
        typer.Argument(
            help="The instance; by default the spot instance with the most responses in flight",
            metavar="INSTANCE",
            show_default=False,
            autocompletion=completion.instances,
        ),
    ] = None,
    notice: Annotated[
        float | None,
        typer.Option("--notice", min=0.0, help="Seconds of warning; without it, at once", show_default=False),
    ] = None,
) -> None:
    """Preempt one instance, as its cloud would

    Example: rlboost preempt quickstart spot-2 --notice 5
    """
    from rlboost_cli.runs import client
    from rlboost_cli.terminal import output
    from rlboost_runtime.errors import NotFound
    from rlboost_runtime.run.index import find_run, is_open

    folder = find_run(run)
    if not is_open(folder):
        raise NotFound(
            f"run {run} has ended and has no instance {instance or 'any more'}",
            "rlboost status lists open runs",
        )
    if folder.head.exists():
        from rlboost_cli.head import control

        output.show(control.preempt(folder, instance, notice))
        return
    if instance is None:
        instance = _preempt_busiest(folder, notice)
    else:
        client.preempt(folder, instance, notice)
    output.show(f"preempting {instance}" + ("" if notice is None else f" in {notice:g} s"))


def _preempt_busiest(run: RunFolder, notice_s: float | None) -> str:
    """Take the spot machine that holds the most responses and return it. Raises `NotFound`.

    Machines go by themselves, too: where one is gone by the time it is to be taken, the next one is.
    """
    from rlboost_cli.runs import client
    from rlboost_runtime.errors import NotFound

    for _ in range(_TRIES):
        status = client.get_status(run)
        held: dict[str, int] = {}
        for row in status["machines"]:
            if row["pool"] == "spot" and row["state"] == "running":
                held[row["id"]] = 0
        for row in status["instances"]:
            if row["machine"] in held:
                held[row["machine"]] += int(row["in_flight"] or 0)
        if not held:
            break
        machine = max(held, key=lambda name: held[name])
        try:
            client.preempt(run, machine, notice_s)
        except NotFound:
            continue
        return machine
    raise NotFound(f"run {run.name} has no spot machine now", "wait for one; rlboost status shows them")


class Fault(StrEnum):
    """What `chaos` does; `rlboost_cli.evidence.chaos.FAULTS` has them at work."""

    COORDINATOR = "coordinator"
    TRAINER = "trainer"
    WEIGHTS = "weights"
    PROCESS = "process"
    PAUSE = "pause"
    PREEMPT = "preempt"
    NOTICE = "notice"


def chaos(
    run: Annotated[
        str,
        typer.Argument(
            help="The run", metavar="RUN", show_default=False, autocompletion=completion.open_runs
        ),
    ],
    seed: Annotated[int, typer.Option(help="Draws kinds and times of the faults")] = 0,
    minutes: Annotated[float, typer.Option(min=0.0, help="Stop making faults after M minutes")] = 15.0,
    every: Annotated[float, typer.Option(min=1.0, help="Seconds between two faults, on average")] = 15.0,
    only: Annotated[
        list[Fault] | None, typer.Option(help="Only this kind of fault; may be repeated", show_default=False)
    ] = None,
    faults: Annotated[
        int | None, typer.Option(min=1, help="Stop after N faults", metavar="N", show_default=False)
    ] = None,
    audit: Annotated[bool, typer.Option(help="Wait for the run's end, then audit it")] = True,
    yes_this_costs: Annotated[
        bool, typer.Option("--yes-this-costs", help="Also where machines are rented from a cloud")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Kill and pause parts of a run at random, then audit what it made

    Example: rlboost chaos quickstart --seed 7 --minutes 5
    """
    from rlboost_cli.evidence.chaos import FAULTS, make_faults, require_evidence, verdict, verdict_lines
    from rlboost_cli.terminal import output
    from rlboost_cli.views.live import follow
    from rlboost_cli.views.screens import costs_money
    from rlboost_runtime.errors import ConfigError
    from rlboost_runtime.run.index import find_run

    folder = find_run(run)
    require_evidence(folder)
    if costs_money(folder) and not yes_this_costs:
        raise ConfigError(
            f"{run} rents machines: for each that is preempted, another one is rented and starts up",
            f"rlboost chaos {run} --yes-this-costs does it nevertheless",
        )
    done = make_faults(
        folder,
        seed=seed,
        kinds=only or FAULTS,
        every_s=every,
        seconds=minutes * 60,
        most=faults,
        say=output.progress,
    )
    if audit:
        with output.working(f"waiting for {run} to end (Ctrl-C stops the wait, not the run)"):
            for _ in follow(folder):
                pass
        found = verdict(folder, done)
    else:
        found = {"run": run, "seed": seed, "faults": done.faults, "missed": done.missed}
    if as_json:
        output.as_json(found)
    elif audit:
        output.show("\n".join(verdict_lines(found)))
    if audit and not found["pass"]:
        raise typer.Exit(1)


def down(
    run: RunName,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation")] = False,
    lost_head: Annotated[
        bool,
        typer.Option("--lost-head", help="The head is lost for good: terminate its machines from here"),
    ] = False,
) -> None:
    """Stop a run, release its machines and show what it cost

    Example: rlboost down quickstart
    """
    from rlboost_cli.runs.teardown import end_run, end_without_head
    from rlboost_cli.terminal import output
    from rlboost_cli.views import screens
    from rlboost_cli.views.cost import cost_lines
    from rlboost_runtime.billing.books import report_of
    from rlboost_runtime.errors import ConfigError
    from rlboost_runtime.run.index import find_run, is_open

    folder = find_run(run)
    if lost_head and not folder.head.exists():
        raise ConfigError(f"the head of {run} is this machine", "leave --lost-head out")
    question = f"stop {run}? its checkpoints are kept" if not lost_head else f"stop {run} without its head?"
    if is_open(folder) and not yes and output.is_terminal() and not output.confirm(question):
        raise typer.Exit(0)
    with output.working() as say:
        ended = end_without_head(folder, say) if lost_head else end_run(folder, say)
        say(f"computing the cost of {run}")
        report = report_of(folder)
    screens.ending(folder, ended)
    output.show("\n".join(cost_lines(report)))


def rm(
    runs: Annotated[
        list[str],
        typer.Argument(help="The runs", metavar="RUN...", show_default=False, autocompletion=completion.runs),
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation")] = False,
) -> None:
    """Delete ended runs, with their checkpoints and logs

    Example: rlboost rm my-run my-run-2
    """
    from rlboost_cli.runs.removal import remove, require_removable
    from rlboost_cli.terminal import output
    from rlboost_runtime.errors import ConfigError
    from rlboost_runtime.run.index import find_run

    folders = [find_run(name) for name in dict.fromkeys(runs)]
    for folder in folders:
        require_removable(folder)
    names = ", ".join(folder.name for folder in folders)
    if not yes and not output.is_terminal():
        raise ConfigError(f"delete {names}? there is no terminal to confirm it on", "add --yes")
    if not yes and not output.confirm(f"delete {names} with all checkpoints and logs?"):
        raise typer.Exit(0)
    for folder in folders:
        remove(folder)
        output.progress(f"deleted {folder.name}")


def gc(
    cloud: Annotated[
        list[str] | None,
        typer.Option(help="Also ask this cloud, even if no run here uses it", metavar="CLOUD"),
    ] = None,
    all_owners: Annotated[
        bool, typer.Option("--all-owners", help="Also terminate machines that another RLBOOST_HOME started")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be terminated")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation")] = False,
    as_json: AsJson = False,
) -> None:
    """Find and terminate orphaned machines

    Example: rlboost gc --dry-run
    """
    from rlboost_cli.runs import sweep
    from rlboost_cli.terminal import output
    from rlboost_runtime.errors import ConfigError
    from rlboost_runtime.run import in_memory

    freed = 0 if dry_run else in_memory.sweep()
    if freed:
        output.progress(f"freed {freed / 1e9:.2f} GB of main memory that killed runs had left")
    with output.working() as say:
        found = sweep.look(say, cloud or ())
    wanted = [s for s in found.strays if (s.is_ours or all_owners) and not s.is_head_with_results]
    if as_json:
        output.as_json({"machines": [_plain(stray, stray in wanted) for stray in found.strays]})
    elif found.strays:
        rows = [(s.run, s.machine, s.provider, s.place, s.why) for s in found.strays]
        output.table(("run", "machine", "cloud", "place", "why"), rows)
    problems = list(dict.fromkeys(each.problem for each in found.silent))
    for problem in problems[1:]:  # the first is the error that the command ends with
        output.progress(f"note: a cloud did not answer: {problem}")
    for line in sweep.still_open() if found.silent else ():
        output.progress(f"note: may still cost money: {line}")
    if wanted and not (dry_run or yes or output.is_terminal()):
        raise ConfigError(
            f"{_question(wanted)} there is no terminal to confirm it on",
            "add --yes to terminate them, or --dry-run to only list them",
        )
    if wanted and not dry_run and (yes or output.confirm(_question(wanted))):
        with output.working() as say:
            left = sweep.end(wanted, say)
        output.progress(f"terminated {counted(len(wanted) - len(left), 'machine')}")
        if left:
            raise sweep.remaining(left)
    elif not found.strays and not found.silent:
        output.progress("no orphaned machines")
    if found.silent:
        raise found.silent[0]


def _question(strays: list[Stray]) -> str:
    return f"terminate {counted(len(strays), 'machine')}?"


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
