"""The coordinator process: one asyncio loop that owns the core, the tokens, the books and every connection.

It ends in one way: `end_run` writes `ending.json`, the fleet is taken down, the books are closed,
`outcome.json` is written, and the loop returns; a coordinator that finds an ending goes on with that. How the
run ended is decided by `end_run` alone: machines that could not be ended add a warning to the outcome. A
SIGTERM instead leaves the run open: all is on disk, and the next coordinator goes on with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from rlboost_providers.base.provider import Provider
from rlboost_providers.registry import provider_for
from rlboost_runtime.billing.accounts import room_micro_usd, stay_micro_usd, to_ns
from rlboost_runtime.billing.launch_records import (
    LaunchBackup,
    LaunchRecords,
    MachineRecord,
    own_head_machine,
)
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.coordinator.driver.core_driver import CoreDriver
from rlboost_runtime.coordinator.driver.ingest import Ingest
from rlboost_runtime.coordinator.driver.totals import recover
from rlboost_runtime.coordinator.fleet.controller import FleetController, MachineMaker
from rlboost_runtime.coordinator.fleet.offer_rank import OfferRank
from rlboost_runtime.coordinator.fleet.reserved_nodes import ReservedNodes
from rlboost_runtime.coordinator.links.agents import AgentLinks, InstanceStats, Timing
from rlboost_runtime.coordinator.links.requests import serve_requests
from rlboost_runtime.coordinator.links.server import Handlers, bind, make_app, make_server
from rlboost_runtime.coordinator.links.trainer import TrainerLink
from rlboost_runtime.coordinator.links.weights import WeightTracker
from rlboost_runtime.coordinator.observers.boot_times import BootTimes
from rlboost_runtime.coordinator.observers.priors import PriorKeeper
from rlboost_runtime.coordinator.observers.steps import ReservedMeter
from rlboost_runtime.coordinator.observers.timeline import Timeline
from rlboost_runtime.coordinator.observers.waste import WasteMeter
from rlboost_runtime.coordinator.status import StatusSources, build_status, fleet_facts
from rlboost_runtime.coordinator.tunables import core_config
from rlboost_runtime.core.base.messages import Command, Event, Pool, RunEnding
from rlboost_runtime.core.base.prior import Prior
from rlboost_runtime.core.core import Core
from rlboost_runtime.core.state.machines import MachineState, first_free_number
from rlboost_runtime.deploy.bootstrap import instances_of, make_bootstrap
from rlboost_runtime.deploy.shipment import Software, archive, common_part
from rlboost_runtime.deploy.wheelhouse import Wheelhouse
from rlboost_runtime.errors import NotFound, RLBoostError, RuntimeFault
from rlboost_runtime.job import Job, LocalOffer
from rlboost_runtime.logs import event as log_event
from rlboost_runtime.money import parse_usd
from rlboost_runtime.run.checkpoints import ancestors_of
from rlboost_runtime.run.credentials import Revocations
from rlboost_runtime.run.folder import RunFolder, give_up_reserve, read_json, write_json
from rlboost_runtime.run.head import url_seen_by
from rlboost_runtime.run.priors import PriorStore
from rlboost_runtime.run.reserved import RESERVED_MACHINE, is_reserved, joined_nodes, node_of
from rlboost_runtime.run.security import read_token
from rlboost_runtime.seams import Clock, Disk

log = logging.getLogger(__name__)

HOUSEKEEPING_S = 1.0
"""How often status is written, waste is metered and the budget is checked."""
RATE_WINDOW_S = 5.0
"""Tokens per second are a mean over this time."""
LAG_PROBE_S = 0.02
"""Spacing of the event loop's lag probes; p99 is over the last minute."""
END_TIMEOUT_S = 180.0
"""Longest wait for the provider to report that the fleet is gone; then the outcome has a warning. Above what
a cloud may take to list a launch that nobody knows the outcome of (`base.traits.LAUNCH_LAG_S`)."""
DISK_PATIENCE_S = 900.0
"""Longest pause because the journal cannot be written: time to make room. After it the run ends, so that no
idle fleet is paid for until somebody looks; nothing that was trained or acknowledged is lost."""
EXIT_CODES = {"done": 0, "failed": 1, "stopped": 0, "budget": 5}


class DiskPatienceOver(Exception):
    """The disk has refused the journal for `DISK_PATIENCE_S`."""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How the run ends."""

    state: str
    problem: str
    remedy: str
    exit_code: int
    warning: str = ""
    """Why machines of the run may still cost money; which ones is in the books."""


class Coordinator:
    """Everything of one run on the head node; the `Outlet` of the core's commands."""

    def __init__(self, run: RunFolder, job: Job, clock: Clock, disk: Disk) -> None:
        self._run = run
        self._job = job
        self._clock = clock
        run.journal.mkdir(exist_ok=True)
        self._ledger = Ledger(run.ledger)
        self._config = core_config(job)
        self._changed = asyncio.Event()
        core, totals, *_ = recovered = recover(run.events, run.snapshot)
        timing = Timing.of(self._config)
        bought = (bill.machine for bill in self._ledger.machines(clock.wall()))
        is_open = self._ledger.open_machines()
        self._nodes = ReservedNodes(job.trainer.bought_nodes, bought, is_open, clock.now(), joined_nodes(run))
        weights = WeightTracker(self._ledger.zone_of, self._bill_egress)
        stats = InstanceStats(weights, timing.flush_s)
        boot_times = BootTimes(lambda: core.machines)
        boot_times.recall(self._ledger)
        reserved = ReservedMeter()
        self._waste = WasteMeter(self._ledger, core, totals, self._engines_on)
        self._timeline = Timeline(self._ledger, clock, core)
        self._priors = PriorStore(job, run.name)
        self._driver = CoreDriver(
            run,
            recovered,
            clock,
            disk,
            self,
            (self._timeline, reserved, self._waste, stats, PriorKeeper(self._priors, clock), self),
            keep_journal=job.evidence.keep_journal,
        )
        self._agents = AgentLinks(
            self._driver,
            Ingest(self._driver, (self._waste, boot_times)),
            weights,
            boot_times,
            stats,
            timing,
            self._nodes,
        )
        markets = [offer.market for offer in job.rollout.spot.local_offers if offer.market is not None]
        self._trainer = TrainerLink(
            self._driver,
            self._ledger,
            clock,
            weights,
            reserved,
            self.end_run,
            is_market_ours=bool(markets),
        )
        self.to_agent, self.work = self._agents.carry_out, self._agents.work
        self.deliver, self.lease = self._trainer.deliver, self._trainer.lease
        provider: Provider = provider_for(job, run)
        cap = job.budget.max_usd_per_hour
        self._fleet = FleetController(
            self._driver,
            self._ledger,
            provider,
            MachineMaker(run.name, self._bootstrap, run.logs / "machines"),
            clock,
            None if cap is None else round(cap * 1_000_000),
            None if job.budget.max_usd is None else self._room_micro_usd,
            job.rollout.spot.on_demand_floor,
            LaunchRecords(run.cloud / "bought.json"),
            LaunchBackup(run, job.output).put if _launches_elsewhere(job) else None,
            OfferRank(job, lambda: self._driver.core, self._ledger.zone_of),
            self._nodes,
        )
        self.fleet = self._fleet.carry_out
        self._sources = StatusSources(
            job, run.name, clock.wall(), self._driver, self._agents, self._trainer, self._ledger,
            tuple(ancestors_of(run)),
        )  # fmt: skip
        head = own_head_machine(run)
        self._stay_micro_usd = 0 if head is None else stay_micro_usd(head)
        self._wheelhouses = {
            is_node: Wheelhouse(partial(self._shipment, is_node)) for is_node in (False, True)
        }
        """Of spot machines, and of the trainer's further nodes."""
        self._joined_nodes: list[str] | None = None if self._nodes.machines else []
        """As `trainer_nodes.json` has it; None: not written yet."""
        self._ending: RunEnd | None = None
        self._revoked, self._known_revoked = Revocations(run), frozenset[str]()
        self._revoked_until = 0
        """Up to where `Ledger.ended_since` was revoked."""
        self._paused_since: float | None = None
        self._end_asked = asyncio.Event()
        self._leave = asyncio.Event()

    def _bill_egress(self, transfer: str, machine: str, source: str, num_bytes: int) -> None:
        self._ledger.add_egress(transfer, machine, source, num_bytes, self._clock.wall())

    # --- life ---------------------------------------------------------------------------------------------

    def observe(self, event: Event, commands: Sequence[Command], core: Core) -> None:
        """Wake the timer: the core's next deadline may have changed."""
        self._changed.set()

    async def serve(self) -> None:
        """Serve until the run has ended or SIGTERM asks to leave it open. Raises `RLBoostError`."""
        try:
            await self._serve()
        except ExceptionGroup as group:
            first, *others = leaves(group)
            if isinstance(first, RLBoostError) and not others:
                raise first from group
            raise

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._leave.set)
        self._driver.journal.start(loop)
        try:
            with bind(self._run) as listener:
                await self._serve_on(listener)
        except BaseException:
            with contextlib.suppress(RuntimeFault):  # the first problem is the one that is reported
                await self._driver.close()
            raise
        await self._driver.close()
        self._agents.boot_times.keep(self._ledger)
        self._write_status()
        if self._ending is not None and not self._leave.is_set():
            outcome = replace(self._ending, state=_state_of(self._ending))
            write_json(self._run.outcome, asdict(outcome), durably=True)
        self._ledger.close()

    async def _serve_on(self, listener: socket.socket) -> None:
        self._learn_weights_url()
        server = make_server(make_app(self._handlers(), read_token(self._run)), self._run)
        self._open_books()
        self._go_on_ending()
        named = first_free_number(bill.machine for bill in self._ledger.machines(self._clock.wall()))
        self._driver.begin(self._config, await self._prior(), named)
        for text in self._driver.repairs:
            log_event(log, "storage.repaired", level=logging.WARNING, problem=text)
            self._ledger.note(self._clock.wall(), "storage", text)
        self._revoke()
        log_event(log, "coordinator.started", url=(read_json(self._run.endpoint) or {}).get("url"))
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve(sockets=[listener]))
            workers = [
                tasks.create_task(self._fleet.serve()),
                tasks.create_task(self._driver.broken()),
                tasks.create_task(self._tick()),
                tasks.create_task(self._keep_house()),
                tasks.create_task(self._probe_lag()),
            ]
            leave = asyncio.ensure_future(self._leave.wait())
            end = asyncio.ensure_future(self._end_asked.wait())
            await asyncio.wait({leave, end, serving}, return_when=asyncio.FIRST_COMPLETED)
            if self._ending is not None:
                await self._wind_up(self._ending)
            for task in (*workers, leave, end):
                task.cancel()
            server.should_exit = True

    async def _prior(self) -> Prior | None:
        """Return what a former run like this one measured, and note it; None for a run that has begun."""
        if not (self._driver.is_new and self._job.rollout.use_priors):
            return None
        kept = await asyncio.to_thread(self._priors.read)
        if kept is None:
            return None
        text = f"begins with what {kept.run} measured in {kept.prior.num_steps} steps"
        self._ledger.note(self._clock.wall(), "prior", text)
        return kept.prior

    def end_run(self, state: str, problem: str, remedy: str, exit_code: int | None = None) -> None:
        """End the run, once: `state` is done, failed, stopped or budget; None: the state's own exit code."""
        if self._ending is None:
            code = EXIT_CODES.get(state, 1) if exit_code is None else exit_code
            self._ending = RunEnd(state, problem, remedy, code)
            log_event(log, "run.ending", state=state, problem=problem)
            self._timeline.end()
            give_up_reserve(self._run)
            try:
                write_json(self._run.ending, asdict(self._ending), durably=True)
            except OSError as error:  # only a crash from here on to the outcome would miss it
                log_event(log, "ending.write_failed", problem=str(error))
            self._end_asked.set()

    def _go_on_ending(self) -> None:
        """If a former coordinator was winding the run up, continue that and do nothing else."""
        ending = read_json(self._run.ending)
        if ending is not None:
            self._ending = msgspec.convert(ending, RunEnd)
            log_event(log, "run.still_ending", state=self._ending.state)
            self._timeline.end()
            give_up_reserve(self._run)
            self._fleet.close()
            self._end_asked.set()

    async def _wind_up(self, ending: RunEnd) -> None:
        now = self._clock.wall()
        text = f"run {_state_of(ending)}" + (f": {ending.problem}" if ending.problem else "")
        self._ledger.note(now, "ended", text)
        self._driver.requests.refuse_all(f"the run has ended: {ending.state}")
        self._driver.apply(RunEnding(self._driver.now(), ending.state))
        self._agents.stop_all(ending.state)
        left = await self._fleet.end_all(END_TIMEOUT_S)
        if left:
            self._ending = replace(ending, warning=_warning(left, self._fleet.silence))
            log_event(log, "machines.left", machines=left, problem=str(self._fleet.silence))
        self._ledger.ended(RESERVED_MACHINE, self._clock.wall())
        self._waste.flush()
        self._note_served()
        self._sources.ended = _state_of(self._ending or ending)

    def _open_books(self) -> None:
        now = self._clock.wall()
        bought = own_head_machine(self._run)
        head = _own_machine(self._job, now) if bought is None else bought
        self._ledger.intend(replace(head, machine=RESERVED_MACHINE))
        if bought is not None:
            self._ledger.stayed(RESERVED_MACHINE, bought.intended_at)
        is_first = RESERVED_MACHINE in self._ledger.unbilled_machines()
        launched_at = head.launched_at if is_first else None  # a machine of ours is billed anew
        self._ledger.launched(RESERVED_MACHINE, now if launched_at is None else launched_at)
        if bought is None:  # the head before this one may have been a dearer machine
            self._ledger.repriced(RESERVED_MACHINE, head.price_micro_usd_per_hour, now)
        first = self._ledger.machines(now)[0].launched_at
        self._sources.started_at = now if first is None else first

    def _engines_on(self, machine: str) -> int:
        if is_reserved(machine):
            return self._job.trainer.local_engines
        offer = self._fleet.offer_of(machine)
        return self._job.rollout.engines_on(None if offer is None else offer.accelerator)

    def _bootstrap(self, machine: str) -> dict[str, object]:
        pool = Pool.RESERVED if is_reserved(machine) else Pool.SPOT
        built = make_bootstrap(
            self._job, self._run, machine, pool, instances_of(machine, self._engines_on(machine))
        )
        offer = self._fleet.offer_of(machine)
        if offer is not None:
            built = msgspec.structs.replace(
                built,
                egress_usd_per_gb=offer.egress_micro_usd_per_gb / 1e6,
                price_usd_per_hour=offer.price_micro_usd_per_hour / 1e6,
            )
        value = msgspec.to_builtins(built)
        assert isinstance(value, dict)
        return value

    def _handlers(self) -> Handlers:
        return Handlers(
            agent=self._agents.serve,
            trainer=self._trainer.serve,
            requests=partial(serve_requests, self._driver),
            status=self._status,
            preempt=self._preempt,
            stop=self.end_run,
            runtime=self._runtime,
            wheels=self._wheels,
            is_live=self._is_live,
        )

    async def _runtime(self, machine: str) -> bytes:
        return await asyncio.to_thread(lambda: archive(self._shipment(_is_node(machine))))

    def _shipment(self, is_node: bool) -> Path:
        rollout = self._job.rollout
        software = Software.for_engine(rollout.engine, rollout.engine_args.python)
        if is_node:
            return common_part(self._run.cloud / "shipment-node", replace(software, trains=True))
        return common_part(self._run.cloud / "shipment", software)

    async def _wheels(self, machine: str, name: str) -> dict[str, object] | None:
        files = await asyncio.to_thread(self._wheelhouses[_is_node(machine)].contents, name)
        served = read_json(self._run.weights_endpoint)
        if files is None or served is None:
            return None
        return {"url": f"{url_seen_by(machine, served)}/v1/wheels/", "files": files}

    async def _preempt(self, name: str, notice_s: float | None) -> None:
        core = self._driver.core
        instance = core.instances.get(name)
        machine = name if instance is None else instance.machine
        alive = {known.machine for known in core.machines.values() if known.is_alive}
        if machine in alive:
            try:
                await self._fleet.preempt(machine, notice_s)
                return
            except NotFound:  # it is gone already, unnoticed so far
                alive.remove(machine)
        others = f"choose one of: {', '.join(sorted(alive))}"
        raise NotFound(
            f"no living spot machine or instance {name}",
            others if alive else "no spot machine is alive at the moment",
        )

    # --- tasks --------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            deadline = self._driver.core.next_deadline()
            self._changed.clear()
            try:
                async with asyncio.timeout(
                    None if deadline is None else max(0.0, deadline - self._driver.now())
                ):
                    await self._changed.wait()
            except TimeoutError:
                self._driver.tick()

    async def _keep_house(self) -> None:
        seen: deque[tuple[float, int]] = deque()
        while True:
            now = self._driver.now()
            seen.append((now, self._agents.ingest.tokens_accepted))
            while now - seen[0][0] > RATE_WINDOW_S:
                seen.popleft()
            span = now - seen[0][0]
            if span > 0:
                self._sources.tokens_per_s = (seen[-1][1] - seen[0][1]) / span
            self._waste.advance(now)
            self._driver.requests.drop_unwanted()
            self._agents.boot_times.keep(self._ledger)
            self._ledger.write_notes()
            self._note_served()
            self._check_disk(now)
            self._check_budget()
            self._check_health()
            self._write_status()
            self._revoke()
            self._learn_weights_url()
            self._note_nodes()
            await self._clock.sleep(HOUSEKEEPING_S)

    async def _probe_lag(self) -> None:
        lags: deque[float] = deque(maxlen=round(60 / LAG_PROBE_S))
        loop = asyncio.get_running_loop()
        for number in itertools.count(1):
            due = loop.time() + LAG_PROBE_S
            await asyncio.sleep(LAG_PROBE_S)
            lags.append(max(0.0, loop.time() - due))
            if number % 50 == 0:
                self._sources.loop_lag_p99_ms = 1000 * sorted(lags)[int(0.99 * (len(lags) - 1))]

    def _note_served(self) -> None:
        totals = self._driver.totals
        self._ledger.note_served(totals.requests_finished, totals.request_tokens)

    def _check_disk(self, now: float) -> None:
        """Note when the run waits for the disk and when it goes on; raise once it has waited too long."""
        if self._driver.journal_problem is None:
            if self._paused_since is not None:
                self._ledger.note(
                    self._clock.wall(), "disk", "the disk can be written again: the run continues"
                )
            self._paused_since = None
        elif self._paused_since is None:
            self._paused_since = now
            problem = self._driver.journal_problem
            text = f"the run waits for its disk ({problem}): make room, and it continues"
            self._ledger.note(self._clock.wall(), "disk", text)
        elif now - self._paused_since > DISK_PATIENCE_S:
            raise DiskPatienceOver(self._driver.journal_problem)

    def _check_budget(self) -> None:
        budget = self._job.budget.max_usd
        if budget is None:
            return
        if self._room_micro_usd() <= 0:
            self.end_run(
                "budget",
                f"the budget of ${budget:.2f} is spent after {self._ledger.step_summary(0).num_steps} steps",
                f"raise budget.max_usd in the job file and type: rlboost launch {self._run.name} --resume",
            )

    def _check_health(self) -> None:
        """Note warnings on the fleet and the bill that begin or end; none while the run is wound up."""
        if self._ending is not None:
            return
        now = self._clock.wall()
        for change in self._trainer.health.look(fleet_facts(self._sources, now)):
            self._ledger.note(now, change.kind, change.text)

    def _room_micro_usd(self) -> int:
        """Return the part of the budget that is neither spent nor committed."""
        now, ledger = self._clock.wall(), self._ledger
        budget = parse_usd(self._job.budget.max_usd or 0.0) - self._stay_micro_usd
        return room_micro_usd(budget, ledger.total_micro_usd(now), ledger.machines(now), to_ns(now))

    def _note_nodes(self) -> None:
        """Say which of the trainer's further nodes are there: without all of them it cannot train."""
        joined = self._fleet.joined_nodes()
        if joined != self._joined_nodes:
            try:
                write_json(self._run.trainer_nodes, {"joined": joined})
            except OSError as problem:  # tried again a second later
                log_event(log, "nodes.write_failed", problem=str(problem))
            else:
                self._joined_nodes = joined

    def _learn_weights_url(self) -> None:
        if not self._agents.weights_endpoint:
            self._agents.weights_endpoint = read_json(self._run.weights_endpoint) or {}

    def _status(self) -> dict[str, object]:
        return build_status(self._sources, self._clock.wall())

    def _is_live(self, machine: str) -> bool:
        """Return True for a machine whose credential is good: one of this run's, not ended, never revoked."""
        is_revoked = machine in self._known_revoked or machine in self._ended()
        return self._agents.is_live(machine) and not is_revoked

    def _ended(self) -> set[str]:
        """Return the machines that we have asked to end, or that are gone, as far as the core remembers."""
        machines = self._driver.core.machines.items()
        return {
            name for name, each in machines if each.state in (MachineState.TERMINATING, MachineState.GONE)
        }

    def _revoke(self) -> None:
        """Revoke the credentials of machines that ended, for this process, the weight server and later
        coordinators. What the core forgot, or lost in a power cut, the ledger still names."""
        booked, mark = self._ledger.ended_since(self._revoked_until)
        ended = ({*booked} | self._ended()) - {RESERVED_MACHINE}
        try:
            self._revoked.add(ended)
            self._known_revoked = self._revoked.machines()
            self._revoked_until = mark
        except (OSError, RuntimeFault) as problem:  # tried again a second later
            self._known_revoked |= ended
            log_event(log, "credentials.not_revoked", problem=str(problem))

    def _write_status(self) -> None:
        try:
            write_json(self._run.status, self._status())
        except OSError as problem:
            log_event(log, "status.write_failed", problem=str(problem))


def _is_node(machine: str) -> bool:
    return node_of(machine) is not None


def _launches_elsewhere(job: Job) -> bool:
    """Return True if machines may outlive this one: a copy of what was launched is then kept elsewhere."""
    are_here = all(isinstance(offer, LocalOffer) for offer in job.rollout.spot.any_of)
    return job.output is not None and not (are_here and job.trainer.bought_nodes == 0)


def _own_machine(job: Job, now: float) -> MachineRecord:
    """Return this machine, which is not rented, at the price that the job states."""
    return MachineRecord(
        machine=RESERVED_MACHINE,
        provider=job.trainer.infra,
        zone="local",
        accelerator="cpu",
        price_micro_usd_per_hour=round(job.trainer.price_usd_per_hour * 1_000_000),
        price_source="job file: trainer.price_usd_per_hour",
        intended_at=now,
        pool=Pool.RESERVED,
    )


def _warning(left: Sequence[str], silence: RLBoostError | OSError | None) -> str:
    """Return why the machines `left` may still cost money."""
    names = ", ".join(left)
    match silence:
        case None:
            return f"the cloud has not terminated {names} yet"
        case RLBoostError(problem=problem):
            return f"the cloud could not be asked about {names}: {problem}"
        case TimeoutError():
            return f"the cloud did not answer in time about {names}"
    return f"the cloud could not be asked about {names}: {silence}"


def _state_of(ending: RunEnd) -> str:
    return "stopped" if ending.state == "budget" else ending.state


def leaves(error: Exception) -> Iterator[Exception]:
    """Yield the problems in `error`, out of however many groups."""
    if isinstance(error, ExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error
