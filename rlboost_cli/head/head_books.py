"""Closing the books of a bought head that is silent or whose run has ended, and its cost to its end.

Guarantee: once the cloud reports a run's head gone, the run has an outcome and its books end with that
machine: nothing else can write either any more.

The launches that a lost head had begun are entered here from the last mirror and from the job's output.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace

from rlboost_cli.head.connection import Say
from rlboost_cli.head.mirror import close_mirror, former_end_ns, is_complete, was_started
from rlboost_cli.head.renting import alone, is_gone, note_end, view_of
from rlboost_providers.registry import head_provider
from rlboost_runtime.billing.launch_records import (
    HeadMachine,
    LaunchBackup,
    LaunchRecords,
    MachineRecord,
    current_head_machine,
    keep_head_machine,
    kept_head_machines,
)
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.run.create import stored_job
from rlboost_runtime.run.folder import RunFolder, read_json, write_atomically, write_json
from rlboost_runtime.run.reserved import RESERVED_MACHINE

_LEAST_STAY_S = 180.0
"""Longest time from the end of a run, all of which is safe, until its head is off: copies, 30 s, shutdown."""


def head_is_there(run: RunFolder) -> bool:
    """Return True if the cloud still has the run's head; the end of one that is gone is recorded. While
    another command launches or ends the head it counts as there: that command records it.

    Raises `ProviderError`, `CredentialsRejected` if the cloud cannot be reached.
    """
    with alone(run, waits=False) as is_alone:
        if not is_alone:
            return True
        head = current_head_machine(run)
        if head is None or head.ended_at is not None:
            return False
        view = view_of(head_provider(stored_job(run), run), run, head)
        if is_gone(head, view):
            note_end(run, head, view)
            return False
        return True


def find_out(run: RunFolder, say: Say) -> None:
    """Record the end and the cost of a run whose bought head is gone; of a head that is there, its cost
    beyond its run. Raises like `head_is_there`."""
    head = current_head_machine(run)
    if head is None:
        return
    if head_is_there(run):
        if is_complete(run):
            with closing(Ledger(run.ledger)) as ledger:
                ledger.prolonged(RESERVED_MACHINE, time.time())
        return
    if not was_started(run) and not run.outcome.exists():
        return  # it never came to a run: the next `up` rents another
    if not is_complete(run):
        take_report(run, say)
        if not run.outcome.exists():
            _note_lost(run)
        close_mirror(run)
    _bound_end(run)
    settle(run)


def take_report(run: RunFolder, say: Say) -> None:
    """Fetch the report that the head left at the job's output when its run ended, if there is one; not one
    from before the run was resumed."""
    output = stored_job(run).output
    if output is not None and not is_complete(run):
        try:
            from rlboost_runtime.trainer.artifacts.report import take_report as fetch_report
        except ImportError as missing:
            raise ConfigError(
                f"reading {output} needs obstore, which is not installed", "type: pip install 'rlboost[aws]'"
            ) from missing
        say(f"looking for the outcome of {run.name} at {output}")
        fetch_report(run, output, former_end_ns(run))


def _bound_end(run: RunFolder) -> None:
    """If the cloud did not report when the head ended, bill it to its latest possible end: it ends itself in
    time, however much later the end is noticed."""
    head, outcome, after = current_head_machine(run), read_json(run.outcome) or {}, stored_job(run).after
    kind = after.done if outcome.get("state") == "done" else after.failed
    if head is None or head.ended_at is None or not head.is_end_guessed or kind == "stay":
        return
    if not stored_job(run).trainer.ends_itself:
        return
    end = _end_of_run(run)
    if end is None:
        return
    latest = end + max(after.idle_minutes * 60, _LEAST_STAY_S)
    if latest < head.ended_at:
        keep_head_machine(run, replace(head, ended_at=latest))


def _end_of_run(run: RunFolder) -> float | None:
    """Return when the head's part in the run ended, by its own books."""
    with closing(Ledger(run.ledger)) as ledger:
        bills = ledger.machines(time.time())
    return next((bill.ended_at for bill in bills if bill.machine == RESERVED_MACHINE), None)


def settle(run: RunFolder) -> None:
    """Bring the books here up to the end of every machine that was rented for the run's head."""
    heads = [each for each in kept_head_machines(run) if each.launched_at is not None]
    if not heads or heads[-1].ended_at is None:
        return
    with closing(Ledger(run.ledger)) as ledger:
        for head in heads[:-1]:
            _enter(ledger, head.machine, head)
        _enter(ledger, RESERVED_MACHINE, heads[-1])
        ledger.prolonged(RESERVED_MACHINE, heads[-1].ended_at)


def _enter(ledger: Ledger, name: str, head: HeadMachine) -> None:
    """Enter a machine into the books from its launch to its end; what they have already holds."""
    assert head.launched_at is not None
    ledger.intend(replace(head, machine=name))
    if name in ledger.unbilled_machines():
        ledger.launched(name, head.launched_at)
    if head.ended_at is not None and name in ledger.open_machines():
        ledger.ended(name, head.ended_at, head.detail)


def _note_lost(run: RunFolder) -> None:
    head = current_head_machine(run)
    where = "" if head is None else f", {head.machine} in {head.zone},"
    write_json(
        run.outcome,
        {
            "state": "failed",
            "problem": f"the head of {run.name}{where} is gone, with everything on its disk, and the outcome"
            " of the run is unknown",
            "remedy": f"rlboost down {run.name} terminates what it may have launched and closes its books;"
            " copies are at the job's output, if it has one",
            "exit_code": 1,
        },
    )


def learn_intents(run: RunFolder) -> None:
    """Enter into the books here every machine that the run's head was about to launch, with its offer.

    Their clouds report which of them exist, and since when. Calling it again changes nothing.
    """
    path = run.cloud / "bought.json"
    copy = LaunchBackup(run, stored_job(run).output).read()
    if copy is not None and (not path.exists() or len(copy) > path.stat().st_size):  # it only grows
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomically(path, copy)
    offers = LaunchRecords(path).offers()
    if not offers:
        return
    with closing(Ledger(run.ledger)) as ledger:
        for machine, offer in offers.items():
            ledger.intend(MachineRecord.of(machine, offer, time.time()))
