"""What the fleet controller needs of a cloud: five methods that may block, called in a thread.

Every machine that a provider launches carries the run's name and the client token (our machine id) as tags,
so that it can be found again from the cloud alone. Errors say where and when to try again
(`ProviderError.retry`): `NoCapacity` and `QuotaExceeded` elsewhere, `CredentialsRejected` never, `Throttled`
and any other `ProviderError` later; a `ConfigError` is the job file's fault and never right.

Promises of every provider, held by one suite (tests/integration/providers/test_provider_conformance.py): the
same id twice is the same machine, from two launchers at once too; a machine that ended is not launched again
under its id; `terminate` succeeds for what is gone or never was; `describe` sees machines of its run only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

from rlboost_runtime.errors import NotFound, ProviderError, Retry, RLBoostError


class MachineStatus(StrEnum):
    """A machine's life as its provider sees it."""

    STARTING = "starting"
    """Accepted; money may already run."""
    RUNNING = "running"
    """Up."""
    GONE = "gone"
    """Ended or never was; no money runs."""


class Ability(StrEnum):
    """What keeps a forgotten machine from costing money for ever, and what a bid means here."""

    FINDS_BY_TAG = "finds_by_tag"
    """The cloud lists machines by tag, label or name: `rlboost gc` finds them without any record of ours."""
    TIME_TO_LIVE = "time_to_live"
    """The machine, or its cloud, ends it once nobody has spoken to it for a while."""
    HOSTS_HEADS = "hosts_heads"
    """It launches machines that are reached from outside (`LaunchRequest.head_script`) and end for good when
    they shut themselves down."""
    REAL_BID = "real_bid"
    """The cloud itself holds the bid against its price, also while the machine runs."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Something that a cloud would sell now. Prices in micro-dollars (1e-6 USD) per machine-hour."""

    provider: str
    zone: str
    """The place, as its provider names it: what is backed off from when it has nothing to give."""
    accelerator: str
    price_micro_usd_per_hour: int
    spot: bool
    source: str
    """Where the price is from, for the person who reads it."""
    instance_type: str = ""
    """The cloud's name of the machine's kind; empty where there is but one."""
    max_price_micro_usd_per_hour: int | None = None
    """The bid; None: whatever it costs, up to the on-demand price."""
    dearest_micro_usd_per_hour: int | None = None
    """What it may turn out to cost where its cloud chooses the zone; None: the price, nothing else."""
    egress_micro_usd_per_gb: int = 0
    """What a gigabyte from the head to this machine costs."""
    storage_micro_usd_per_hour: int = 0
    """What its disk and public address cost beside the price, where its cloud bills them apart."""
    min_billed_s: int = 0
    """Billed at least, however soon the machine ends."""
    has_spot_market: bool = True
    """True if its cloud sells such machines as spot ones too; else the pool is filled on demand."""
    is_for_trainer: bool = False
    """True for a further node of the trainer: on demand, beside the head, reached by its other nodes."""

    @property
    def is_of_pool(self) -> bool:
        """True if the pool may be filled with it; else it is for `on_demand_floor` alone."""
        return not self.is_for_trainer and (self.spot or not self.has_spot_market)

    @property
    def most_micro_usd_per_hour(self) -> int:
        """The price to count with until the machine is there."""
        dearest = self.dearest_micro_usd_per_hour
        return self.price_micro_usd_per_hour if dearest is None else dearest

    @property
    def all_micro_usd_per_hour(self) -> int:
        """The same with its storage."""
        return self.most_micro_usd_per_hour + self.storage_micro_usd_per_hour

    @property
    def place(self) -> tuple[str, str, str]:
        """What a stock-out is about: provider, zone and kind of machine, spot or on demand."""
        kind = self.instance_type or self.accelerator
        return self.provider, self.zone, kind if self.spot else f"{kind} on demand"


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """One machine. `machine` is our id and the client token: the same id twice is the same machine."""

    run: str
    machine: str
    offer: Offer
    bootstrap: dict[str, object] = field(repr=False)  # holds a credential: never logged
    """What its agents need to dial in (`rlboost_runtime.agent.bootstrap`)."""
    head_script: str | None = field(default=None, repr=False)  # holds a private key: never logged
    """For a head: what it runs as root when it boots, instead of agents. SSH and the ports of a run are let
    in then. Only clouds that have `Ability.HOSTS_HEADS` know it."""


@dataclass(frozen=True, slots=True)
class MachineView:
    """A machine as the provider describes it. Times in seconds since the Unix epoch."""

    machine: str
    state: MachineStatus
    started_at: float | None
    ended_at: float | None
    detail: str = ""
    zone: str = ""
    """Where it is, where that is narrower than its offer's zone."""
    price_micro_usd_per_hour: int | None = field(default=None, compare=False)  # moves while the machine stays
    """What an hour of it costs now, where the cloud tells; None: as offered."""
    public_address: str = field(default="", compare=False)
    private_address: str = field(default="", compare=False)
    """Where it is reached from outside, and from its cloud's own network; empty: not yet, or not told."""


@dataclass(frozen=True, slots=True)
class Owned:
    """A machine that some run of ours launched, as found in the cloud alone."""

    run: str
    machine: str
    provider: str
    zone: str
    owner: str
    """Which `RLBOOST_HOME` it belongs to (`tags.owner_of`)."""
    started_at: float | None
    handle: str = ""
    """The cloud's own name of it, for `CanSweep.end`."""


class PartlyListed(ProviderError):
    """Some of the places that were asked did not answer; what the others have is known all the same.

    `views`: what is known; `silent`: providers that may have machines which are not in it. Exit code and
    `retry` are those of what the silent ones said.
    """

    def __init__(self, views: Sequence[MachineView], problems: Mapping[str, RLBoostError]) -> None:
        """`problems`: what the silent ones said, by the provider's name."""
        said = min(problems.values(), key=lambda each: retry_of(each) is not Retry.LATER)
        names = ", ".join(problems)
        is_told = isinstance(said, PartlyListed)
        text = said.problem if is_told else f"what is left in {names} is unknown: {said.problem}"
        super().__init__(text, said.remedy)
        self.views = tuple(views)
        self.silent = frozenset(problems)
        self.exit_code = said.exit_code
        self.retry = retry_of(said)


class PartlySwept(ProviderError):
    """Some of a cloud's regions did not answer. `owned`: what the others have; `problems`: what was said."""

    def __init__(self, owned: Sequence[Owned], problems: Sequence[RLBoostError]) -> None:
        super().__init__(problems[0].problem, problems[0].remedy)
        self.owned = tuple(owned)
        self.problems = tuple(problems)
        self.exit_code = problems[0].exit_code


def retry_of(problem: RLBoostError) -> Retry:
    """Return where and when to try again; never, where a person has to correct something."""
    return problem.retry if isinstance(problem, ProviderError) else Retry.NEVER


class Provider(Protocol):
    """One cloud."""

    @property
    def abilities(self) -> frozenset[Ability]:
        """What this cloud can do beyond the five methods."""

    def offers(self) -> list[Offer]:
        """Return what could be launched now, cheapest first. Costs nothing; may block for seconds.

        What a bid does not reach is left out. Raises `CredentialsRejected`, `Throttled`, `ProviderError`.
        """

    def launch(self, request: LaunchRequest) -> MachineView:
        """Start one machine; idempotent by `request.machine`. Money runs once this returns.

        Raises `NoCapacity`, `QuotaExceeded`, `CredentialsRejected` or `ProviderError`; then nothing was
        launched, or what may have been is found by `describe`.
        """

    def describe(self, run: str) -> list[MachineView]:
        """Return every machine tagged with `run`, also those that ended lately. Raises `PartlyListed` where
        some of its places do not answer."""

    def watch(self, run: str) -> list[MachineView] | None:
        """Return what `describe` would, as often as this cloud bears it; None: too soon since the last.

        Never waits for something to happen, so that no thread is left hanging at the end.
        """

    def terminate(self, run: str, machine: str) -> None:
        """End the machine; succeeds when it is already gone. Returns once the provider accepted it."""


@runtime_checkable
class CanPreempt(Protocol):
    """A provider that can take a machine away on purpose, as its cloud would."""

    def preempt(self, run: str, machine: str, notice_s: float | None) -> None:
        """Reclaim the machine at once, or after `notice_s` seconds of notice. Raises `NotFound`."""


@runtime_checkable
class CanShowConsole(Protocol):
    """A provider whose cloud keeps what a machine writes to its serial console: its kernel, its start-up
    script; also what a machine says that nobody ever reached."""

    def console(self, run: str, machine: str) -> str:
        """Return its last kilobytes; empty where the cloud has nothing yet. Raises `ProviderError`."""


@runtime_checkable
class CanSweep(Protocol):
    """A provider whose cloud can be asked for all machines of ours, whatever became of their runs."""

    def sweep(self) -> list[Owned]:
        """Return every machine with our tags that is not gone, of any run. May block for seconds. Raises
        `PartlySwept` where some regions do not answer."""

    def end(self, owned: Owned) -> None:
        """End what `sweep` returned; succeeds where it is gone."""


class PollTimer:
    """Lets `watch` through once in `every_s` seconds. Any thread may ask."""

    def __init__(self, every_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._now = now
        self._next = float("-inf")
        self._lock = threading.Lock()

    def is_due(self) -> bool:
        """Return True if it is time; the next time is then `every_s` later."""
        with self._lock:
            now = self._now()
            if now < self._next:
                return False
            self._next = now + self._every_s
            return True


def absent(run: str, machine: str) -> NotFound:
    """Return the error for a machine that is not there, or not any more."""
    return NotFound(f"no machine {machine} in run {run}", "see `rlboost status` for what runs")


def check_is_unannounced(cloud: str, notice_s: float | None) -> None:
    """Raise `ProviderError` where notice is asked for, which `cloud` cannot give."""
    if notice_s is not None:
        raise ProviderError(
            f"{cloud} cannot announce a preemption on demand", "leave --notice out: the machine goes at once"
        )
