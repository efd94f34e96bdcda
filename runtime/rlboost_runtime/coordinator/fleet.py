"""The fleet controller: machines that the core wants, launched and ended at a provider, and their bills.

Guarantees:

- the intent to launch is in the ledger before the provider is asked;
- a machine leaves the ledger's open list only when the provider says that it is gone (or never was);
- after a restart, machines that were asked for and not heard of are asked for again, under the same token;
- provider calls run in threads, one at a time per machine, and never block the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from rlboost_providers.base import CanPreempt, LaunchRequest, MachineState, MachineView, Offer, Provider
from rlboost_runtime.coordinator.ledger import Ledger
from rlboost_runtime.coordinator.state import State
from rlboost_runtime.core.messages import (
    LaunchFailed,
    LaunchMachine,
    MachineGone,
    MachineLaunched,
    TerminateMachine,
)
from rlboost_runtime.errors import NoCapacity, NotFound, ProviderError
from rlboost_runtime.logs import event as log_event
from rlboost_runtime.seams import Clock

log = logging.getLogger(__name__)

DESCRIBE_EVERY_S = 1.0
"""How often the provider is asked what exists; bounds how late a vanished machine stops being billed."""
CALL_TIMEOUT_S = 120.0
"""Longest wait for one provider call."""
RETRY_NO_CAPACITY_S = 2.0
"""Pause after a stock-out before the next launch."""
RETRY_ERROR_S = 10.0
"""Pause after any other failure."""


@dataclass(frozen=True, slots=True)
class MachineMaker:
    """How a spot machine of this run is described to a provider."""

    run: str
    bootstrap: Callable[[str], dict[str, object]]
    """From a machine's id to what it needs to dial in."""


class Fleet:
    """Carries out the core's machine commands."""

    def __init__(
        self, state: State, ledger: Ledger, provider: Provider, maker: MachineMaker, clock: Clock
    ) -> None:
        self._state = state
        self._ledger = ledger
        self._provider = provider
        self._maker = maker
        self._clock = clock
        self._commands: asyncio.Queue[LaunchMachine | TerminateMachine] = asyncio.Queue()
        self._busy: set[str] = set()

    def carry_out(self, command: LaunchMachine | TerminateMachine) -> None:
        """Queue a command."""
        self._commands.put_nowait(command)

    async def serve(self) -> None:
        """Carry out commands and watch the machines until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            while True:
                command = await self._commands.get()
                if command.machine in self._busy:
                    continue  # the core repeats a termination until the machine is gone
                self._busy.add(command.machine)
                tasks.create_task(self._run(command))

    def reconcile(self) -> None:
        """Ask again for every machine whose launch was not heard of before a restart."""
        for machine in self._state.core.machines.values():
            if machine.is_requested:
                self.carry_out(LaunchMachine(machine.machine))

    async def preempt(self, machine: str, notice_s: float | None) -> None:
        """Take a machine away on purpose. Raises `NotFound`, `ProviderError`."""
        if not isinstance(self._provider, CanPreempt):
            raise ProviderError("this provider cannot preempt on purpose", "use the cloud's own console")
        await asyncio.to_thread(self._provider.preempt, self._maker.run, machine, notice_s)

    async def end_all(self, timeout_s: float) -> list[str]:
        """End every machine of the run; return those that the provider still lists at the deadline."""
        deadline = self._clock.now() + timeout_s
        while True:
            alive = [v.machine for v in await self._describe() if v.state is not MachineState.GONE]
            self._settle_ledger(set(alive))
            if not alive or self._clock.now() > deadline:
                return alive
            for machine in alive:
                try:
                    await asyncio.to_thread(self._provider.terminate, self._maker.run, machine)
                except ProviderError as error:
                    log_event(log, "machine.terminate_failed", machine=machine, problem=str(error))
            await self._clock.sleep(0.1)

    # --- one command --------------------------------------------------------------------------------------

    async def _run(self, command: LaunchMachine | TerminateMachine) -> None:
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                match command:
                    case LaunchMachine(machine=machine):
                        await self._launch(machine)
                    case TerminateMachine(machine=machine, reason=reason):
                        await self._terminate(machine, reason)
        except TimeoutError:
            log_event(log, "provider.timed_out", machine=command.machine, seconds=CALL_TIMEOUT_S)
        finally:
            self._busy.discard(command.machine)

    async def _launch(self, machine: str) -> None:
        state = self._state
        try:
            offer = await asyncio.to_thread(self._cheapest)
            self._intend(machine, offer)
        except ProviderError as error:
            self._launch_failed(machine, error)
            return
        try:
            request = LaunchRequest(self._maker.run, machine, offer, self._maker.bootstrap(machine))
            view = await asyncio.to_thread(self._provider.launch, request)
        except ProviderError as error:
            self._ledger.failed(machine, self._clock.wall(), error.problem)
            self._launch_failed(machine, error)
            return
        started_at = self._clock.wall() if view.started_at is None else view.started_at
        self._ledger.launched(machine, started_at)
        self._ledger.note(self._clock.wall(), "launched", f"{machine} launched in {offer.zone}")
        log_event(log, "machine.launched", machine=machine, zone=offer.zone)
        state.apply(MachineLaunched(state.now(), machine))

    def _launch_failed(self, machine: str, error: ProviderError) -> None:
        log_event(log, "machine.launch_failed", machine=machine, problem=error.problem)
        at = self._state.now()
        self._state.apply(LaunchFailed(at, machine, error.problem, _retry_after(error)))

    def _cheapest(self) -> Offer:
        offers = self._provider.offers()
        if not offers:
            raise NoCapacity(
                "no spot machine is to be had now", "wait, or add an entry to rollout.spot.any_of"
            )
        return offers[0]

    def _intend(self, machine: str, offer: Offer) -> None:
        self._ledger.intend(
            machine,
            pool="spot",
            provider=offer.provider,
            zone=offer.zone,
            accelerator=offer.accelerator,
            price_micro_usd_per_hour=offer.price_micro_usd_per_hour,
            price_source=offer.source,
            at=self._clock.wall(),
        )

    async def _terminate(self, machine: str, reason: str) -> None:
        log_event(log, "machine.terminating", machine=machine, reason=reason)
        try:
            await asyncio.to_thread(self._provider.terminate, self._maker.run, machine)
        except NotFound:
            pass
        except ProviderError as error:
            log_event(log, "machine.terminate_failed", machine=machine, problem=str(error))

    # --- watching -----------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            try:
                views = await self._describe()
            except (ProviderError, TimeoutError) as error:
                log_event(log, "provider.describe_failed", problem=repr(error))
            else:
                self._settle(views)
            await self._clock.sleep(DESCRIBE_EVERY_S)

    async def _describe(self) -> list[MachineView]:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            return await asyncio.to_thread(self._provider.describe, self._maker.run)

    def _settle(self, views: list[MachineView]) -> None:
        """Close the books of what is gone, and of what was launched and is no longer listed at all."""
        is_open = set(self._ledger.open_machines())
        listed = {view.machine for view in views}
        gone = {view.machine: view.ended_at for view in views if view.state is MachineState.GONE}
        for machine in self._state.core.machines.values():
            if machine.is_launched and machine.machine not in listed:
                gone[machine.machine] = None
        for name, ended_at in gone.items():
            if name in self._busy:
                continue
            if name in is_open:
                self._ledger.ended(name, self._clock.wall() if ended_at is None else ended_at)
            known = self._state.core.machines.get(name)
            if known is not None and known.is_alive:
                log_event(log, "machine.gone", machine=name)
                self._state.apply(MachineGone(self._state.now(), name))

    def _settle_ledger(self, alive: set[str]) -> None:
        for machine in self._ledger.open_machines():
            if machine in self._state.core.machines and machine not in alive:
                self._ledger.ended(machine, self._clock.wall())


def _retry_after(error: ProviderError) -> float:
    if isinstance(error, NoCapacity):
        return RETRY_NO_CAPACITY_S if error.retry_after_s is None else error.retry_after_s
    return RETRY_ERROR_S
