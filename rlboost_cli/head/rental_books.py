"""What becomes known here of a bought head that is silent or whose run has ended, and what it cost to its
end.

Guarantee: once the cloud says that a run's head is gone, the run has an outcome and its books end with that
machine: nobody else can write either any more.

What a lost head had begun to launch, for the books here: as last mirrored, and as at the job's output.
"""

from __future__ import annotations

import time
from dataclasses import replace

from rlboost_cli.head.connection import Say
from rlboost_cli.head.mirror import close_mirror, former_end_ns, is_complete, was_started
from rlboost_cli.head.renting import alone, is_gone, note_end, view_of
from rlboost_providers.registry import head_provider
from rlboost_runtime.billing.launch_records import (
    HeadMachine,
    LaunchBackup,
    LaunchRecords,
    current_rental,
    keep_rental,
    kept_rentals,
)
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.billing.machine_record import MachineRecord
from rlboost_runtime.deploy.bootstrap import RESERVED_MACHINE
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.run.create import stored_job
from rlboost_runtime.run.folder import RunFolder, read_json, write_atomically, write_json

_LEAST_STAY_S = 180.0
"""Longest time from the end of a run, all of which is safe, until its head is off: copies, 30 s, shutdown."""


def head_is_there(run: RunFolder) -> bool:
    """Whether the cloud still has the run's head; what it says of a machine that is gone is noted. While
    another command launches or ends the head it counts as there: what that one notes holds.

    Raises `ProviderError`, `CredentialsRejected` where it cannot be asked.
    """
    with alone(run, waits=False) as is_alone:
        if not is_alone:
            return True
        rental = current_rental(run)
        if rental is None or rental.ended_at is not None:
            return False
        view = view_of(head_provider(stored_job(run), run), run, rental)
        if is_gone(rental, view):
            note_end(run, rental, view)
            return False
        return True


def find_out(run: RunFolder, say: Say) -> None:
    """Note the end of a run whose bought head is gone, and what it cost; of one that is there, what it has
    cost beyond its run.

    Raises like `head_is_there`.
    """
    rental = current_rental(run)
    if rental is None:
        return
    if head_is_there(run):
        if is_complete(run):
            _prolong(run, time.time())
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
    """Fetch what the head has put at the job's output of its ended run, where there is something; not what it
    has put there before the run was resumed."""
    output = stored_job(run).output
    if output is not None and not is_complete(run):
        try:
            from rlboost_runtime.trainer.artifacts.report import take_report as fetch_report
        except ImportError as missing:
            raise ConfigError(
                f"reading {output} needs obstore, which is not installed", "type: pip install 'rlboost[aws]'"
            ) from missing
        say(f"looking at {output} for how {run.name} ended")
        fetch_report(run, output, former_end_ns(run))


def _bound_end(run: RunFolder) -> None:
    """Where the cloud did not say when the head ended, count it no longer than it can have been there: it
    ends itself in time, whoever looks how much later."""
    rental, outcome, after = current_rental(run), read_json(run.outcome) or {}, stored_job(run).after
    kind = after.done if outcome.get("state") == "done" else after.failed
    if rental is None or rental.ended_at is None or not rental.is_end_guessed or kind == "stay":
        return
    if not stored_job(run).trainer.ends_itself:
        return
    end = _end_of_run(run)
    if end is None:
        return
    latest = end + max(after.idle_minutes * 60, _LEAST_STAY_S)
    if latest < rental.ended_at:
        keep_rental(run, replace(rental, ended_at=latest))


def _end_of_run(run: RunFolder) -> float | None:
    """Return when the head's part in the run ended, by its own books."""
    ledger = Ledger(run.ledger)
    try:
        bills = ledger.machines(time.time())
    finally:
        ledger.close()
    return next((bill.ended_at for bill in bills if bill.machine == RESERVED_MACHINE), None)


def settle(run: RunFolder) -> None:
    """Bring the books here up to the end of every machine that was rented for the run's head."""
    rentals = [each for each in kept_rentals(run) if each.launched_at is not None]
    if not rentals or rentals[-1].ended_at is None:
        return
    ledger = Ledger(run.ledger)
    try:
        for rental in rentals[:-1]:
            _enter(ledger, rental.machine, rental)
        _enter(ledger, RESERVED_MACHINE, rentals[-1])
        ledger.prolonged(RESERVED_MACHINE, rentals[-1].ended_at)
    finally:
        ledger.close()


def _prolong(run: RunFolder, until: float) -> None:
    ledger = Ledger(run.ledger)
    try:
        ledger.prolonged(RESERVED_MACHINE, until)
    finally:
        ledger.close()


def _enter(ledger: Ledger, name: str, rental: HeadMachine) -> None:
    """Have a machine in the books from its launch to its end; what they say already holds."""
    assert rental.launched_at is not None
    ledger.intend(replace(rental, machine=name))
    if name in ledger.unbilled_machines():
        ledger.launched(name, rental.launched_at)
    if rental.ended_at is not None and name in ledger.open_machines():
        ledger.ended(name, rental.ended_at, rental.detail)


def _note_lost(run: RunFolder) -> None:
    rental = current_rental(run)
    where = "" if rental is None else f", {rental.machine} in {rental.zone},"
    write_json(
        run.outcome,
        {
            "state": "failed",
            "problem": f"the head of {run.name}{where} is gone before it was heard how the run ended, and"
            " with it what was on its disk",
            "remedy": f"rlboost down {run.name} ends what it may have launched and closes its books; copies"
            " are at the job's output, where it has one",
            "exit_code": 1,
        },
    )


def learn_intents(run: RunFolder) -> None:
    """Enter into the books here every machine that the run's head was about to launch, and what for.

    Which of them there are, and since when, their clouds say. Doing it again changes nothing.
    """
    path = run.cloud / "bought.json"
    copy = LaunchBackup.of(run, stored_job(run)).read()
    if copy is not None and (not path.exists() or len(copy) > path.stat().st_size):  # it only grows
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomically(path, copy)
    offers = LaunchRecords(path).offers()
    if not offers:
        return
    ledger = Ledger(run.ledger)
    try:
        for machine, offer in offers.items():
            ledger.intend(MachineRecord.of(machine, offer, time.time()))
    finally:
        ledger.close()
