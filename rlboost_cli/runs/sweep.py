"""Finding machines that no open run owns, and ending them: what `rlboost gc` does.

It looks in two ways, so that neither a lost record nor a silent cloud hides a machine: every ended run's own
provider is asked what is left of it, and every cloud that some job here names is asked for all machines with
our tags. A machine is an orphan if its run has ended or is not known here; machines of another owner (another
`RLBOOST_HOME`, which may be another person's) are listed, and ended only on request.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rlboost_cli.head.head_books import find_out
from rlboost_cli.terminal.text import left_lines
from rlboost_providers.base.provider import (
    CanSweep,
    MachineStatus,
    MachineView,
    Owned,
    PartlyListed,
    PartlySwept,
    Provider,
)
from rlboost_providers.base.terminate import PATIENCE_S
from rlboost_runtime.billing.books import close_books, unsettled
from rlboost_runtime.errors import NotYet, ProviderError, RLBoostError
from rlboost_runtime.run.create import stored_job
from rlboost_runtime.run.folder import RunFolder, home
from rlboost_runtime.run.index import all_runs, is_open, is_supervised

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Stray:
    """A machine that no open run of this home owns."""

    run: str
    machine: str
    provider: str
    place: str
    started_at: float | None
    why: str
    is_ours: bool
    end: Callable[[], None]
    is_head_with_results: bool = False
    """The only copy of the run's results may be on it."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """What was found, and which clouds or regions did not answer."""

    strays: tuple[Stray, ...]
    silent: tuple[RLBoostError, ...]


def look(say: Callable[[str], None], clouds: Iterable[str] = ()) -> Sweep:
    """Return what no open run owns; `clouds` are asked beside those that jobs here name. An open run whose
    cloud reports its rented head gone is noted as ended first: nothing manages its machines any more.

    Takes seconds per cloud. A cloud or region that does not answer is listed in `silent`; the others are
    asked all the same.
    """
    found: dict[tuple[str, str, str], Stray] = {}  # by owner, "" being us, run and machine
    silent: list[RLBoostError] = []
    runs = {run.name: run for run in all_runs()}
    wanted = set(clouds)
    for run in runs.values():
        try:
            wanted |= _clouds_of(run)
            if is_open(run) and run.head_machines.exists():
                say(f"looking for the head of {run.name}")
                find_out(run, say)
            if not is_open(run):
                say(f"looking for machines of {run.name}")
                found |= {("", left.run, left.machine): left for left in _left_of(run, say, silent)}
        except RLBoostError as error:
            silent.append(error)
    for name, cloud in _sweepers(wanted, silent):
        say(f"searching {name} for machines with RLBoost's tags")
        try:
            for owned in _swept(cloud, say, silent):
                stray = _stray(owned, cloud, runs)
                if stray is not None:
                    found["" if stray.is_ours else owned.owner, stray.run, stray.machine] = stray
        except RLBoostError as error:
            silent.append(error)
    return Sweep(tuple(found.values()), tuple(silent))


def _patiently(ask: Callable[[], list[Found]], say: Callable[[str], None]) -> list[Found]:
    """Return the answer of a cloud that may still be starting, which SkyPilot does for a minute or two."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ask()
        except NotYet as problem:
            if time.monotonic() > deadline:
                raise
            say(problem.problem)
            time.sleep(1)


def end(strays: Iterable[Stray], say: Callable[[str], None]) -> list[tuple[Stray, RLBoostError]]:
    """End them; return those that could not be ended, and why."""
    left = []
    for stray in strays:
        say(f"ending {stray.machine} of {stray.run} in {stray.place}")
        try:
            stray.end()
        except RLBoostError as error:
            left.append((stray, error))
    return left


def still_open() -> list[str]:
    """Return a line per machine that the books of an ended run have open: it may still cost money."""
    lines = []
    for run in all_runs():
        with contextlib.suppress(RLBoostError):  # `look` reports what cannot be read
            if not is_open(run):
                lines += [f"{run.name} {line}" for line in left_lines(unsettled(run))]
    return lines


def _settle(run: RunFolder, views: Sequence[MachineView]) -> None:
    """Close the books of an ended run on what its clouds no longer list."""
    if unsettled(run) and not run.head.exists() and not is_supervised(run):
        close_books(run, views, "found gone by rlboost gc")


def _clouds_of(run: RunFolder) -> set[str]:
    """Return who finds machines of the run's job by their tags: clouds' own APIs, SkyPilot."""
    from rlboost_providers.registry import head_offer
    from rlboost_runtime.job import CloudOffer

    job = stored_job(run)
    offers = [o for o in job.rollout.spot.any_of if isinstance(o, CloudOffer)]
    if job.trainer.is_bought:
        offers.append(head_offer(job.trainer))
    return {offer.cloud if offer.via == "direct" else offer.via for offer in offers}


def _swept(cloud: CanSweep, say: Callable[[str], None], silent: list[RLBoostError]) -> Sequence[Owned]:
    try:
        return _patiently(cloud.sweep, say)
    except PartlySwept as partly:
        silent += partly.problems
        return partly.owned


def _described(
    provider: Provider, run: RunFolder, say: Callable[[str], None], silent: list[RLBoostError]
) -> Sequence[MachineView]:
    try:
        views = _patiently(lambda: provider.describe(run.name), say)
    except PartlyListed as partly:
        silent.append(partly)
        return partly.views
    _settle(run, views)
    return views


def _left_of(run: RunFolder, say: Callable[[str], None], silent: list[RLBoostError]) -> list[Stray]:
    from rlboost_providers.registry import provider_for

    job = stored_job(run)
    provider = provider_for(job, run)
    kinds = ", ".join(sorted({offer.infra.partition("/")[0] for offer in job.rollout.spot.any_of}))
    return [
        Stray(
            run.name,
            view.machine,
            kinds,
            view.zone or "where it was launched",
            view.started_at,
            "its run has ended",
            True,
            lambda machine=view.machine: provider.terminate(run.name, machine),  # type: ignore[misc]
        )
        for view in _described(provider, run, say, silent)
        if view.state is not MachineStatus.GONE
    ]


def _sweepers(clouds: set[str], silent: list[RLBoostError]) -> list[tuple[str, CanSweep]]:
    from rlboost_providers.registry import sweeper

    found = []
    for name in sorted(clouds):
        try:
            found.append((name, sweeper(name)))
        except RLBoostError as error:
            silent.append(error)
    return found


def _stray(owned: Owned, cloud: CanSweep, runs: dict[str, RunFolder]) -> Stray | None:
    from rlboost_providers.base.tags import owner_of, run_of

    is_ours = owned.owner == owner_of(home())
    name = run_of(owned.run)
    run = runs.get(name)
    if is_ours and run is not None and is_open(run):
        return None
    why = "its run is unknown here" if run is None else "its run has ended"
    has_results = run is not None and name != owned.run and _has_no_output(run)
    if has_results:
        why += (
            f"; its results are still on this machine: `rlboost down {name}` fetches it and ends the machine"
        )
    return Stray(
        name,
        owned.machine,
        owned.provider,
        owned.zone,
        owned.started_at,
        why if is_ours else f"it belongs to another owner, {owned.owner or 'unnamed'}",
        is_ours,
        lambda: cloud.end(owned),
        has_results,
    )


def _has_no_output(run: RunFolder) -> bool:
    """Return True if the run's job names no `output`; False if it cannot be read."""
    with contextlib.suppress(RLBoostError):
        return stored_job(run).output is None
    return False


def remaining(problems: list[tuple[Stray, RLBoostError]]) -> ProviderError:
    """Return the error that names what still costs money."""
    names = ", ".join(f"{stray.machine} of {stray.run} in {stray.place}" for stray, _ in problems)
    return ProviderError(
        f"machines may still run: {names} ({problems[0][1].problem})",
        "type `rlboost gc` again, or end them in the cloud's own console",
    )
