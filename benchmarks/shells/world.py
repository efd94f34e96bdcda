"""One seed: a run of the real coordinator and agents among faults, and the promises that it must keep."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import json
import logging
import os
import random
import secrets
import shutil
import sqlite3
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from unittest import mock

from benchmarks.shells.cloud import PlayedCloud
from benchmarks.shells.engine import PlayedEngine, manifest_of
from benchmarks.shells.head import SUPERVISOR, Head
from benchmarks.shells.loop import OUTSIDE, OrderedTask, Process, VirtualLoop
from benchmarks.shells.network import End, Network
from benchmarks.shells.puller import PlayedPulls
from benchmarks.shells.storage import AT_ONCE, InlineJournal, PlayedDisk
from benchmarks.shells.trainer import PlayedTrainer, Trained
from rlboost_runtime.agent import engine_host, weight_children
from rlboost_runtime.agent import service as agent_service
from rlboost_runtime.agent.bootstrap import Bootstrap, read_bootstrap
from rlboost_runtime.audit.run import audit
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.coordinator import service
from rlboost_runtime.coordinator.__main__ import EX_IOERR, EX_TEMPFAIL, exit_status
from rlboost_runtime.coordinator.driver import core_driver
from rlboost_runtime.coordinator.observers import priors
from rlboost_runtime.coordinator.storage import journal, snapshot
from rlboost_runtime.job import Job, LocalOffer, ReasoningGym, Rollout, Spot, TinyModel
from rlboost_runtime.job.run import Evidence
from rlboost_runtime.run.folder import RunFolder, read_json, write_json
from rlboost_runtime.run.reserved import RESERVED_MACHINE
from rlboost_runtime.run.resolved import write_resolved
from rlboost_runtime.run.security import create_secrets
from rlboost_runtime.weights.child_pipe import PullRequest

EPOCH = 1_800_000_000.0
RUN = "shells"
STEPS, PROMPTS = 4, 6
AHEAD_SHARE, IN_FLIGHT_SHARE = 0.5, 0.35
"""Of seeds: those in which steps are asked for one ahead, and of these those with in-flight updates."""
MACHINES = 3
FAULTS_S = (30.0, 90.0)
"""Virtual time in which faults happen."""
QUIET_S = 600.0
"""After the last fault the run must end within this time."""
FAULT_EVERY_S = (0.5, 8.0)
RESERVED_AGENT, RESERVED_ROLE = f"{RESERVED_MACHINE}/0", f"agent-{RESERVED_MACHINE}-0"
"""One engine: its instance, and its process on the head."""


DISK_STATUSES = (EX_TEMPFAIL, EX_IOERR)


class BrokenPromise(Exception):
    """A run did what must never happen."""


@dataclass
class Lived:
    """What became of one seed."""

    seed: int
    seconds: float = 0.0
    """Virtual."""
    num_messages: int = 0
    num_events: int = 0
    num_tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    trace: str = ""
    """Digest of everything that was sent and logged."""
    broken: list[str] = field(default_factory=list)


class PlayedClock:
    """A process's clocks: `skew_s` of the wall clock jumps."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.skew_s = 0.0

    def now(self) -> float:
        """Virtual seconds."""
        return self._loop.time()

    def wall(self) -> float:
        """Virtual seconds since the epoch, as this machine has them."""
        return EPOCH + self._loop.time() + self.skew_s

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)


class _Server:
    """In the place of the HTTP server: connections come from the played network."""

    should_exit = False

    async def serve(self, sockets: object) -> None:
        while not self.should_exit:  # noqa: ASYNC110 as uvicorn does
            await asyncio.sleep(0.1)


class World:
    """Everything of one seed."""

    def __init__(
        self, seed: int, folder: Path, loop: VirtualLoop, faults: frozenset[str] | None = None
    ) -> None:
        """`faults`: the kinds that may happen; None: all."""
        self.lived = Lived(seed)
        self.loop = loop
        self._random = Random(f"{seed} world")
        self._wanted = faults
        self._digest = hashlib.blake2b(digest_size=16)
        self.print: Callable[[str], None] = lambda line: None
        self.run = RunFolder(folder)
        self.job = _job()
        self.clock = PlayedClock(loop)
        self.boot_id = "boot 1"
        self.network = Network(Random(f"{seed} network"), self._sent)
        self.cloud = PlayedCloud(Random(f"{seed} cloud"), self, self._count, self._note)
        self.trained = Trained(STEPS, PROMPTS)
        if (mode := Random(f"{seed} mode").random()) < AHEAD_SHARE:
            self.trained.max_staleness, self.trained.in_flight_updates = 1, mode < IN_FLIGHT_SHARE
        self.pulls = PlayedPulls(Random(f"{seed} pulls"), lambda _: self.head.process("weights") is not None)
        self.coordinator: service.Coordinator | None = None
        self._disk: PlayedDisk | None = None
        self._agents: dict[str, Process] = {}
        """By instance; of spot machines only."""
        self._engines: dict[str, PlayedEngine] = {}
        self._num_trainers = 0
        self._died_at = 0.0
        self.head = Head(
            self.run,
            self.job,
            self.clock,
            {
                "coordinator": self._coordinate,
                "weights": self._serve_weights,
                "trainer": self._train,
                RESERVED_ROLE: self._work_reserved,
            },
            self._ended,
            self.trained.broken.append,
            self._later,
        )

    # --- the run ------------------------------------------------------------------------------------------

    async def live(self) -> None:
        """Run to the end. Raises `BrokenPromise`."""
        write_resolved(self.run.job_json, self.job)
        write_json(self.run.endpoint, {"url": "https://127.0.0.1:1"})
        write_json(self.run.weights_endpoint, {"url": "https://127.0.0.1:2"})
        write_json(self.run.wanted, {"train": True})
        self.run.processes.mkdir(exist_ok=True)
        self.head.start()
        faults = self.loop.create_task(self._break_things(), context=OUTSIDE.copy())
        deadline = FAULTS_S[1] + QUIET_S
        while not self.head.is_over:
            if faults.done() and faults.exception() is not None:
                raise faults.exception() or AssertionError
            if self.head.crash is not None:
                raise BrokenPromise(f"a process ended unexpectedly: {self.head.crash!r}") from self.head.crash
            if self.loop.time() > deadline:
                broken = "; ".join(self.trained.broken)
                raise BrokenPromise(f"the run did not end: step {self.trained.next_step} of {STEPS} {broken}")
            await asyncio.sleep(0.5)
        await faults
        self._judge()

    async def _coordinate(self, process: Process) -> int:
        if self.run.events.exists():  # as old as its last line
            os.utime(self.run.events, (self._died_at, self._died_at))
        self.cloud.forget()
        self._disk = disk = PlayedDisk(self._random)
        try:
            self.coordinator = service.Coordinator(self.run, self.job, self.clock, disk)
            await self.coordinator.serve()
        except Exception as problem:  # noqa: BLE001 - judged by whoever waits
            try:
                status = exit_status(problem, self.run.path)
            except Exception as crash:  # noqa: BLE001 - what the coordinator cannot explain
                self.head.crash = crash
                return 1
            self._count(
                "coordinator ends because of its disk" if status in DISK_STATUSES else "coordinator fails"
            )
            return status
        return 0

    async def _serve_weights(self, _: Process) -> int:
        await asyncio.Event().wait()  # until it is killed
        return 0

    async def _train(self, process: Process) -> int:
        self._num_trainers += 1
        await PlayedTrainer(
            RUN,
            f"trainer {self._num_trainers}",
            self.trained,
            self.run.metrics,
            lambda: self._dial(process, None),
            self.clock,
            self._random,
        ).run()
        return 0

    async def _work_reserved(self, process: Process) -> int:
        folder = self.run.reserved / RESERVED_MACHINE
        return await self._agent(process, read_bootstrap(folder / "bootstrap.json"), RESERVED_AGENT, folder)

    def boot(self, bootstrap: Bootstrap) -> None:
        """Start the agents of a machine."""
        for instance in bootstrap.instances:
            process = Process(instance)
            self._agents[instance] = process
            folder = self.run.path / "machines" / instance
            folder.mkdir(parents=True, exist_ok=True)
            process.start(self._work(process, bootstrap, instance, folder))

    async def _work(self, process: Process, bootstrap: Bootstrap, instance: str, folder: Path) -> None:
        await self._agent(process, bootstrap, instance, folder)
        process.kill()
        self._ended(process, False)
        self.loop.call_later(0.5, self.cloud.take, bootstrap.machine, context=OUTSIDE.copy())

    async def _agent(self, process: Process, bootstrap: Bootstrap, instance: str, folder: Path) -> int:
        def make_engine(_: object) -> PlayedEngine:
            self._engines[instance] = engine = PlayedEngine(self._random)
            return engine

        template = PullRequest("", -1, str(folder / "weights"), bootstrap.token, bootstrap.certificate)
        seams = agent_service.Seams(
            lambda: self._dial(process, bootstrap.machine), make_engine,
            weight_children.Puller(template, folder / "puller.log"), PlayedClock(self.loop),
        )  # fmt: skip
        code = await agent_service.Agent(bootstrap, instance, folder, seams).run(asyncio.Event())
        self._note(f"{instance} ends: {code}")
        return int(code)

    def unplug(self, machine: str) -> None:
        """Take a machine away: nobody is told."""
        for instance, process in self._agents.items():
            if instance.rpartition("/")[0] == machine and process.is_alive:
                self._end(process, silently=True)

    def wall(self) -> float:
        """Return the true time."""
        return EPOCH + self.loop.time()

    async def _dial(self, caller: Process, machine: str | None) -> End:
        called = self.head.process("coordinator")
        near, far = await self.network.connect(caller, called)
        coordinator = self.coordinator
        if coordinator is None or called is None or not called.is_alive:
            raise ConnectionRefusedError("nobody listens yet")
        called.start(_answer(coordinator, far, machine))
        return near

    def _post_stop(self, _: RunFolder, body: dict[str, object]) -> bool:
        if self.coordinator is None:
            raise ConnectionRefusedError("nobody listens")
        self.coordinator.end_run(**body)  # type: ignore[arg-type]
        return True

    # --- faults -------------------------------------------------------------------------------------------

    async def _break_things(self) -> None:
        kinds = [
            (name.removeprefix("_fault_").replace("_", " "), getattr(self, name))
            for name in sorted(dir(self))
            if name.startswith("_fault_")
        ]
        weights = {name: self._random.random() ** 2 for name, _ in kinds}
        chosen = [(name, act) for name, act in kinds if self._wanted is None or name in self._wanted]
        until = self._random.uniform(*FAULTS_S)
        while self.loop.time() < until and not self.head.is_over and chosen:
            await asyncio.sleep(self._random.uniform(*FAULT_EVERY_S))
            ((name, act),) = self._random.choices(chosen, [weights[name] for name, _ in chosen])
            if act():
                self._count(name)
        self.cloud.fails = False
        self._note("faults are over")

    def _fault_coordinator_killed(self) -> bool:
        return self.head.kill("coordinator")

    def _fault_trainer_killed(self) -> bool:
        return self.head.kill("trainer")

    def _fault_reserved_agent_killed(self) -> bool:
        return self.head.kill(RESERVED_ROLE)

    def _fault_weight_server_killed(self) -> bool:
        return self.head.kill("weights")

    def _fault_supervisor_killed(self) -> bool:
        return self.head.kill(SUPERVISOR)

    def _fault_power_cut(self) -> bool:
        if self._disk is None or not self.head.cut_power():
            return False
        self._disk.cut_power()
        self.boot_id = f"boot {self.head.num_boots + 1}"
        return True

    def _fault_puller_dies(self) -> bool:
        pull = self.pulls.some()
        if pull is not None:
            pull.die()
        return pull is not None

    def _fault_puller_hangs(self) -> bool:
        pull = self.pulls.some()
        if pull is not None:
            pull.hangs = True
        return pull is not None

    def _fault_machine_vanishes(self) -> bool:
        running = self.cloud.running()
        if running:
            self.cloud.take(self._random.choice(running))
        return bool(running)

    def _fault_agent_killed(self) -> bool:
        alive = self._alive_agents()
        if not alive:
            return False
        instance = self._random.choice(alive)
        self._end(self._agents[instance], silently=False)
        machine = instance.rpartition("/")[0]
        self.loop.call_later(1.0, self.cloud.take, machine, context=OUTSIDE.copy())  # it powers itself off
        return True

    def _fault_notice(self) -> bool:
        alive = self._alive_agents()
        if not alive:
            return False
        instance, seconds = self._random.choice(alive), self._random.uniform(1.0, 30.0)
        (self.run.path / "machines" / instance / "notice.json").write_text(json.dumps({"seconds": seconds}))
        machine = instance.rpartition("/")[0]
        self.loop.call_later(seconds, self.cloud.take, machine, context=OUTSIDE.copy())
        return True

    def _fault_process_paused(self) -> bool:
        everywhere = (*self.head.processes, *self._agents.values())
        processes = [process for process in everywhere if process.is_alive and not process.is_paused]
        if not processes:
            return False
        process = self._random.choice(processes)
        process.pause()
        self._note(f"{process.name} is paused")
        self.loop.call_later(self._random.uniform(0.5, 20.0), process.go_on, context=OUTSIDE.copy())
        return True

    def _fault_connection_cut(self) -> bool:
        ends = self.network.open_ends()
        if ends:
            end = self._random.choice(ends)
            end.drop()
            end.other.drop()
        return bool(ends)

    def _fault_connection_silent(self) -> bool:
        ends = [end for end in self.network.open_ends() if not self._is_on_head(end)]
        if ends:
            end = self._random.choice(ends)
            end.is_mute = True
            end.other.is_mute = self._random.random() < 0.5
        return bool(ends)

    def _fault_disk_full(self) -> bool:
        disk = self._disk
        if disk is None or disk.is_full:
            return False
        disk.is_full = True
        self.loop.call_later(
            self._random.uniform(0.2, 5.0), lambda: setattr(disk, "is_full", False), context=OUTSIDE.copy()
        )
        return True

    def _fault_clock_jumps(self) -> bool:
        self.clock.skew_s += self._random.uniform(-100.0, 100.0)
        return True

    def _fault_engine_dies(self) -> bool:
        engine = self._some_engine()
        if engine is not None:
            engine.die("played")
        return engine is not None

    def _fault_weights_spoilt(self) -> bool:
        engine = self._some_engine()
        if engine is not None:
            engine.spoils_next = True
        return engine is not None

    def _some_engine(self) -> PlayedEngine | None:
        alive = [instance for instance in self._engines if self._is_alive(instance)]
        return self._engines[self._random.choice(alive)] if alive else None

    def _is_on_head(self, end: End) -> bool:
        """Return True for a connection over loopback, which breaks with a process only."""
        names = {end.owner.name, end.other.owner.name}
        return bool(names & {"trainer", RESERVED_ROLE})

    def _is_alive(self, instance: str) -> bool:
        process = (
            self.head.process(RESERVED_ROLE) if instance == RESERVED_AGENT else self._agents.get(instance)
        )
        return process is not None and process.is_alive

    def _alive_agents(self) -> list[str]:
        return [name for name, each in self._agents.items() if each.is_alive]

    def _end(self, process: Process, *, silently: bool) -> None:
        process.kill()
        self._ended(process, silently)

    def _ended(self, process: Process, silently: bool) -> None:
        self._note(f"{process.name} is gone")
        self.network.ended(process, silently=silently)
        if process.name == "coordinator":
            self._leave_books()

    def _leave_books(self) -> None:
        """What a killed coordinator had not committed is rolled back."""
        if self.coordinator is not None:
            with contextlib.suppress(sqlite3.Error, AttributeError):
                self.coordinator._ledger._db.close()
        self.coordinator, self._died_at = None, self.clock.wall()

    def _later(self, act: Callable[[], None], span: tuple[float, float]) -> None:
        self.loop.call_later(self._random.uniform(*span), act, context=OUTSIDE.copy())

    # --- what is seen -------------------------------------------------------------------------------------

    def _sent(self, sender: str, message: bytes) -> None:
        self._digest.update(f"{self.loop.time():.9f} {sender} {len(message)}".encode())
        self._digest.update(message)

    def state(self) -> str:
        """Describe what there is, for a story that ended badly."""
        lines = [f"trainer: step {self.trained.next_step}", f"machines: {', '.join(self.cloud.running())}"]
        if self.coordinator is not None:
            core = self.coordinator._driver.core
            lines.append(f"lease: {core.lease}; newest version {core.newest_version}")
            lines += [f"{each}" for each in core.instances.values()]
            if core.step is not None:
                lines.append(f"step {core.step.step}: {core.step.num_unfinished} responses unfinished")
        return "\n".join(lines)

    def _note(self, line: str) -> None:
        self.print(f"{self.loop.time():9.3f} {line}")

    def _count(self, what: str) -> None:
        self.lived.faults[what] += 1
        self._digest.update(f"{self.loop.time():.9f} {what}".encode())
        self._note(what)

    def _judge(self) -> None:
        outcome = read_json(self.run.outcome) or {}
        broken = list(self.trained.broken)
        if outcome.get("state") != "done":
            broken.append(f"the run ended {outcome}")
        if outcome.get("warning"):
            broken.append(f"machines are left: {outcome['warning']}")
        if self.trained.num_groups != STEPS * PROMPTS:
            broken.append(f"{self.trained.num_groups} groups trained instead of {STEPS * PROMPTS}")
        if left := self.cloud.running():
            broken.append(f"still running: {', '.join(left)}")
        if alive := self.head.processes:
            broken.append(f"still on the head: {', '.join(process.name for process in alive)}")
        doubled = [name for name, times in self.cloud.num_launches.items() if times > 1]
        if doubled:
            broken.append(f"launched twice: {', '.join(doubled)}")
        found = audit(self.run)
        broken += found.problems
        ledger = Ledger(self.run.ledger)
        bills = {bill.machine: bill for bill in ledger.machines(self.wall())}
        if open_bills := ledger.open_machines():
            broken.append(f"open in the ledger: {', '.join(open_bills)}")
        if unbilled := self.cloud.views.keys() - bills.keys():
            broken.append(f"not in the ledger: {', '.join(sorted(unbilled))}")
        steps = [record.step for record in ledger.steps()]
        if steps != list(range(STEPS)):
            broken.append(f"the ledger has steps {steps}")
        ledger.close()
        self.lived.num_tokens = self.trained.num_tokens
        self._digest.update(self.run.events.read_bytes())
        self.lived.num_events = self.run.events.read_bytes().count(b"\n")
        if broken:
            raise BrokenPromise("; ".join(broken))

    @property
    def trace(self) -> str:
        """Digest of all that was sent, broken and logged."""
        return self._digest.hexdigest()


async def _answer(coordinator: service.Coordinator, end: End, machine: str | None) -> None:
    """Serve one connection; it is closed however that ends, as by a web server."""
    try:
        if machine is None:
            await coordinator._trainer.serve(end)
        else:
            await coordinator._agents.serve(end, machine)
    finally:
        end.shut()


def _job() -> Job:
    spot = Spot(any_of=[LocalOffer(infra="local")], min_instances=0, max_instances=MACHINES)
    return Job(
        name=RUN,
        model=TinyModel(init="tiny"),
        data=ReasoningGym(reasoning_gym=["spell_backward"]),
        rollout=Rollout(spot=spot, use_priors=False, seeding_initial_s=3.0),
        evidence=Evidence(keep_journal=True),
    )


_secrets: Path | None = None


def _give_secrets(run: RunFolder) -> None:
    """Copy one run's secrets: making them takes longer than a seed."""
    global _secrets
    if _secrets is None:
        first = RunFolder(Path(tempfile.mkdtemp(prefix="shells-secrets-")) / RUN)
        first.path.mkdir()
        create_secrets(first)
        _secrets = first.path
    shutil.copytree(_secrets, run.path, dirs_exist_ok=True)


@contextlib.contextmanager
def _played(world: World) -> Iterator[None]:
    """Put what is played into the places of what is real."""

    @contextlib.contextmanager
    def bind(run: RunFolder) -> Iterator[None]:
        yield

    numbers = iter(range(1_000_000))
    with contextlib.ExitStack() as stack:
        for where, name, stand_in in (
            (service, "bind", bind),
            (service, "LAG_PROBE_S", 5.0),  # this loop has no lag
            (service, "make_app", lambda *_: None),
            (service, "make_server", lambda *_: _Server()),
            (service, "provider_for", lambda *_: world.cloud),
            (core_driver, "Journal", InlineJournal),
            (core_driver, "_boot", lambda: world.boot_id),
            (journal, "GATHER_S", 0.0),
            (snapshot, "threading", AT_ONCE),
            (priors, "threading", AT_ONCE),
            (engine_host, "read_manifest", lambda folder: manifest_of(int(folder.name))),
            (secrets, "token_hex", lambda _: f"process {next(numbers)}"),
            (weight_children, "_child", world.pulls.child),
        ):
            stack.enter_context(mock.patch.object(where, name, stand_in))
        stack.enter_context(world.head.played(world.cloud, world._post_stop, world.loop))
        yield


def live(
    seed: int,
    *,
    say: Callable[[str], None] | None = None,
    faults: frozenset[str] | None = None,
    is_kept: bool = False,
) -> Lived:
    """Live one seed; return what became of it. `say` takes its story, line by line. `is_kept`: what killed
    processes leave is never collected, for a process that ends soon."""
    place = Path(tempfile.mkdtemp(prefix="shells-", dir=_MEMORY if _MEMORY.is_dir() else None))
    state, hook, collects = random.getstate(), sys.unraisablehook, gc.isenabled()
    gc.disable()  # what killed processes leave would be collected at any time, and it takes a tenth longer
    OrderedTask.restart()
    random.seed(seed)
    logging.disable(logging.CRITICAL)
    sys.unraisablehook = lambda _: None  # what killed processes leave behind is collected here
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lived = _live(seed, place, say, faults, is_kept)
            if not is_kept:
                gc.collect()
    finally:
        if not is_kept:
            sys.unraisablehook = hook
        if collects and not is_kept:
            gc.enable()
        logging.disable(logging.NOTSET)
        random.setstate(state)
        shutil.rmtree(place, ignore_errors=True)
    return lived


def _live(
    seed: int,
    place: Path,
    say: Callable[[str], None] | None,
    faults: frozenset[str] | None,
    is_kept: bool,
) -> Lived:
    folder = place / RUN
    folder.mkdir()
    blocking = Random(f"{seed} calls")
    loop = VirtualLoop(lambda: blocking.uniform(0.001, 0.3))
    world = World(seed, folder, loop, faults)
    if say is not None:
        world.print = say
    lived = world.lived
    try:
        _give_secrets(world.run)
        with _played(world):
            loop.run_until_complete(loop.create_task(world.live(), context=OUTSIDE.copy()))
    except Exception as problem:  # noqa: BLE001 - every end but a quiet one is a finding
        lived.broken.append(f"{type(problem).__name__}: {problem}")
        if say is not None:
            say(traceback.format_exc())
            say(world.state())
    lived.seconds, lived.num_messages, lived.trace = loop.time(), world.network.num_messages, world.trace
    if is_kept:
        _kept.append(loop)
    else:
        loop.forget()
    return lived


_kept: list[VirtualLoop] = []


_MEMORY = Path("/dev/shm")
