"""A head that is bought: one machine on demand, rented when a run is brought up and given back at its end.

Guarantees: a machine is noted in the run's folder before its cloud is asked for it; a run has one at a time,
however often it is brought up, and also where two commands do it at once; every wait has a deadline; a
machine that never answers is given back, and what its console says is told; what is given back is gone by
its cloud's own word.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import IO

from rlboost_cli.head.connection import Head, HeadUnreachable, Say
from rlboost_cli.head.mirror import was_started
from rlboost_cli.head.start_up import ACCOUNT, head_script, host_key, last_words, own_key
from rlboost_providers.base.provider import LaunchRequest, MachineStatus, MachineView, Offer, Provider
from rlboost_providers.base.tags import head_of
from rlboost_providers.registry import head_provider
from rlboost_runtime.billing.launch_records import HeadMachine, current_rental, keep_rental, kept_rentals
from rlboost_runtime.errors import (
    ConfigError,
    CredentialsRejected,
    NoCapacity,
    ProviderError,
    QuotaExceeded,
    Retry,
    RLBoostError,
    RuntimeFault,
)
from rlboost_runtime.job import Job
from rlboost_runtime.money import format_usd
from rlboost_runtime.run.create import stored_job
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.run.head import change_place, kept_place

BOOT_S = 600.0
"""Longest wait from the launch until the machine lets us in."""
GONE_S = 180.0
"""Longest wait until a cloud says that a machine is gone that it was told to end."""
LISTED_S = 120.0
"""A machine younger than this is there though its cloud does not list it: EC2's lists lag behind."""
_LOOK_S = 2.0
_JUST_NOW_S = 5.0
"""An end younger than this is one that was just seen: EC2 does not tell when a machine shut itself down."""


def rent(run: RunFolder, say: Say) -> None:
    """Have a machine for the run's head that lets us in: the one that is there, or a new one.

    Raises `NoCapacity`, `QuotaExceeded`, `CredentialsRejected`, `ConfigError`, and `RuntimeFault` where it
    does not answer in time, or where the run's head is gone, and what was on it. Whatever is raised while it
    boots, it is given back before; not one on which the run was started.
    """
    job = stored_job(run)
    provider = head_provider(job, run)
    offers = _offers(job, provider, say)
    refusal: NoCapacity | QuotaExceeded | None = None
    while True:
        with alone(run, say=say):
            if run.outcome.exists():
                raise ended_meanwhile(run)
            rental = _there(run, provider) or _launch(run, job, provider, offers, refusal, say)
        try:
            refusal = _await_it(run, job, provider, rental, say)
        except RLBoostError as failure:
            if was_started(run):
                raise  # it may go on there, out of our reach alone
            try:
                give_back(run, say)
            except ProviderError as silence:
                raise RuntimeFault(
                    f"{failure.problem}; {rental.machine} of {run.name} in {rental.zone} could not be given"
                    f" back and costs money: {silence.problem}",
                    f"type `rlboost down {run.name}`, which ends it",
                ) from failure
            raise
        if refusal is None:
            return


def give_back(run: RunFolder, say: Say) -> None:
    """End the machine of the run's head, and see it gone; nothing to do where there is none.

    Raises `ProviderError` where its cloud cannot be asked, `RuntimeFault` where it stays.
    """
    with alone(run, say=say):
        rental = current_rental(run)
        if rental is None or rental.ended_at is not None:
            return
        provider, key = head_provider(stored_job(run), run), head_of(run.name)
        say(f"giving {rental.machine} of {run.name} back to {rental.zone}")
        deadline, is_asked = time.monotonic() + GONE_S, False
        while True:
            view = view_of(provider, run, rental)
            if is_gone(rental, view) or (view is None and is_asked):
                note_end(run, rental, view, ended_now=is_asked)
                return
            if time.monotonic() > deadline:
                raise RuntimeFault(
                    f"{rental.machine} of {run.name} in {rental.zone} is still there {GONE_S:.0f} s after it"
                    " was to end, and costs money",
                    f"type `rlboost down {run.name}` again, or end it in the cloud's own console",
                )
            if view is None:
                say(f"waiting until {rental.zone} lists {rental.machine} of {run.name}, if it was launched")
            else:
                provider.terminate(key, rental.machine)
                is_asked = True
            time.sleep(_LOOK_S)


def view_of(provider: Provider, run: RunFolder, rental: HeadMachine) -> MachineView | None:
    """Return what the cloud says of a machine; None: it knows of none. Raises `ProviderError`."""
    views = provider.describe(head_of(run.name))
    return next((view for view in views if view.machine == rental.machine), None)


def is_gone(rental: HeadMachine, view: MachineView | None) -> bool:
    """Whether a machine of which its cloud says so much is gone."""
    if view is not None:
        return view.state is MachineStatus.GONE
    asked_at = rental.intended_at if rental.launched_at is None else rental.launched_at
    return time.time() - asked_at >= LISTED_S


@contextlib.contextmanager
def alone(
    run: RunFolder,
    name: str = ".renting",
    what: str = "launches or ends the head of",
    *,
    waits: bool = True,
    say: Say = lambda words: None,
) -> Iterator[bool]:
    """Keep other commands of this machine from launching or ending the run's head meanwhile, and from noting
    that it ended; by another `name`, from what that stands for. Yields whether it is so; not where another
    does that now and we do not wait."""
    with (run.processes / name).open("w") as lock:
        is_alone = _locks(lock, fcntl.LOCK_NB)
        if not is_alone and waits:
            say(f"waiting for another command, which {what} {run.name}")
            is_alone = _locks(lock, 0)
        yield is_alone


def _locks(lock: IO[str], how: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | how)
    except BlockingIOError:
        return False
    return True


def note_end(
    run: RunFolder, rental: HeadMachine, view: MachineView | None, *, ended_now: bool = False
) -> HeadMachine:
    """Note that a machine is gone, since when its cloud says, and return it. To be called `alone`, with the
    rental as it is kept.

    `ended_now`: we have just ended it. Else a cloud that only says that it is gone leaves the time open.
    """
    seen_at = time.time()
    ended_at = seen_at if view is None or view.ended_at is None else view.ended_at
    is_guessed = not ended_now and seen_at - ended_at < _JUST_NOW_S
    started_at = rental.launched_at
    if view is not None and (started_at is None or (view.started_at is None and not was_started(run))):
        started_at = view.started_at  # none: its cloud never gave it, whatever was heard at its launch
    ended = replace(
        rental,
        launched_at=started_at,
        ended_at=ended_at,
        is_end_guessed=is_guessed,
        detail=view.detail if view else "",
    )
    keep_rental(run, ended)
    return ended


def require_head(run: RunFolder) -> None:
    """Raise `RuntimeFault` where the head of a run that is to go on is known to be gone."""
    rental = current_rental(run)
    if rental is not None and rental.ended_at is not None and was_started(run):
        raise _lost(run, rental)


def ended_meanwhile(run: RunFolder) -> RuntimeFault:
    """Return what is raised where another command has ended a run that is being brought up."""
    return RuntimeFault(f"{run.name} was ended meanwhile", f"rlboost launch {run.name} --resume goes on")


def rate_of(rental: HeadMachine) -> str:
    """Return what an hour of it costs, in words."""
    return f"{format_usd(rental.price_micro_usd_per_hour, 4)} per hour"


# --- renting ------------------------------------------------------------------------------------------------


def _there(run: RunFolder, provider: Provider) -> HeadMachine | None:
    """Return the machine that the run has, as far as its cloud knows it; None: one is to be launched."""
    rental = current_rental(run)
    if rental is None or rental.ended_at is not None:
        return None
    view = view_of(provider, run, rental)
    if view is not None and view.state is not MachineStatus.GONE:
        return _noted(run, rental, view)
    if rental.launched_at is None and view is None:
        return None  # it is asked for again: whoever did so before may not have come to it
    if not is_gone(rental, view):
        return rental
    note_end(run, rental, view)
    if was_started(run):
        raise _lost(run, rental)
    return None


def _offers(job: Job, provider: Provider, say: Say) -> Iterator[Offer]:
    """Yield what there is to rent; asked for at the first."""
    if job.trainer.via == "skypilot":
        say("asking SkyPilot where there is such a machine; its first start takes a minute or two")
    yield from provider.offers()


def _launch(
    run: RunFolder,
    job: Job,
    provider: Provider,
    offers: Iterator[Offer],
    refusal: NoCapacity | QuotaExceeded | None,
    say: Say,
) -> HeadMachine:
    """Launch the first of the `offers` left that its cloud gives; `refusal`: what was said of the one before
    them."""
    require_head(run)
    _require_ssh()
    script, told_run = head_script(run, job), head_of(run.name)
    for offer in offers:
        rental = _intent(_next_machine(run), offer, job)
        keep_rental(run, rental)
        say(f"renting {offer.accelerator} in {offer.zone} for the head, at {rate_of(rental)}")
        try:
            view = provider.launch(LaunchRequest(told_run, rental.machine, offer, {}, script))
        except (NoCapacity, QuotaExceeded) as error:
            refusal = error
            keep_rental(run, replace(rental, ended_at=time.time(), detail=error.problem))
            continue
        return _noted(run, rental, view)
    if refusal is not None:
        raise refusal
    raise NoCapacity(
        f"{job.trainer.accelerators} is not sold in {job.trainer.infra}"
        if job.trainer.max_price_usd_per_hour is None
        else f"{job.trainer.accelerators} in {job.trainer.infra} costs more than"
        f" trainer.max_price_usd_per_hour, ${job.trainer.max_price_usd_per_hour}",
        "write another region, or another bound; rlboost prices shows what there is",
    )


def _require_ssh() -> None:
    if importlib.util.find_spec("paramiko") is None:
        raise ConfigError(
            "a head elsewhere is reached with paramiko, which is not installed",
            "type: pip install 'rlboost[ssh]'",
        )


def _next_machine(run: RunFolder) -> str:
    """Return the id of a machine that is intended and was never launched, or else of another."""
    last = current_rental(run)
    if last is not None and last.ended_at is None:
        return last.machine
    return f"head-{len(kept_rentals(run)) + 1}"


def _intent(machine: str, offer: Offer, job: Job) -> HeadMachine:
    return HeadMachine(
        machine=machine,
        provider=offer.provider,
        zone=offer.zone,
        accelerator=offer.accelerator,
        price_micro_usd_per_hour=offer.most_micro_usd_per_hour,
        price_source=offer.source,
        storage_micro_usd_per_hour=offer.storage_micro_usd_per_hour,
        intended_at=time.time(),
        stays_s=job.after.idle_minutes * 60 if job.after.failed == "down" else 0.0,
    )


def _noted(run: RunFolder, rental: HeadMachine, view: MachineView) -> HeadMachine:
    started_at = rental.launched_at if view.started_at is None else view.started_at
    found = replace(
        rental,
        zone=view.zone or rental.zone,
        launched_at=time.time() if started_at is None else started_at,
    )
    keep_rental(run, found)
    return found


# --- waiting ------------------------------------------------------------------------------------------------


def _await_it(
    run: RunFolder, job: Job, provider: Provider, rental: HeadMachine, say: Say
) -> NoCapacity | None:
    """Wait until the machine lets us in under the host key that it was given, and note its address; return
    why its cloud did not give it after all, where it says so only now."""
    began, problem = time.monotonic(), "it has no address yet"
    while True:
        waited_s = time.monotonic() - began
        if run.outcome.exists():
            if not was_started(run):
                give_back(run, say)
            raise ended_meanwhile(run)
        try:
            view = view_of(provider, run, rental)
        except ProviderError as silence:
            if silence.retry is not Retry.LATER:
                raise
            view, problem = None, silence.problem
        if view is not None and view.state is MachineStatus.GONE:
            with alone(run, say=say):
                kept = current_rental(run)
                if kept is not None and kept.ended_at is None:
                    kept = note_end(run, kept, view)
                    if kept.launched_at is None:
                        return NoCapacity(
                            view.detail or f"{rental.zone} gave no {rental.accelerator}",
                            "try again later, or write another region; rlboost prices shows what there is",
                        )
            raise RuntimeFault(
                f"{rental.machine} of {run.name} ended while it booted:"
                f" {view.detail or 'its cloud says no more'}{last_words(provider, run, rental.machine)}",
                f"type rlboost launch {run.name} to rent another",
            )
        address = "" if view is None else _address(job, view)
        if address:
            _note_place(run, address)
            refusal = _is_let_in(run)
            if refusal is None:
                return None
            problem = refusal
        if waited_s > BOOT_S:
            raise RuntimeFault(
                f"{rental.machine} of {run.name}{f' at {address}' if address else ''} did not let us in"
                f" within {BOOT_S:.0f} s{'' if was_started(run) else ' and is given back'}; last:"
                f" {problem}{last_words(provider, run, rental.machine)}",
                "see that its image has sshd, python3 and cloud-init (docs/head.md), and that its port 22 is"
                " reached from here",
            )
        say(f"waiting for {rental.machine} in {rental.zone} {f'at {address} ' if address else ''}to boot")
        time.sleep(_LOOK_S)


def _address(job: Job, view: MachineView) -> str:
    return view.private_address if job.trainer.private_address else view.public_address


def _note_place(run: RunFolder, address: str) -> None:
    place = replace(
        kept_place(run),
        host=f"{ACCOUNT}@{address}",
        identity_file=str(own_key(run).path),
        host_key=host_key(run).public,
    )
    if place != kept_place(run):
        change_place(run, place)


def _is_let_in(run: RunFolder) -> str | None:
    """Return None where the machine is ours and answers; else what it said: nothing was told to it then."""
    try:
        with Head(run) as head:
            head.ask("look")
    except (HeadUnreachable, CredentialsRejected) as refusal:
        return refusal.problem
    return None


# --- helpers ------------------------------------------------------------------------------------------------


def _lost(run: RunFolder, rental: HeadMachine) -> RuntimeFault:
    return RuntimeFault(
        f"the head of {run.name}, {rental.machine} in {rental.zone}, is gone, and with it what was on its"
        f" disk ({rental.detail or 'ended'})",
        f"rlboost down {run.name} closes its books; copies are at the job's output, where it has one; its job"
        " file starts a new run",
    )
