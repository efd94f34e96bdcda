"""Keeps one engine alive and at the wanted version; nothing else uses the engine.

Guarantees: requests reach the engine only under the version that it has proved (`served`), by loading
verified files and by a probe whose logprobs match the manifest's; loading, sleeping and waking happen only
while it holds no request; an engine that died is started again and proves its version anew before it serves,
except while it has to sleep: an engine that is down holds no memory, and is started when it has to wake.

Engines by kind; each is imported only when asked for.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from importlib import import_module
from typing import Protocol

import msgspec

from rlboost_runtime.engines.base import (
    NO_PROGRESS,
    Engine,
    EngineDied,
    EngineOutput,
    EngineProgress,
    EngineSpec,
    LoadTimes,
    Request,
)
from rlboost_runtime.errors import ConfigError, ProtocolError, RuntimeFault
from rlboost_runtime.logs import event
from rlboost_runtime.protocol.messages import (
    InstanceReadyMessage,
    Message,
    SleptMessage,
    VersionFetchedMessage,
    VersionRefusedMessage,
)
from rlboost_runtime.seams import Backoff, Clock
from rlboost_runtime.weights.child_pipe import PullReport
from rlboost_runtime.weights.manifest import probe_matches, read_manifest

log = logging.getLogger(__name__)

START_TIMEOUT_S = 180.0
"""Importing torch from a cold disk takes a minute on a small machine."""
QUICK_DEATH_S = 60.0
"""An engine that lives shorter dies quickly."""
MAX_QUICK_DEATHS = 5
"""Quick deaths in a row after which the machine is considered unfit."""
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0


class EngineKeepsDying(RuntimeFault):
    """The engine died quickly several times in a row."""


class HostOwner(Protocol):
    """What the host reports to."""

    def output(self, output: EngineOutput) -> None:
        """Take new tokens and endings."""

    async def room(self) -> None:
        """Return once more outputs may come."""

    def engine_died(self, problem: str) -> None:
        """Note that everything that the engine held is lost."""

    def post(self, message: Message) -> None:
        """Send to the coordinator."""


class EngineHost:
    """One engine, its version, and whether it sleeps."""

    def __init__(
        self,
        make: Callable[[int], Engine],
        pull: Callable[[int], Awaitable[PullReport]],
        owner: HostOwner,
        clock: Clock,
    ) -> None:
        self._make = make  # given the number of the start
        self._pull = pull
        self._owner = owner
        self._clock = clock
        self._engine: Engine | None = None
        self._held: set[int] = set()  # requests that the engine has and that have not ended
        self._wanted: int | None = None
        self._pulled: PullReport | None = None
        self._needs_proof = False
        self._sleep_wanted = False
        self._is_asleep = False
        self._owes_slept = False
        self._may_restart = asyncio.Event()
        self._may_restart.set()
        self._changed = asyncio.Event()
        self._wanted_changed = asyncio.Event()
        self._served: int | None = None
        self._ready: InstanceReadyMessage | None = None
        self._past = NO_PROGRESS

    # --- what the owner calls ------------------------------------------------------------------------------

    @property
    def served(self) -> int | None:
        """The version that is proved and served now."""
        return self._served

    @property
    def is_idle(self) -> bool:
        """True if the engine holds no request."""
        return not self._held

    @property
    def facts(self) -> list[Message]:
        """Messages to repeat to a coordinator that may have missed them."""
        facts: list[Message] = []
        if self._served is not None and self._ready is not None:
            facts.append(self._ready)
        pulled = self._pulled
        if pulled is not None and pulled.version == self._wanted != self._served:
            facts.append(VersionFetchedMessage(pulled.version))
        if self._sleep_wanted and self._holds_no_memory and not self._owes_slept:
            facts.append(SleptMessage())
        return facts

    @property
    def _holds_no_memory(self) -> bool:
        """True if no engine runs or it sleeps: memory is taken by the first load, not by the start."""
        return self._engine is None or self._is_asleep

    def progress(self) -> EngineProgress:
        """Counters over all of this agent's engines."""
        return self._past if self._engine is None else _added(self._past, self._engine.progress())

    def submit(self, requests: list[Request]) -> None:
        """Submit requests to the engine; only while it serves their version."""
        assert self._engine is not None
        self._held.update(request.request_id for request in requests)
        self._engine.submit(requests)

    async def abort(self, request_ids: Iterable[int]) -> None:
        """Stop requests; their endings come through `output`, or through `engine_died`."""
        ids = [request_id for request_id in request_ids if request_id in self._held]
        if ids and self._engine is not None:
            try:
                await self._engine.abort(ids)
            except EngineDied:
                return  # reported by `_keep_engine`

    async def abort_all(self) -> None:
        """Stop everything."""
        await self.abort(list(self._held))

    def request_version(self, version: int) -> None:
        """Fetch `version`; apply and prove it once the engine is awake and idle. The last call counts."""
        self._wanted = version
        self._wanted_changed.set()
        if not self._repeat_ready():
            self._needs_proof = True
        if not self._sleep_wanted:
            self._may_restart.set()
        self._changed.set()

    def sleep(self) -> None:
        """Free the memory once idle."""
        self._sleep_wanted = self._owes_slept = True
        self._may_restart.clear()
        self._changed.set()

    def wake(self) -> None:
        """Take memory again, then apply and prove the version that is wanted."""
        self._sleep_wanted = False
        self._may_restart.set()
        if not self._repeat_ready():
            self._needs_proof = True
        self._changed.set()

    def require_proof(self) -> None:
        """After a new registration serve nothing until requested, and prove it again.

        An engine that is down because it had to sleep stays so until it may load.
        """
        self._served, self._wanted, self._sleep_wanted = None, None, False
        self._needs_proof = True

    def _repeat_ready(self) -> bool:
        """Answer a repeated request at once: what was proved in this registration stays proved."""
        if self._served is None or self._served != self._wanted or self._ready is None:
            return False
        self._owner.post(self._ready)
        return True

    async def run(self) -> None:
        """Work until cancelled. Raises `EngineKeepsDying`."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keep_engine())
                tasks.create_task(self._keep_version())
                tasks.create_task(self._fetch())
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    # --- the engine's life --------------------------------------------------------------------------------

    async def _keep_engine(self) -> None:
        deaths = starts = 0
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            began = self._clock.now()
            engine = self._make(starts)
            starts += 1
            try:
                problem = await self._run_engine(engine)
                self._note_death(engine)
                self._report_death(problem)
            finally:
                await engine.stop()
            if self._clock.now() - began >= QUICK_DEATH_S:
                deaths = 0
                backoff.reset()
            deaths += 1
            event(log, "engine.died", level=logging.WARNING, problem=problem, in_a_row=deaths)
            if deaths >= MAX_QUICK_DEATHS:
                raise EngineKeepsDying(f"the engine died {deaths} times in a row: {problem}", "see its log")
            await self._clock.sleep(backoff.next_s())
            await self._may_restart.wait()

    async def _run_engine(self, engine: Engine) -> str:
        """Start an engine and pass on its outputs until it dies; return why it died."""
        try:
            await engine.start(START_TIMEOUT_S)
            self._engine, self._is_asleep = engine, False
            self._changed.set()
            async for output in engine.outputs():
                self._held.difference_update(end.request_id for end in output.ended)
                self._owner.output(output)
                if not self._held:
                    self._changed.set()
                await self._owner.room()
        except EngineDied as exc:
            return exc.problem
        return "it stopped by itself"

    def _note_death(self, engine: Engine) -> None:
        ended = _added(self._past, engine.progress())
        self._past = replace(ended, running=0, waiting=0, kv_free_tokens=None)
        self._engine = None
        self._held.clear()
        self._served = None
        self._changed.set()  # an engine that is down counts as asleep

    def _report_death(self, problem: str) -> None:
        """Report that nothing is served, before the requests that were lost."""
        if self._wanted is not None and not self._sleep_wanted:
            self._owner.post(
                VersionRefusedMessage(self._wanted, f"the engine died and is being restarted: {problem}")
            )
            self._needs_proof = True
        self._owner.engine_died(problem)

    # --- the version --------------------------------------------------------------------------------------

    async def _keep_version(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if not self.is_idle:
                continue
            if self._engine is None:
                if self._sleep_wanted:
                    self._report_slept()
                continue
            try:
                await self._apply_wanted(self._engine)
            except EngineDied:
                continue  # reported by `_keep_engine`

    async def _apply_wanted(self, engine: Engine) -> None:
        """Bring an idle engine to the wanted state and version."""
        if self._sleep_wanted:
            await self._go_to_sleep(engine)
            return
        wanted = self._wanted
        if wanted is None or not self._needs_proof:
            return
        if self._is_asleep and not await self._wake(engine, wanted):  # while the version is fetched
            return
        pulled = self._pulled
        if pulled is None or pulled.version != self._wanted or self._sleep_wanted:
            return
        self._served = None
        began = self._clock.now()
        problem, times = await _apply(engine, pulled)
        if self._wanted != pulled.version or self._sleep_wanted or self._engine is not engine:
            self._changed.set()  # overtaken meanwhile
            return
        self._needs_proof = False
        if problem is not None:
            self._refuse(pulled.version, problem)
            return
        self._served = pulled.version
        apply_s = self._clock.now() - began
        self._ready = InstanceReadyMessage(
            pulled.version,
            pulled.pulled_bytes,
            pulled.pull_s,
            apply_s,
            round(times.load_s, 4),
            round(times.pause_s, 4),
            times.start_s,
            pulled.how,
            pulled.full_bytes,
            pulled.sources,
            pulled.complaints,
            *(msgspec.structs.astuple(cache) if (cache := engine.kv_cache) else ()),
        )
        event(
            log,
            "version.served",
            version=pulled.version,
            pull_s=pulled.pull_s,
            apply_s=round(apply_s, 4),
            load_s=self._ready.load_s,
            pause_s=self._ready.pause_s,
        )
        self._owner.post(self._ready)

    async def _wake(self, engine: Engine, version: int) -> bool:
        """Let the engine take memory; if it cannot, refuse the version and return False."""
        try:
            await engine.wake()
        except EngineDied:
            raise
        except RuntimeFault as exc:
            self._refuse(version, exc.problem)
            return False
        self._is_asleep = False
        event(log, "engine.woken")
        return True

    async def _go_to_sleep(self, engine: Engine) -> None:
        self._served = None
        if not self._is_asleep:
            try:
                await engine.sleep()
            except EngineDied:
                raise
            except RuntimeFault as exc:
                event(log, "engine.sleepless", level=logging.WARNING, problem=exc.problem)
                await engine.stop()  # memory is free once it has ended; `_keep_engine` reports the rest
                return
            self._is_asleep = True
            event(log, "engine.slept")
        if self._sleep_wanted:
            self._report_slept()
        else:
            self._changed.set()

    def _report_slept(self) -> None:
        """Answer the request to sleep, once."""
        if self._owes_slept:
            self._owes_slept = False
            self._owner.post(SleptMessage())

    def _refuse(self, version: int, problem: str) -> None:
        """Refuse a version, and forget its files: the next request fetches or verifies them again."""
        self._pulled = self._wanted = None
        event(log, "version.refused", level=logging.WARNING, version=version, problem=problem)
        self._owner.post(VersionRefusedMessage(version, problem))

    async def _fetch(self) -> None:
        """Pull the wanted version, also while the engine serves an older one."""
        while True:
            self._wanted_changed.clear()
            version = self._wanted
            if version is None or (self._pulled is not None and self._pulled.version == version):
                await self._wanted_changed.wait()
                continue
            try:
                pulled = await self._pull_unless_overtaken(version)
            except RuntimeFault as exc:
                if self._wanted == version:
                    self._refuse(version, exc.problem)
                continue
            if pulled is not None:
                num_bytes, seconds = pulled.pulled_bytes, pulled.pull_s
                event(log, "version.pulled", version=version, num_bytes=num_bytes, seconds=seconds)
                self._pulled = pulled
                self._owner.post(VersionFetchedMessage(version))
                self._changed.set()

    async def _pull_unless_overtaken(self, version: int) -> PullReport | None:
        """Pull; None if another version was wanted before it was done."""
        pulling = asyncio.ensure_future(self._pull(version))
        try:
            while not pulling.done():
                overtaken = asyncio.ensure_future(self._wanted_changed.wait())
                await asyncio.wait({pulling, overtaken}, return_when=asyncio.FIRST_COMPLETED)
                overtaken.cancel()
                if not pulling.done() and self._wanted != version:
                    return None
                self._wanted_changed.clear()
            return pulling.result()
        finally:
            pulling.cancel()
            await asyncio.gather(pulling, return_exceptions=True)


def _added(past: EngineProgress, now: EngineProgress) -> EngineProgress:
    """Return what the engine does now, with counters over all engines so far."""
    return replace(
        now,
        counter=past.counter + now.counter,
        tokens_generated=past.tokens_generated + now.tokens_generated,
        preempted=past.preempted + now.preempted,
    )


async def _apply(engine: Engine, pulled: PullReport) -> tuple[str | None, LoadTimes]:
    """Load and probe; the problem is None if the engine has proved that it holds the version."""
    times = LoadTimes(0.0, 0.0, {})
    try:
        manifest = read_manifest(pulled.path)
        if engine.version != pulled.version:
            times = await engine.load(pulled.version, pulled.path) or times
        probe = manifest.probe
        token_ids, logprobs = await engine.greedy(list(probe.token_ids), len(probe.next_token_ids))
    except EngineDied:
        raise
    except (RuntimeFault, ProtocolError) as exc:
        return exc.problem, times
    return probe_matches(manifest, token_ids, logprobs), times


ENGINE = "RLBOOST_ENGINE"
"""Environment variable: MODULE:CLASS of an `Engine` that takes the place of the job's, for load tests."""


def make_engine(spec: EngineSpec) -> Engine:
    """Return an engine of `spec.kind`, or that of `ENGINE`, not started. Raises `ConfigError` for an unknown
    kind."""
    if other := os.environ.get(ENGINE):
        module, _, name = other.partition(":")
        stand_in: Engine = getattr(import_module(module), name)(spec)
        return stand_in
    match spec.kind:
        case "transformers":
            from rlboost_runtime.engines.transformers.engine import TransformersEngine

            return TransformersEngine(spec)
        case "vllm":
            from rlboost_runtime.engines.vllm.engine import VllmServerEngine

            return VllmServerEngine(spec)
        case "emulated":
            from rlboost_runtime.engines.emulated import EmulatedEngine

            return EmulatedEngine(spec)
        case _:
            raise ConfigError(f"no engine of kind {spec.kind!r}", "use vllm or transformers")
