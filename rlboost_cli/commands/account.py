"""Commands about a cloud account: `acceptance`, `budget`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Seller(StrEnum):
    """Through what machines are bought."""

    DIRECT = "direct"
    SKYPILOT = "skypilot"


def acceptance(
    cloud: Annotated[
        str, typer.Argument(help="CLOUD or CLOUD/REGION, such as aws or gcp/us-central1", metavar="CLOUD")
    ],
    max_usd: Annotated[
        float, typer.Option("--max-usd", min=0.01, help="Stop before more than this is spent")
    ] = 5.0,
    via: Annotated[
        Seller | None,
        typer.Option(
            help="Buy through the cloud's own API or through SkyPilot; default: its own", metavar="V"
        ),
    ] = None,
    changes: Annotated[
        Path | None,
        typer.Option(
            "--with", help="YAML file with fields of the job to change, such as trainer.role", metavar="FILE"
        ),
    ] = None,
    output_stem: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Report, without suffix; default: acceptance-CLOUD", show_default=False
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation")] = False,
) -> None:
    """Try a cloud account with real machines, within a budget, and write a report

    Example: rlboost acceptance aws --max-usd 5
    """
    import time

    from rlboost_cli.acceptance.report import Report, Result, lines_of, versions
    from rlboost_cli.acceptance.runner import Runner, interruptible, left_over, trial_of
    from rlboost_cli.acceptance.trial_job import trial
    from rlboost_cli.terminal import output
    from rlboost_runtime.errors import ConfigError
    from rlboost_runtime.run.folder import home, locked

    made = trial(cloud, via, max_usd, changes)
    stem = output_stem or Path(made.job.name)
    with locked(home() / "acceptance" / f".{made.job.name}", waits=False) as is_alone:
        if not is_alone:
            raise ConfigError(f"another command is trying {cloud}", "wait until it has ended")
        former = left_over(made.job.name)
        if former is not None:
            output.progress(f"note: {former.name} was cut off; this command only ends what it left")
            made = trial_of(former, made)
        elif not yes and not output.is_terminal():
            raise ConfigError(f"this buys machines for up to ${max_usd:g}", "add --yes to agree")
        elif not yes and not output.confirm(
            f"buy {made.machines}, for up to ${made.usd_per_hour:.2f} per hour and ${max_usd:g} in all?"
        ):
            raise typer.Exit(0)
        trainer = made.job.trainer
        report = Report(trainer.infra, trainer.via, max_usd, time.time(), versions=versions())
        with output.working() as say, interruptible():
            runner = Runner(made, report, stem, say, lambda step: output.show("\n".join(lines_of(step))))
            runner.check() if former is None else runner.clean(former)
    failed = report.count(Result.FAILED)
    output.progress(f"\n{failed} failed; report in {stem}.md and {stem}.json, without secrets and addresses")
    raise typer.Exit(next((step.exit_code or 1 for step in report.steps if step.result is Result.FAILED), 0))


def budget(
    cloud: Annotated[str, typer.Argument(help="aws or gcp", metavar="CLOUD")],
    max_usd: Annotated[
        float | None, typer.Option("--max-usd", min=1.0, help="Dollars per month of all your machines")
    ] = None,
    email: Annotated[
        str | None, typer.Option("--email", help="AWS: where mail is sent", metavar="ADDRESS")
    ] = None,
    billing_account: Annotated[
        str | None, typer.Option("--billing-account", help="Google: ID of the billing account", metavar="ID")
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the alert")] = False,
) -> None:
    """Have a cloud send mail when your machines cost too much in a month

    Example: rlboost budget aws --max-usd 500 --email me@example.org
    """
    from rlboost_cli.terminal import output
    from rlboost_providers.base.tags import owner_of
    from rlboost_providers.registry import budget_alerts
    from rlboost_runtime.errors import ConfigError
    from rlboost_runtime.run.folder import home

    if (max_usd is None) != delete:
        raise ConfigError(
            "say what the budget is, or that it goes", "give --max-usd or --delete, one of them"
        )
    with output.working() as say:
        say(f"asking {cloud}")
        alerts = budget_alerts(cloud, email, billing_account)
        owner = owner_of(home())
        if max_usd is None:
            was_there = alerts.delete(owner)
        else:
            made = alerts.set(owner, max_usd)
    if max_usd is None:
        output.show("deleted the budget alert" if was_there else "there was no budget alert")
        return
    output.show(f"budget {made.name}: ${made.usd_per_month:,.2f} per month, for {made.counts}")
    output.show("mail is sent at 50, 80 and 100 %, and when 100 % is forecast; it stops no machine")
    for note in made.notes:
        output.progress(f"note: {note}")
