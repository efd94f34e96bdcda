"""Buying a head: one on-demand machine, rented when a run is brought up and given back at its end.

Guarantees: a machine is recorded in the run's folder before it is requested from its cloud; a run has one at
a time, however often it is brought up, also by two commands at once; every wait has a deadline; a machine
that never answers is given back, and the end of its console is reported; a machine counts as given back once
its cloud reports it gone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Iterator
from dataclasses import replace

from rlboost_cli.head.connection import Head, HeadUnreachable, Say
from rlboost_cli.head.mirror import was_started
from rlboost_cli.head.start_up import ACCOUNT, head_script, host_key, last_words, own_key
from rlboost_cli.terminal.text import duration
from rlboost_providers.base.provider import LaunchRequest, MachineStatus, MachineView, Offer, Provider
from rlboost_providers.base.tags import head_of
from rlboost_providers.base.traits import provider_traits
from rlboost_providers.registry import head_provider
from rlboost_runtime.billing.launch_records import (
    HeadMachine,
    current_head_machine,
    end_of,
    keep_head_machine,
    kept_head_machines,
)
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
from rlboost_runtime.run.folder import RunFolder, locked
from rlboost_runtime.run.head import change_place, kept_place

BOOT_S = 600.0
"""Longest wait from the launch until the machine lets us in."""
GONE_S = 180.0
"""Longest wait until a cloud reports a terminated machine as gone."""
RETRY_S = 60.0
"""Pause between two rounds of requests while there is no capacity."""
_LOOK_S = 2.0
_JUST_NOW_S = 5.0
"""An end younger than this was only just seen: EC2 does not report when a machine shut itself down."""


def rent(run: RunFolder, say: Say) -> None:
    """Get a machine for the run's head that we can log in to: the existing one, or a new one.

    Raises `NoCapacity` once the job's longest wait for capacity is over, `QuotaExceeded`,
    `CredentialsRejected`, `ConfigError`, and `RuntimeFault` if it does not answer in time, or if the run's
    head is gone with its disk. Before anything is raised while it boots, the machine is given back, unless
    the run was started on it.
    """
    job = stored_job(run)
    provider = head_provider(job, run)
    offers = _offers(job, provider, say)
    deadline = time.monotonic() + 60 * job.trainer.max_wait_minutes
    refusal: NoCapacity | QuotaExceeded | None = None
    while True:
        with alone(run, say=say):
            if run.outcome.exists():
                raise ended_meanwhile(run)
            head = _there(run, provider) or _launch(run, job, provider, offers, refusal, say)
        if not isinstance(head, HeadMachine):
            _pause(run, head, deadline, say)
            offers, refusal = _offers(job, provider, say), None
            continue
        try:
            refusal = _await_it(run, job, provider, head, say)
        except RLBoostError as failure:
            if was_started(run):
                raise  # it may go on there, out of our reach alone
            try:
                give_back(run, say)
            except ProviderError as silence:
                raise RuntimeFault(
                    f"{failure.problem}; {head.machine} of {run.name} in {head.zone} could not be"
                    f" released and costs money: {silence.problem}",
                    f"type `rlboost down {run.name}`, which ends it",
                ) from failure
            raise
        if refusal is None:
            return


def give_back(run: RunFolder, say: Say) -> None:
    """Terminate the machine of the run's head, if there is one, and wait until it is gone. Raises
    `ProviderError` if its cloud cannot be reached, `RuntimeFault` if the machine stays."""
    with alone(run, say=say):
        head = current_head_machine(run)
        if head is None or head.ended_at is not None:
            return
        provider, key = head_provider(stored_job(run), run), head_of(run.name)
        say(f"releasing {head.machine} of {run.name} in {head.zone}")
        deadline, is_asked = time.monotonic() + GONE_S, False
        while True:
            view = view_of(provider, run, head)
            if is_gone(head, view) or (view is None and is_asked):
                note_end(run, head, view, ended_now=is_asked)
                return
            if time.monotonic() > deadline:
                raise RuntimeFault(
                    f"{head.machine} of {run.name} in {head.zone} is still there {GONE_S:.0f} s after it"
                    " was to end, and costs money",
                    f"type `rlboost down {run.name}` again, or end it in the cloud's own console",
                )
            if view is None:
                say(f"waiting until {head.zone} lists {head.machine} of {run.name}, if it was launched")
            else:
                provider.terminate(key, head.machine)
                is_asked = True
            time.sleep(_LOOK_S)


def view_of(provider: Provider, run: RunFolder, head: HeadMachine) -> MachineView | None:
    """Return the cloud's view of a machine, None if it lists none. Raises `ProviderError`."""
    views = provider.describe(head_of(run.name))
    return next((view for view in views if view.machine == head.machine), None)


def is_gone(head: HeadMachine, view: MachineView | None) -> bool:
    """Return True if the machine, of which its cloud has this view, is gone."""
    if view is not None:
        return view.state is MachineStatus.GONE
    return not head.may_be_unlisted(time.time(), provider_traits(head.provider).launch_lag_s)


@contextlib.contextmanager
def alone(
    run: RunFolder,
    name: str = ".renting",
    what: str = "launches or ends the head of",
    *,
    waits: bool = True,
    say: Say = lambda words: None,
) -> Iterator[bool]:
    """Lock the launch, termination and recorded end of the run's head against other commands on this machine;
    under another `name`, what that stands for. Yields False if another command has the lock and `waits` is
    False."""
    path = run.processes / name
    with contextlib.ExitStack() as stack:
        is_alone = stack.enter_context(locked(path, waits=False))
        if not is_alone and waits:
            say(f"waiting for another command, which {what} {run.name}")
            is_alone = stack.enter_context(locked(path))
        yield is_alone


def note_end(
    run: RunFolder, head: HeadMachine, view: MachineView | None, *, ended_now: bool = False
) -> HeadMachine:
    """Record that a machine is gone, with its cloud's time of the end, and return its record. Call it
    `alone`, with the head as recorded.

    `ended_now`: we have just terminated it. Otherwise a cloud that reports no time leaves it a guess.
    """
    seen_at = time.time()
    ended_at = end_of(view, seen_at)
    is_guessed = not ended_now and seen_at - ended_at < _JUST_NOW_S
    started_at = head.launched_at
    if view is not None and (started_at is None or (view.started_at is None and not was_started(run))):
        started_at = view.started_at  # None: its cloud never delivered it, whatever it answered at the launch
    ended = replace(
        head,
        launched_at=started_at,
        ended_at=ended_at,
        is_end_guessed=is_guessed,
        detail=view.detail if view else "",
    )
    keep_head_machine(run, ended)
    return ended


def require_head(run: RunFolder) -> None:
    """Raise `RuntimeFault` if the head of a run that is to go on is known to be gone."""
    head = current_head_machine(run)
    if head is not None and head.ended_at is not None and was_started(run):
        raise _lost(run, head)


def ended_meanwhile(run: RunFolder) -> RuntimeFault:
    """Return the error for a run that another command ended while it was being brought up."""
    return RuntimeFault(
        f"{run.name} was stopped in the meantime", f"rlboost launch {run.name} --resume continues it"
    )


def rate_of(head: HeadMachine) -> str:
    """Return its hourly price as text."""
    return f"{format_usd(head.price_micro_usd_per_hour, 4)} per hour"


# --- renting ------------------------------------------------------------------------------------------------


def _there(run: RunFolder, provider: Provider) -> HeadMachine | None:
    """Return the run's live head machine, or None if one must be launched."""
    head = current_head_machine(run)
    if head is None or head.ended_at is not None:
        return None
    view = view_of(provider, run, head)
    if view is not None and view.state is not MachineStatus.GONE:
        return _noted(run, head, view)
    if head.launched_at is None and view is None:
        return None  # requested again: the process that recorded the intent may not have requested it
    if not is_gone(head, view):
        return head
    note_end(run, head, view)
    if was_started(run):
        raise _lost(run, head)
    return None


def _offers(job: Job, provider: Provider, say: Say) -> Iterator[Offer]:
    """Yield the offers; requested with the first."""
    if job.trainer.via == "skypilot":
        say("asking SkyPilot for offers; its first start takes a minute or two")
    yield from provider.offers()


def _launch(
    run: RunFolder,
    job: Job,
    provider: Provider,
    offers: Iterator[Offer],
    refusal: NoCapacity | QuotaExceeded | None,
    say: Say,
) -> HeadMachine | NoCapacity | QuotaExceeded:
    """Launch the first of `offers` that its cloud delivers, or return why the last one was refused.

    `refusal`: the error of the one before them.
    """
    require_head(run)
    _require_ssh()
    script, told_run = head_script(run, job), head_of(run.name)
    for offer in offers:
        stays_s = job.after.idle_minutes * 60 if job.after.failed == "down" else 0.0
        head = replace(HeadMachine.of(_next_machine(run), offer, time.time()), stays_s=stays_s)
        keep_head_machine(run, head)
        say(f"renting {offer.accelerator} in {offer.zone} for the head, at {rate_of(head)}")
        try:
            view = provider.launch(LaunchRequest(told_run, head.machine, offer, {}, script))
        except (NoCapacity, QuotaExceeded) as error:
            refusal = error
            keep_head_machine(run, replace(head, ended_at=time.time(), detail=error.problem))
            continue
        return _noted(run, head, view)
    if refusal is not None:
        return refusal
    raise NoCapacity(
        f"{job.trainer.accelerators} is not sold in {job.trainer.infra}"
        if job.trainer.max_price_usd_per_hour is None
        else f"{job.trainer.accelerators} in {job.trainer.infra} costs more than"
        f" trainer.max_price_usd_per_hour, ${job.trainer.max_price_usd_per_hour}",
        "choose another region or raise the limit; rlboost prices lists the offers",
    )


def _pause(run: RunFolder, refusal: NoCapacity | QuotaExceeded, deadline: float, say: Say) -> None:
    """Wait before the next round of requests. Raises `refusal` where the deadline comes first, or where only
    a person can do something about it."""
    left_s = deadline - time.monotonic()
    if left_s <= 0 or isinstance(refusal, QuotaExceeded):
        raise refusal
    say(f"{refusal.problem}; retrying every {RETRY_S:.0f} s for {duration(left_s)} more")
    resumes_at = time.monotonic() + min(RETRY_S, left_s)
    while time.monotonic() < resumes_at and not run.outcome.exists():
        time.sleep(min(_LOOK_S, RETRY_S))


def _require_ssh() -> None:
    if importlib.util.find_spec("paramiko") is None:
        raise ConfigError(
            "connecting to a head elsewhere needs paramiko, which is not installed",
            "type: pip install 'rlboost[ssh]'",
        )


def _next_machine(run: RunFolder) -> str:
    """Return the id of a machine that is intended and was never launched, else a new one."""
    last = current_head_machine(run)
    if last is not None and last.ended_at is None:
        return last.machine
    return f"head-{len(kept_head_machines(run)) + 1}"


def _noted(run: RunFolder, head: HeadMachine, view: MachineView) -> HeadMachine:
    found = head.launched(view, time.time())
    keep_head_machine(run, found)
    return found


# --- waiting ------------------------------------------------------------------------------------------------


def _await_it(run: RunFolder, job: Job, provider: Provider, head: HeadMachine, say: Say) -> NoCapacity | None:
    """Wait until we can log in to the machine under the host key that it was given, and record its address.
    Return the refusal of a cloud that only now reports that it did not deliver the machine."""
    began, problem = time.monotonic(), "it has no address yet"
    while True:
        waited_s = time.monotonic() - began
        if run.outcome.exists():
            if not was_started(run):
                give_back(run, say)
            raise ended_meanwhile(run)
        try:
            view = view_of(provider, run, head)
        except ProviderError as silence:
            if silence.retry is not Retry.LATER:
                raise
            view, problem = None, silence.problem
        if view is not None and view.state is MachineStatus.GONE:
            with alone(run, say=say):
                kept = current_head_machine(run)
                if kept is not None and kept.ended_at is None:
                    kept = note_end(run, kept, view)
                    if kept.launched_at is None:
                        return NoCapacity(
                            view.detail or f"{head.zone} has no capacity for {head.accelerator}",
                            "try again later, or choose another region; rlboost prices lists the offers",
                        )
            raise RuntimeFault(
                f"{head.machine} of {run.name} ended while it booted:"
                f" {view.detail or 'its cloud gives no reason'}{last_words(provider, run, head.machine)}",
                f"type rlboost launch {run.name} to rent another",
            )
        address = ""
        if view is not None:
            address = view.private_address if job.trainer.private_address else view.public_address
        if address:
            _note_place(run, address)
            refusal = _is_let_in(run)
            if refusal is None:
                return None
            problem = refusal
        if waited_s > BOOT_S:
            raise RuntimeFault(
                f"{head.machine} of {run.name}{f' at {address}' if address else ''} was not reached by"
                f" SSH within {BOOT_S:.0f} s{'' if was_started(run) else ' and is released'}; last:"
                f" {problem}{last_words(provider, run, head.machine)}",
                "check that its image has sshd, python3 and cloud-init (docs/head.md), and that its port 22"
                " can be reached from here",
            )
        say(f"waiting for {head.machine} in {head.zone} {f'at {address} ' if address else ''}to boot")
        time.sleep(_LOOK_S)


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
    """Return None if the machine is ours and answers, else the problem; nothing was sent to it then."""
    try:
        with Head(run) as head:
            head.ask("look")
    except (HeadUnreachable, CredentialsRejected) as refusal:
        return refusal.problem
    return None


# --- helpers ------------------------------------------------------------------------------------------------


def _lost(run: RunFolder, head: HeadMachine) -> RuntimeFault:
    return RuntimeFault(
        f"the head of {run.name}, {head.machine} in {head.zone}, is gone, with everything on its disk"
        f" ({head.detail or 'ended'})",
        f"rlboost down {run.name} closes its books; copies are at the job's output, if it has one; its job"
        " file starts a new run",
    )
