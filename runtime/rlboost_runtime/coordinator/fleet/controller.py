"""The fleet controller: machines that the core wants, launched and ended at a provider, and their bills; also
the trainer's further nodes, which are no matter of the core (`ReservedNodes`).

Guarantees:

- the intent to launch is in the ledger, and copied elsewhere (`tell_intent`), before the provider is asked;
- a machine leaves the ledger's open list only when the provider reports that it is gone, or never existed: a
  launch that failed without such a report counts against cap and budget until lists lacked it for a while;
- a machine that a former coordinator launched is not taken for gone before its cloud's lists would show it;
- a machine that the provider started is billed from then on, even if its launch was never confirmed, and at a
  changed price from the list on that reported it;
- a machine that the provider has and that is neither wanted by the core nor a node of the trainer is ended;
- at the run's end, a cloud in which no launch was ever intended is not asked;
- no launch brings what an hour costs above the cap, or what is committed above the budget;
- a place that had nothing is left alone for a while (`offer_choice`), and the next one is asked at once;
- a launch that may have been asked for before a restart is asked for again only where it was;
- provider calls run in threads, one at a time per machine, and never block the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlboost_providers.base.multi import narrowed
from rlboost_providers.base.provider import (
    CanPreempt,
    LaunchRequest,
    MachineStatus,
    MachineView,
    Offer,
    PartlyListed,
    Provider,
    retry_of,
)
from rlboost_providers.base.traits import provider_traits
from rlboost_runtime.billing.accounts import least_micro_usd
from rlboost_runtime.billing.launch_records import LaunchRecords, MachineRecord, end_of, price_paid, start_of
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.coordinator.driver.core_driver import CoreDriver
from rlboost_runtime.coordinator.fleet.offer_choice import ELSEWHERE_S, OfferChoice, problem_of
from rlboost_runtime.coordinator.fleet.offer_rank import OfferRank
from rlboost_runtime.coordinator.fleet.provider_calls import ProviderThreads, keep_console
from rlboost_runtime.coordinator.fleet.reserved_nodes import ReservedNodes
from rlboost_runtime.core.base.messages import (
    LaunchFailed,
    LaunchMachine,
    MachineGone,
    MachineLaunched,
    Pool,
    TerminateMachine,
)
from rlboost_runtime.core.base.token_cost import MachineKind
from rlboost_runtime.errors import (
    ConfigError,
    NoCapacity,
    NotFound,
    ProviderError,
    QuotaExceeded,
    Retry,
    RLBoostError,
)
from rlboost_runtime.logs import event as log_event
from rlboost_runtime.money import format_usd
from rlboost_runtime.run.reserved import RESERVED_MACHINE, is_reserved
from rlboost_runtime.seams import Clock

log = logging.getLogger(__name__)

NODES_EVERY_S = 1.0
"""How often the trainer's further nodes are looked after."""
DESCRIBE_EVERY_S = 1.0
"""How often the provider is asked what exists; bounds how late a vanished machine stops being billed."""
CALL_TIMEOUT_S = 120.0
"""Longest wait for one provider call."""
MIN_CALL_S = 0.1
"""Time that a provider call gets even when the run's end is overdue."""
END_AGAIN_S = 0.1
"""Pause between two looks at what is left while the run ends."""
REJECTED_S = 10.0
"""How long a cloud that rejects our credentials is asked at the run's end: they may just be renewed."""
CONSOLE_S = 20.0
"""Longest wait for the console of a machine that never dialled in: it costs money meanwhile."""
CLOCK_SET_S = 3600.0
"""How far the wall clock may be set forward at once, as when its first time server answers."""
RETRY_ERROR_S = 10.0
"""Pause after a failure that gives no time to retry."""
_REFUSALS = (NoCapacity, QuotaExceeded, ConfigError)
"""Errors that mean that no machine was launched; after any other failure there may be one."""
_NO_OFFERS = ProviderError("no cloud has listed its offers yet", "retried automatically")


@dataclass(frozen=True, slots=True)
class MachineMaker:
    """How a spot machine of this run is described to a provider."""

    run: str
    bootstrap: Callable[[str], dict[str, object]]
    """From a machine's id to what it needs to dial in."""
    logs: Path | None = None
    """Where the console of one that never dialled in is kept; None: nowhere."""


@dataclass(frozen=True, slots=True)
class _Look:
    """What was known when the provider was asked for its list."""

    at: float
    settleable: set[str]
    """Machines that the list must hold, unless they are gone; what was launched later it may lack."""


@dataclass(frozen=True, slots=True)
class _Listed:
    """What the provider listed."""

    views: Sequence[MachineView]
    silent: frozenset[str] = frozenset()
    """Clouds that did not answer: machines there may exist although they are not listed."""
    problem: RLBoostError | OSError | None = None
    """Why they did not answer."""


class FleetController:
    """Carries out the core's machine commands."""

    def __init__(
        self,
        state: CoreDriver,
        ledger: Ledger,
        provider: Provider,
        maker: MachineMaker,
        clock: Clock,
        cap_micro_usd_per_hour: int | None = None,
        room_micro_usd: Callable[[], int] | None = None,
        on_demand_floor: int = 0,
        bought: LaunchRecords | None = None,
        tell_intent: Callable[[], object] | None = None,
        rank: OfferRank | None = None,
        nodes: ReservedNodes | None = None,
    ) -> None:
        """`room_micro_usd` returns what of the budget is neither spent nor committed; None: no budget.

        `tell_intent` copies what was bought to another machine; it may block for seconds and raises nothing.
        `rank`: which offer comes first; None: the one with the lowest price.
        `on_demand_floor`: below so many machines, one is bought on demand while there is no spot capacity.
        `nodes`: further nodes of the trainer; None: it has none.
        """
        self._state = state
        self._ledger = ledger
        self._provider = provider
        self._maker = maker
        self._clock = clock
        self._cap = cap_micro_usd_per_hour
        self._room = room_micro_usd
        self._floor = on_demand_floor
        self._rank = rank
        self._nodes = ReservedNodes(0) if nodes is None else nodes
        self._choice = OfferChoice() if rank is None else OfferChoice(rank.usd_per_token)
        self._threads = ProviderThreads()
        self._is_closed = False
        self._began = clock.now()
        self._commands: asyncio.Queue[LaunchMachine | TerminateMachine] = asyncio.Queue()
        self._busy: set[str] = set()
        self._ending: set[str] = set()
        """Those of them that the cloud is just asked to end."""
        self._launching: set[str] = set()
        """Machines whose launch runs in a thread, also beyond `CALL_TIMEOUT_S`."""
        self._seen: set[str] = set()
        """Machines that were launched or listed since this process began."""
        self._doubtful: dict[str, tuple[float, str]] = {}
        """Open machines that are no longer wanted: since when, and the problem of their launch."""
        self._bought = LaunchRecords(None) if bought is None else bought
        self._tell_intent = tell_intent
        self.silence: RLBoostError | OSError | None = None
        """Why not every cloud answered when the fleet was last listed by `end_all`."""

    def carry_out(self, command: LaunchMachine | TerminateMachine) -> None:
        """Queue a command."""
        self._commands.put_nowait(command)

    async def serve(self) -> None:
        """Carry out commands and watch the machines until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch())
                tasks.create_task(self._keep_nodes())
                while True:
                    command = await self._commands.get()
                    if command.machine in self._busy:
                        continue  # the core repeats a termination until the machine is gone
                    self._busy.add(command.machine)
                    tasks.create_task(self._run(command))
        finally:
            self._threads.close()

    async def _keep_nodes(self) -> None:
        while not self._is_closed:
            instances = self._state.core.instances.values()
            connected = {each.machine for each in instances if each.is_connected}
            for command in self._nodes.due(self._clock.now(), connected):
                self.carry_out(command)
            await self._clock.sleep(NODES_EVERY_S)

    def joined_nodes(self) -> list[str]:
        """Return the machines of the trainer's further nodes that are there, in the nodes' order."""
        return self._nodes.there(self._clock.now())

    def close(self) -> None:
        """Launch nothing any more; launches under way go on."""
        self._is_closed = True

    async def preempt(self, machine: str, notice_s: float | None) -> None:
        """Take a machine away on purpose. Raises `NotFound`, `ProviderError`."""
        if not isinstance(self._provider, CanPreempt):
            raise ProviderError("this provider cannot preempt on purpose", "use the cloud's own console")
        provider = self._provider
        await self._threads.call(lambda: provider.preempt(self._maker.run, machine, notice_s))

    async def end_all(self, timeout_s: float) -> list[str]:
        """End every machine of the run; return those that may still exist at the deadline.

        Launches nothing any more. While the provider does not answer nothing is known, and it is asked again,
        for at most `REJECTED_S` where it rejects our credentials.
        """
        self.close()
        provider = narrowed(self._provider, self._ledger.clouds())
        if provider is None:
            return []
        deadline = self._clock.now() + timeout_s
        rejected_until = min(deadline, self._clock.now() + REJECTED_S)
        while True:
            left = await self._end_once(provider, deadline)
            if self.silence is None and not left:
                self._end_unlisted()
                return []
            now, is_rejected = self._clock.now(), _is_final(self.silence) and not self._coming
            if now > deadline or (is_rejected and now > rejected_until):
                return sorted(left)
            await self._clock.sleep(END_AGAIN_S)

    async def _end_once(self, provider: Provider, deadline: float) -> set[str]:
        """List the machines and terminate them; return those that exist or may come, and note in `silence`
        whether every cloud answered."""
        coming, ending = self._coming, set(self._ending)
        look = self._look()
        try:
            timeout_s = max(MIN_CALL_S, deadline - self._clock.now())
            listed = await self._describe(provider, timeout_s)
        except (RLBoostError, OSError) as error:
            log_event(log, "provider.describe_failed", problem=repr(error))
            self.silence = error
            return self._open_machines() | self._coming
        self.silence = listed.problem
        self._settle(listed, look)
        alive = {view.machine for view in listed.views if view.state is not MachineStatus.GONE}
        async with asyncio.TaskGroup() as tasks:  # side by side: some clouds take half a minute for each
            for machine in sorted(alive - self._busy):
                tasks.create_task(self._end_by(provider, machine, deadline))
        is_open = self._open_machines()
        unsaid = {machine for machine in is_open if self._may_be_in(machine, listed.silent)}
        unsaid |= self._too_young(is_open - {view.machine for view in listed.views})
        ending = (ending | self._ending) & is_open  # one whose books are closed is only asked again
        return alive | coming | self._coming | ending | set(self._doubtful) | unsaid

    async def _end_by(self, provider: Provider, machine: str, deadline: float) -> None:
        try:
            async with asyncio.timeout(max(MIN_CALL_S, deadline - self._clock.now())):
                await self._threads.call(lambda: provider.terminate(self._maker.run, machine))
        except (RLBoostError, OSError) as error:
            log_event(log, "machine.terminate_failed", machine=machine, problem=repr(error))

    @property
    def _coming(self) -> set[str]:
        """Machines that a launch under way may bring."""
        return self._busy - self._ending | self._launching

    # --- one command --------------------------------------------------------------------------------------

    def offer_of(self, machine: str) -> Offer | None:
        """Return the offer that a machine was bought as; None if unknown."""
        return self._bought.get(machine)

    async def _run(self, command: LaunchMachine | TerminateMachine) -> None:
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                match command:
                    case LaunchMachine(machine=machine):
                        await self._launch(machine)
                    case TerminateMachine(machine=machine, reason=reason):
                        self._ending.add(machine)
                        await self._terminate(machine, reason)
        except TimeoutError:
            log_event(log, "provider.timed_out", machine=command.machine, seconds=CALL_TIMEOUT_S)
            is_asked = command.machine in self._ledger.open_machines()
            if isinstance(command, LaunchMachine) and not is_asked and not self._is_closed:
                self._launch_failed(command.machine, _NO_OFFERS, RETRY_ERROR_S)
        finally:
            self._busy.discard(command.machine)
            self._ending.discard(command.machine)

    async def _launch(self, machine: str) -> None:
        state = self._state
        try:
            offers = await self._threads.call(self._provider.offers)
            if self._is_closed:
                return
            offer = self._choose(machine, self._as_before(machine, offers))
            self._intend(machine, offer)
        except (RLBoostError, OSError) as error:
            self._launch_failed(machine, error, _retry_after(error))
            return
        if self._tell_intent is not None:
            await self._threads.call(self._tell_intent)
            if self._is_closed:
                self._ledger.failed(machine, self._clock.wall(), "the run ended before it was launched")
                return
        try:
            request = LaunchRequest(self._maker.run, machine, offer, self._maker.bootstrap(machine))
            view = await self._in_thread(machine, lambda: self._provider.launch(request))
        except (RLBoostError, OSError) as error:
            if isinstance(error, _REFUSALS):
                self._ledger.failed(machine, self._clock.wall(), problem_of(error))
            else:
                self._doubtful[machine] = self._clock.now(), problem_of(error)
            self._choice.failed(offer, error, self._clock.now())
            self._launch_failed(machine, error, self._next_launch_s(machine, offers))
            return
        self._choice.came(offer)
        self._seen.add(machine)
        self._note_launch(view)
        if not self._is_closed:  # else it is on its way out already
            self._ledger.note(self._clock.wall(), "launched", f"{machine} launched in {offer.zone}")
        log_event(log, "machine.launched", machine=machine, zone=view.zone or offer.zone)
        if machine in self._nodes:
            self._nodes.came(machine, self._clock.now())
        else:
            state.apply(MachineLaunched(state.now(), machine, self._kind_of(machine)))

    def _kind_of(self, machine: str) -> MachineKind | None:
        offer = self._bought.get(machine)
        return None if self._rank is None or offer is None else self._rank.kind_of(offer)

    def _as_before(self, machine: str, offers: list[Offer]) -> list[Offer]:
        """Return the offers from which `machine` may be bought: where its launch was intended before a
        restart, only those of that place: what is asked there again is the same machine."""
        if machine not in self._ledger.open_machines():
            return offers
        bill = next(bill for bill in self._ledger.machines(self._clock.wall()) if bill.machine == machine)
        return [offer for offer in offers if (offer.provider, offer.zone) == (bill.provider, bill.zone)]

    async def _in_thread(self, machine: str, launch: Callable[[], MachineView]) -> MachineView:
        """Return what `launch` returns. Its thread cannot be stopped: until it has ended the machine may
        come, even if no caller waits for it any more."""
        self._launching.add(machine)
        call = self._threads.launch(launch)
        call.add_done_callback(lambda done: self._launch_ended(machine, done))
        return await asyncio.shield(call)

    def _launch_ended(self, machine: str, call: asyncio.Future[MachineView]) -> None:
        self._launching.discard(machine)
        if not call.cancelled() and call.exception() is not None:  # no caller may be left to log it
            log_event(log, "machine.launch_ended", machine=machine, problem=repr(call.exception()))

    def _launch_failed(self, machine: str, error: RLBoostError | OSError, retry_after_s: float) -> None:
        problem = problem_of(error)
        log_event(log, "machine.launch_failed", machine=machine, problem=problem)
        if machine in self._nodes:
            next_at = self._clock.now() + max(retry_after_s, RETRY_ERROR_S)
            if self._nodes.failed(machine, next_at, problem):
                self._ledger.note(self._clock.wall(), "node", f"cannot launch {machine}: {problem}; retrying")
            return
        self._state.apply(LaunchFailed(self._state.now(), machine, problem, retry_after_s))

    def _choose(self, machine: str, offers: list[Offer]) -> Offer:
        """Return the pool's open offer that ranks first; without one, the floor's where machines are few. A
        node of the trainer has offers of its own.

        Raises `NoCapacity`.
        """
        now = self._clock.now()
        if machine in self._nodes:
            return self._choice.cheapest([offer for offer in offers if offer.is_for_trainer], now)
        try:
            return self._choice.cheapest([offer for offer in offers if offer.is_of_pool], now)
        except NoCapacity:
            on_demand = [offer for offer in offers if not offer.is_of_pool and not offer.is_for_trainer]
            if not on_demand or self._num_there_but(machine) >= self._floor:
                raise
            return self._choice.cheapest(on_demand, now)

    def _num_there_but(self, machine: str) -> int:
        """Count the other machines that are there, or asked for on demand: a spot one may be refused yet."""
        others = {name for name in self._open_machines() - {machine} if not is_reserved(name)}
        bought = {name: offer for name in others if (offer := self._bought.get(name)) is not None}
        coming = {name for name, offer in bought.items() if not offer.is_of_pool}
        return len(others & self._ledger.running_machines() | coming)

    def _next_launch_s(self, machine: str, offers: list[Offer]) -> float:
        """Return when to launch again: at once where another place is open, else when one opens."""
        try:
            self._choose(machine, offers)
        except NoCapacity as refusal:
            return _retry_after(refusal)
        return ELSEWHERE_S

    def _intend(self, machine: str, offer: Offer) -> None:
        """Note the intent, if the cap and the budget allow it. Never waits: no other launch comes between."""
        price = offer.all_micro_usd_per_hour
        if self._cap is not None and machine not in self._ledger.open_machines():
            rate = self._ledger.rate_micro_usd_per_hour()
            if rate + price > self._cap:
                raise _unaffordable(
                    f"{offer.zone} at {format_usd(price)} an hour beside the"
                    f" {format_usd(rate)} that run now is above max_usd_per_hour, {format_usd(self._cap)}",
                    "wait for a cheaper one, or raise budget.max_usd_per_hour",
                )
        if self._room is not None and machine not in self._ledger.open_machines():
            least = least_micro_usd(offer.provider, price, offer.min_billed_s)
            if least > self._room():
                raise _unaffordable(
                    f"a machine in {offer.zone} costs {format_usd(least)} at least, more than the budget has"
                    " left",
                    "raise budget.max_usd",
                )
        self._bought.add(machine, offer)
        record = MachineRecord.of(machine, offer, self._clock.wall())
        self._ledger.intend(replace(record, pool=Pool.RESERVED) if offer.is_for_trainer else record)
        if offer.egress_micro_usd_per_gb:
            self._ledger.set_egress_price(machine, offer.egress_micro_usd_per_gb)

    async def _terminate(self, machine: str, reason: str) -> None:
        log_event(log, "machine.terminating", machine=machine, reason=reason)
        known, logs = self._state.core.machines.get(machine), self._maker.logs
        never_joined = known is not None and known.was_accepted and not known.has_joined
        if logs is not None and (never_joined or machine in self._nodes):
            await self._keep_console(machine, logs / machine)
        try:
            await self._threads.call(lambda: self._provider.terminate(self._maker.run, machine))
        except NotFound:
            pass
        except (RLBoostError, OSError) as error:
            log_event(log, "machine.terminate_failed", machine=machine, problem=repr(error))

    async def _keep_console(self, machine: str, folder: Path) -> None:
        """Save the machine's console before it is terminated: afterwards some clouds no longer have it."""
        run, provider = self._maker.run, self._provider
        try:
            async with asyncio.timeout(CONSOLE_S):
                found = await self._threads.call(lambda: keep_console(provider, run, machine, folder))
        except (TimeoutError, ProviderError):
            found = None
        if found is not None:
            told = found.refusal or (str(found.log) if found.lines else "empty")
            log_event(log, "machine.never_dialled_in", machine=machine, console=told)

    # --- watching -----------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while not self._is_closed:  # `end_all` looks by itself
            look = self._look()
            try:
                listed = await self._listed(self._provider.watch, CALL_TIMEOUT_S)
            except (RLBoostError, OSError) as error:
                log_event(log, "provider.describe_failed", problem=repr(error))
            else:
                if listed is not None:
                    self._settle(listed, look)
            await self._clock.sleep(DESCRIBE_EVERY_S)

    async def _describe(self, provider: Provider, timeout_s: float) -> _Listed:
        listed = await self._listed(provider.describe, min(CALL_TIMEOUT_S, timeout_s))
        assert listed is not None
        return listed

    async def _listed(
        self, ask: Callable[[str], list[MachineView] | None], timeout_s: float
    ) -> _Listed | None:
        """Return the machines of all clouds, or of those that answered; None: it is too soon to ask."""
        try:
            async with asyncio.timeout(timeout_s):
                views = await self._threads.call(lambda: ask(self._maker.run))
        except PartlyListed as partly:
            log_event(log, "provider.describe_failed", problem=repr(partly))
            return _Listed(partly.views, partly.silent, partly)
        return None if views is None else _Listed(views)

    def _look(self) -> _Look:
        machines = self._state.core.machines.values()
        launched = {m.machine for m in machines if m.is_launched and m.was_accepted} | {*self._nodes.launched}
        return _Look(self._clock.now(), launched - self._busy)

    def _settle(self, found: _Listed, look: _Look) -> None:
        """Bring core and books in line with what the provider lists; `look` is of before it was asked."""
        views = found.views
        unbilled = self._ledger.unbilled_machines()
        for view in views:
            if view.machine not in self._busy:
                self._settle_start(view, unbilled)
        self._settle_prices(views)
        now = self._clock.wall()
        gone = {view.machine: end_of(view, now) for view in views if view.state is MachineStatus.GONE}
        listed = {view.machine for view in views}
        self._seen |= listed
        unlisted = look.settleable - listed
        unlisted -= self._too_young(unlisted)
        gone |= {name: now for name in unlisted if not self._may_be_in(name, found.silent)}
        is_open = self._open_machines()
        for name, ended_at in gone.items():
            if name in self._busy:
                continue
            if name in is_open:
                self._ledger.ended(name, ended_at)
            if name in self._nodes:
                self._node_gone(name)
                continue
            known = self._state.core.machines.get(name)
            if known is not None and known.is_alive:
                log_event(log, "machine.gone", machine=name)
                self._state.apply(MachineGone(self._state.now(), name))
        self._settle_doubts(unbilled - listed, look.at, found.silent)

    def _node_gone(self, machine: str) -> None:
        log_event(log, "machine.gone", machine=machine)
        self._ledger.note(self._clock.wall(), "node", f"{machine} is gone; launching another")
        self._nodes.gone(machine)

    def _settle_prices(self, views: Sequence[MachineView]) -> None:
        """Bill machines at the present prices of the clouds that report them."""
        booked = self._ledger.running_prices()
        for view in views:
            if view.machine not in booked or view.state is MachineStatus.GONE or view.machine in self._busy:
                continue
            offer = self._bought.get(view.machine)
            price = view.price_micro_usd_per_hour if offer is None else price_paid(offer, view)
            if price is not None and price != booked[view.machine]:
                self._ledger.repriced(view.machine, price, self._clock.wall())
                log_event(log, "machine.repriced", machine=view.machine, price_usd_per_hour=price / 1e6)

    def _settle_doubts(self, unlisted: set[str], asked_at: float, silent: frozenset[str]) -> None:
        """Close the books of launches that came to nothing, once the lists would have shown them."""
        core = self._state.core.machines
        # One that is just asked to end, which the core repeats until it is gone, is in doubt as before.
        before, ending = self._doubtful, self._open_machines() & self._ending - self._launching
        self._doubtful = {name: doubt for name, doubt in before.items() if name in ending}
        for name in self._open_machines() & unlisted - self._coming:
            is_repeated = name in self._nodes or (name in core and core[name].is_requested)
            if is_repeated and not self._is_closed:  # afterwards nobody asks again, and it may have come
                continue
            since, problem = before.get(name, (asked_at, "the outcome of its launch is unknown"))
            offer = self._bought.get(name)
            lag_s = provider_traits("" if offer is None else offer.provider).launch_lag_s
            if asked_at - since >= lag_s and not self._may_be_in(name, silent):
                self._ledger.failed(name, self._clock.wall(), problem)
                if name in core and core[name].is_alive:  # it was to be ended, should it have come
                    self._state.apply(MachineGone(self._state.now(), name))
            else:
                self._doubtful[name] = since, problem

    def _settle_start(self, view: MachineView, unbilled: set[str]) -> None:
        """Bill a launch that was never confirmed; terminate a machine that is not wanted."""
        is_there = view.state is not MachineStatus.GONE
        if view.machine in unbilled and view.started_at is not None:
            self._note_launch(view)
        if view.machine in self._nodes:
            if is_there:
                self._nodes.came(view.machine, self._clock.now())
            return
        known = self._state.core.machines.get(view.machine)
        if known is None:
            if is_there:
                self.carry_out(TerminateMachine(view.machine, "the run knows no such machine"))
        elif (known.is_requested and (is_there or view.started_at is not None)) or (
            is_there and not known.is_alive
        ):
            log_event(log, "machine.found", machine=view.machine, state=str(known.state))
            kind = self._kind_of(view.machine)  # of an unwanted one, too: the core ends it
            self._state.apply(MachineLaunched(self._state.now(), view.machine, kind))

    def _too_young(self, unlisted: set[str]) -> set[str]:
        """Return those that an earlier coordinator launched so lately that lists may lack them.

        The wall clock may have been set meanwhile, by up to `CLOCK_SET_S`: until this process has looked for
        as long as lists may lag, it takes none of them for gone that may be that young.
        """
        unseen = unlisted - self._seen
        if not unseen:
            return set()
        now, looked_s = self._clock.wall(), self._clock.now() - self._began
        young = set[str]()
        for bill in self._ledger.machines(now):
            if bill.machine in unseen and bill.launched_at is not None:
                lag_s = provider_traits(bill.provider).list_lag_s
                margin_s = CLOCK_SET_S if looked_s < lag_s else 0.0
                if bill.may_be_unlisted(now, lag_s + margin_s):
                    young.add(bill.machine)
        return young

    def _note_launch(self, view: MachineView) -> None:
        """Record where a machine runs and at what price, and bill it from its start."""
        offer = self._bought.get(view.machine)
        if view.zone and offer is not None:
            self._ledger.placed(view.machine, view.zone, price_paid(offer, view))
        self._ledger.launched(view.machine, start_of(view, self._clock.wall()))

    def _may_be_in(self, machine: str, clouds: frozenset[str]) -> bool:
        """Return True if the machine may have been bought in one of `clouds`."""
        offer = self._bought.get(machine)
        return bool(clouds) and (offer is None or offer.provider in clouds)

    def _open_machines(self) -> set[str]:
        """Return the machines but the head that the ledger has open."""
        return set(self._ledger.open_machines()) - {RESERVED_MACHINE}

    def _end_unlisted(self) -> None:
        """Close the books of what the provider no longer lists, or never did."""
        for machine in self._open_machines():
            self._ledger.ended(machine, self._clock.wall())


def _is_final(silence: RLBoostError | OSError | None) -> bool:
    """Return True if a cloud will not answer until a person acts."""
    return isinstance(silence, RLBoostError) and retry_of(silence) is Retry.NEVER


def _unaffordable(problem: str, remedy: str) -> NoCapacity:
    refusal = NoCapacity(problem, remedy)
    refusal.retry_after_s = RETRY_ERROR_S
    return refusal


def _retry_after(error: RLBoostError | OSError) -> float:
    told = getattr(error, "retry_after_s", None)
    return RETRY_ERROR_S if told is None else float(told)
