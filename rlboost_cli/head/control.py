"""Starting, steering and ending a run whose head is elsewhere: the commands are run there.

The head's run is an ordinary one, of the `rlboost` that is installed there; a command that fails there fails
here with the same error and exit code. Whatever is cut off can be repeated: each command looks first at what
is there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rlboost_cli.head.connection import Head, HeadRefused, HeadUnreachable, Say
from rlboost_cli.head.deployment import install, ship
from rlboost_cli.head.head_books import head_is_there, learn_intents, settle, take_report
from rlboost_cli.head.mirror import (
    close_mirror,
    fetch_results,
    forget_former_outcome,
    is_complete,
    is_former_outcome,
    open_mirror,
    refresh,
    refresh_and_close,
    was_started,
)
from rlboost_cli.head.renting import alone, ended_meanwhile, give_back, rate_of, rent
from rlboost_cli.terminal import output
from rlboost_cli.terminal.text import duration
from rlboost_providers.base.terminate import terminate_all
from rlboost_providers.registry import provider_for
from rlboost_runtime.billing.books import close_books
from rlboost_runtime.billing.launch_records import current_head_machine
from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.run.create import gather, stored_job
from rlboost_runtime.run.folder import RunFolder, read_json, write_json

TEARDOWN_S = 60.0
"""Longest wait for an ended run's processes, before what it leaves is fetched all the same."""
END_S = 900.0
"""Longest teardown of a run: a cloud that does not answer is retried for some minutes."""


def bring_up(run: RunFolder, say: Say) -> dict[str, Any]:
    """Bring the run to its head and start it there, or find it there; return its first status.

    An empty one where the run ended right after that: its outcome says why. Raises `HeadUnreachable`,
    `HeadRefused`, `CredentialsRejected`, `ConfigError`, and `RuntimeFault`, also where another command ended
    the run before it was started there.
    """
    job = stored_job(run)
    _require_open(run)
    trains = bool((read_json(run.wanted) or {}).get("train"))
    if job.trainer.is_bought:
        rent(run, say)
    bought = current_head_machine(run)
    with Head(run) as head:
        say(f"checking what {head.place.host} has")
        there, _ = head.ask("look", rental=None if bought is None else asdict(bought))
        environment: dict[str, str] = {}
        if not there["supervised"]:
            if not there["exists"] or there["ended"]:
                environment = gather(job)
            install(head, there, job, say)
            _require_open(run)  # that took minutes
            typed = _what_to_type(run, head, there, lambda: ship(head, job, say))
        else:
            typed = [run.name]
        say(f"starting {run.name} on {head.place.host}")
        options = ["launch", *typed, "--detach"] if trains else ["up", *typed]
        with _steering(run, say):
            _require_open(run)
            _start(run, head, [*options, "--yes"], environment)  # whoever typed here has been asked
        head.ask("keep", on=True)
        refresh(run, head, ledger=True)
    return dict(read_json(run.status) or {})


def _start(run: RunFolder, head: Head, options: list[str], environment: dict[str, str]) -> None:
    open_mirror(run)
    try:
        head.rlboost(*options, environment=environment)
    except HeadRefused:
        with contextlib.suppress(HeadUnreachable):
            if not head.ask("look")[0]["exists"]:
                run.mirror.unlink()  # its job was refused: nothing of it is lost with the head
        raise


def _what_to_type(
    run: RunFolder, head: Head, there: dict[str, Any], ship_job: Callable[[], str]
) -> list[str]:
    """Return the arguments with which the head's `rlboost` continues the run, or makes it. Raises
    `RuntimeFault` where it ended there and was not to be resumed after that."""
    if not there["exists"]:
        return [ship_job()]
    if there["ended"]:
        if not is_former_outcome(run, there["outcome"]):
            refresh(run, head, ledger=True)
            raise ended_meanwhile(run)
        ship_job()
        return [run.name, "--resume"]
    return [run.name]


def _steering(run: RunFolder, say: Say) -> contextlib.AbstractContextManager[bool]:
    """Keep other commands of this machine from starting the run on its head, or ending it, meanwhile."""
    return alone(run, ".steering", "starts or ends", say=say)


def _require_open(run: RunFolder) -> None:
    if run.outcome.exists():
        raise ended_meanwhile(run)


def preempt(run: RunFolder, instance: str | None, notice_s: float | None) -> str:
    """Take an instance away; return what the head prints. Raises like `bring_up`."""
    arguments = ["preempt", run.name, *([] if instance is None else [instance])]
    if notice_s is not None:
        arguments += ["--notice", f"{notice_s:g}"]
    with Head(run) as head:
        return head.rlboost(*arguments).out.strip()


def end_run(run: RunFolder, say: Say, *, keeps_model: bool = True) -> None:
    """End the run on its head, with all its machines, and fetch what it leaves. Raises `HeadUnreachable`
    where the head does not answer: nothing is known then of what runs there.

    `keeps_model`: False gives up model and checkpoints on a head that is bought.
    """
    if stored_job(run).trainer.is_bought:
        _end_bought(run, say, keeps_model)
    else:
        with _steering(run, say):
            _end_there(run, say)


def _note_not_started(run: RunFolder) -> None:
    """Note the end of a run that is not on its head: a command that is about to start it there reads it."""
    _note_stopped(
        run,
        "ended by `rlboost down` before it was started on its head",
        f"rlboost launch {run.name} --resume starts it",
    )


def _note_stopped(run: RunFolder, problem: str, remedy: str) -> None:
    if not run.outcome.exists():
        write_json(run.outcome, {"state": "stopped", "problem": problem, "remedy": remedy, "exit_code": 0})


def _end_bought(run: RunFolder, say: Say, keeps_model: bool) -> None:
    """End the run on its head, then the head. Where the head is gone, the machines that it launched are ended
    from here. A head on which the run was never started has launched nothing, and need not answer."""
    is_there = head_is_there(run)
    with _steering(run, say):
        if not was_started(run):
            _note_not_started(run)
        elif is_there:
            _end_there(run, say, keeps_model)
    if is_there:
        give_back(run, say)
    elif was_started(run):
        end_fleet(run, say)
    close_mirror(run)
    settle(run)


def end_fleet(run: RunFolder, say: Say) -> None:
    """End what the run's lost head has launched, as far as its clouds list it from here, and close the books.
    Raises what the clouds say, `RuntimeFault` naming what is left."""
    take_report(run, say)
    learn_intents(run)
    say(f"ending the machines of {run.name} that are left")
    ended = terminate_all(provider_for(stored_job(run), run), run.name, say=say)
    close_books(run, ended.views, "ended by rlboost down")
    close_mirror(run)


def _end_there(run: RunFolder, say: Say, keeps_model: bool = True) -> None:
    with Head(run) as head:
        try:
            there, _ = head.ask("look")
        except HeadUnreachable as silence:
            if is_complete(run):
                say(f"note: {silence.problem}; the run had ended")
                return
            raise HeadUnreachable(
                f"{silence.problem}; {run.name} and its machines may still be running there",
                f"type `rlboost down {run.name}` again once it answers; if it is lost for good, add"
                " --lost-head to terminate its machines from here",
            ) from silence
        if there["exists"]:
            say(f"ending {run.name} on {head.place.host}")
            head.rlboost("down", run.name, "--yes", seconds=END_S)
            head.ask("keep", on=False)
            forget_former_outcome(run)
            if stored_job(run).trainer.is_bought:
                _fetch_before_it_goes(run, head, say, keeps_model)
            else:
                refresh_and_close(run, head)
                _fetch_model_and_checkpoint(run, head, say)
        else:
            _note_not_started(run)
    if there["exists"] and not run.outcome.exists():
        raise RuntimeFault(
            f"{run.name} was ended on {head.place.host}, but has no outcome there",
            f"type `rlboost down {run.name}` again",
        )


def _fetch_before_it_goes(run: RunFolder, head: Head, say: Say, keeps_model: bool) -> None:
    """Fetch what the run leaves on a bought head that is about to end. Missing copies do not delay that:
    the head costs money. Raises `RuntimeFault` where the head has the only copy of the model."""
    is_refreshed = False
    try:
        refresh_and_close(run, head)
        is_refreshed = True
    except (HeadUnreachable, RuntimeFault) as silence:
        output.progress(f"note: {silence.problem}; costs and logs of {run.name} are as of the last fetch")
    try:
        if keeps_model:
            _fetch_model_and_checkpoint(run, head, say)
    except (HeadUnreachable, RuntimeFault) as failure:
        raise RuntimeFault(
            f"{failure.problem}; {run.name} has ended, but its model is still on its head, which costs money",
            f"correct that, then type `rlboost down {run.name}` again; `rlboost down {run.name} --lost-head`"
            " releases the head and gives up the model",
        ) from failure
    if not is_refreshed:
        _note_stopped(run, "ended by `rlboost down`", "its head could not report more, and was released")


def collect_results(run: RunFolder, say: Say) -> None:
    """Fetch the books of the ended run, its final model and newest checkpoint. A bought head is given back if
    `_goes_down`; otherwise a note is printed of how long it stays. Raises `HeadUnreachable`."""
    if run.head_machines.exists() and not head_is_there(run):
        settle(run)
        return
    with Head(run) as head:
        deadline = time.monotonic() + TEARDOWN_S
        refresh_and_close(run, head)
        while not is_complete(run) and time.monotonic() < deadline:
            say(f"waiting until {head.place.host} has stopped everything")
            time.sleep(1)
            refresh_and_close(run, head)
        _fetch_model_and_checkpoint(run, head, say)
    if not stored_job(run).trainer.is_bought:
        return
    if _goes_down(run):
        give_back(run, say)
        settle(run)
    else:
        output.progress(f"note: {_stay_in_words(run)}")


def _goes_down(run: RunFolder) -> bool:
    """Return True if the run's head is to end at once: everything of the run was fetched or is at its output,
    and the job does not keep the head for inspection, or nothing else would end it."""
    job, outcome = stored_job(run), read_json(run.outcome)
    if outcome is None or not is_complete(run):
        return False
    if outcome.get("state") == "done":
        return job.after.done == "down"
    return job.after.failed == "down" and not job.trainer.ends_itself


def _stay_in_words(run: RunFolder) -> str:
    job, bought = stored_job(run), current_head_machine(run)
    kind = job.after.done if (read_json(run.outcome) or {}).get("state") == "done" else job.after.failed
    price = "" if bought is None else f" at {rate_of(bought)}"
    until = (
        f"for {duration(job.after.idle_minutes * 60)}"
        if kind == "down" and job.trainer.ends_itself
        else "until you release it"
    )
    return (
        f"the head of {run.name} stays {until}{price}; rlboost launch {run.name} --resume continues there,"
        f" rlboost down {run.name} releases it"
    )


def _fetch_model_and_checkpoint(run: RunFolder, head: Head, say: Say) -> None:
    """Fetch the final model and the newest checkpoint, where the job has no `output` for them."""
    if stored_job(run).output is None:
        fetch_results(run, head, say)
