"""What the fleet controller needs of a cloud: five verbs that may block, called in a thread.

Every machine that a provider launches carries the run's name and the client token (our machine id) as tags,
so that it can be found again from the cloud alone. Errors say when asking again makes sense: `NoCapacity`
later or elsewhere, `QuotaExceeded` and `CredentialsRejected` never, other `ProviderError` later.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable


class MachineState(StrEnum):
    """A machine's life as its provider sees it."""

    STARTING = "starting"
    """Accepted; money may already run."""
    RUNNING = "running"
    """Up."""
    GONE = "gone"
    """Ended or never was; no money runs."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Something that a cloud would sell now. Prices in micro-dollars (1e-6 USD) per machine-hour."""

    provider: str
    zone: str
    accelerator: str
    price_micro_usd_per_hour: int
    spot: bool
    source: str
    """Where the price is from, for the person who reads it."""


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """One machine. `machine` is our id and the client token: the same id twice is the same machine."""

    run: str
    machine: str
    offer: Offer
    bootstrap: dict[str, object] = field(repr=False)  # holds the run's token: never logged
    """What its agents need to dial in (`rlboost_runtime.agent.bootstrap`)."""


@dataclass(frozen=True, slots=True)
class MachineView:
    """A machine as the provider describes it. Times in seconds since the Unix epoch."""

    machine: str
    state: MachineState
    started_at: float | None
    ended_at: float | None
    detail: str = ""


class Provider(Protocol):
    """One cloud."""

    def offers(self) -> list[Offer]:
        """Return what could be launched now, cheapest first. Costs nothing; may block for seconds."""

    def launch(self, request: LaunchRequest) -> MachineView:
        """Start one machine; idempotent by `request.machine`. Money runs once this returns.

        Raises `NoCapacity`, `QuotaExceeded`, `CredentialsRejected` or `ProviderError`; then nothing was
        launched.
        """

    def describe(self, run: str) -> list[MachineView]:
        """Return every machine tagged with `run`, also those that ended lately."""

    def terminate(self, run: str, machine: str) -> None:
        """End the machine; succeeds when it is already gone. Returns once the provider accepted it."""


@runtime_checkable
class CanPreempt(Protocol):
    """A provider that can take a machine away on purpose, as its cloud would."""

    def preempt(self, run: str, machine: str, notice_s: float | None) -> None:
        """Reclaim the machine at once, or after `notice_s` seconds of notice. Raises `NotFound`."""
