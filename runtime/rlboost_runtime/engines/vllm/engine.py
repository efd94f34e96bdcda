"""`VllmServerEngine`: vLLM's own server as a child process, driven by token ids.

Beyond the contract (`engines.base.Engine`):

- the server is started by the first load, with that version's weights; later versions are taken in place:
  pause -> start -> update -> finish -> resume, also while requests run, whose tokens then carry the version
  that each was sampled under;
- whatever ends a stream early (an error inside an HTTP 200, a missing finish, a lost connection), the tokens
  that came are kept; a server that no longer answers is ended and reported as `EngineDied`;
- a swap that fails half-way ends the server: nothing is ever served from a mixture.

How tokens are requested and weights are swapped is found by probing the server, not by its version.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rlboost_runtime.engines import model_folder
from rlboost_runtime.engines.base import (
    EngineDied,
    EngineOutput,
    EngineProgress,
    EngineSpec,
    KvCache,
    LoadFailed,
    LoadTimes,
    Request,
    running_of,
)
from rlboost_runtime.engines.model_folder import Unreadable
from rlboost_runtime.engines.vllm.api import ApiError, StreamBroken, TokenApi, request_body
from rlboost_runtime.engines.vllm.command import most_running
from rlboost_runtime.engines.vllm.drafts import gate_drafts
from rlboost_runtime.engines.vllm.metrics import PATH as METRICS
from rlboost_runtime.engines.vllm.metrics import kv_cache, watch_load
from rlboost_runtime.engines.vllm.server import VllmServer, fp8_problem
from rlboost_runtime.engines.vllm.streams import OutputQueue, Streams, TaskSet
from rlboost_runtime.engines.vllm.swap import ServedModel, Swapper, base_folder, is_adapter, peft_folder
from rlboost_runtime.errors import ConfigError, RuntimeFault
from rlboost_runtime.logs import event
from rlboost_runtime.protocol.messages import Sampling
from rlboost_runtime.run.engine_python import EnginePython, find_engine_python

log = logging.getLogger(__name__)

START_TIMEOUT_S = 900.0
"""Longest start of a server: a large model is read from disk, and compiled where nothing is cached."""
LAST_OUTPUT_S = 2.0
"""Time to read what a dead server had already written."""
_UNSUPPORTED = frozenset({403, 404, 405, 501})
"""Answers of a server that does not support a dialect, or was not started for it."""


@dataclass(frozen=True, slots=True)
class _Serving:
    """A server that is up, and everything that belongs to it alone."""

    server: VllmServer
    model: ServedModel
    swapper: Swapper
    streams: Streams
    tasks: TaskSet
    kv_cache: KvCache | None


class VllmServerEngine:
    """See `engines.base.Engine` for the contract."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._python: EnginePython | None = None
        self._starting: VllmServer | None = None
        self._serving: _Serving | None = None
        self._version: int | None = None
        self._died: str | None = None
        self._stopped = False
        self._queue = OutputQueue()
        self._names = itertools.count()
        self._steps = 0

    @property
    def kv_cache(self) -> KvCache | None:
        """The server's cache, as it reports it; None before the first load, or of an older vLLM."""
        return None if self._serving is None else self._serving.kv_cache

    @property
    def version(self) -> int | None:
        """Policy version being served."""
        return self._version

    @property
    def server(self) -> VllmServer:
        """The server that is up. Raises `RuntimeFault`."""
        return self._up().server

    @property
    def streams(self) -> Streams:
        """Its requests. Raises `RuntimeFault`."""
        return self._up().streams

    async def start(self, timeout_s: float) -> None:
        """Find vLLM; the server itself is started by the first `load`, which brings the model.

        Raises `EngineDied`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                self._python = await asyncio.to_thread(find_engine_python, self._spec.vllm.python)
                problem = await self._unfit(self._python)
        except ConfigError as exc:
            raise EngineDied(str(exc), exc.remedy) from exc
        except TimeoutError:
            raise EngineDied(f"vLLM was not found within {timeout_s:g} s", "check the disk") from None
        if problem is not None:
            raise EngineDied(problem, "change rollout.engine_args")
        event(log, "engine.found", python=str(self._python.path), vllm=self._python.version)

    def submit(self, requests: list[Request]) -> None:
        """Start requests; what cannot be accepted comes back as failed."""
        for request in requests:
            self._steps += 1
            problem = self._refusal(request)
            if problem is not None:
                self._queue.put(-1).end(request.request_id, "failed", problem)
            elif request.max_new_tokens <= 0:  # vLLM refuses it, and nothing is left to generate
                self._queue.put(self.streams.label).end(request.request_id, "length")
            else:
                self.streams.submit(request)

    async def abort(self, request_ids: list[int]) -> None:
        """Stop these; their last outputs are queued when this returns. Raises `EngineDied`."""
        self._check_alive()
        if self._serving is not None:
            await self._serving.streams.abort(request_ids)
        self._check_alive()

    async def outputs(self) -> AsyncIterator[EngineOutput]:
        """Yield outputs until the engine stops. Raises `EngineDied`. One consumer."""
        while True:
            if self._died is not None and self._serving is not None:
                await self._serving.streams.read_to_the_end(LAST_OUTPUT_S)
            if (output := self._queue.take()) is not None:
                yield output
                continue
            if self._stopped:
                return
            self._check_alive()
            self._queue.news.clear()
            await self._queue.news.wait()

    async def load(self, version: int, folder: Path) -> LoadTimes:
        """Start the server with the weights in `folder`, or take them in place.

        Raises `LoadFailed`, `EngineDied`.
        """
        self._check_alive()
        self._version = None
        began = time.monotonic()
        try:
            start_s, pause_s = await self._take(version, folder)
        except Unreadable as exc:
            raise LoadFailed(f"version {version} does not load: {exc}", f"see {folder}") from exc
        self._version = version
        self._steps += 1
        return LoadTimes(time.monotonic() - began, pause_s, start_s)

    async def greedy(self, token_ids: list[int], max_new_tokens: int) -> tuple[list[int], list[float]]:
        """Return the greedy continuation and its logprobs. Raises `RuntimeFault`, `EngineDied`."""
        up = self._up()
        name = f"probe-{next(self._names)}"  # also its salt: nothing cached before counts as proof
        request = Request(-1, token_ids, max_new_tokens)
        dialect, greedy = up.streams.dialect, Sampling(temperature=0.0)
        body = request_body(dialect, request, name, greedy, name, up.streams.adapters.current)
        found: list[int] = []
        logprobs: list[float] = []
        async with self._failing("the probe failed"):
            async for chunk in up.server.api.stream(dialect, body):
                found += chunk.token_ids
                logprobs += chunk.logprobs
                self._steps += 1
        return found, logprobs

    async def sleep(self) -> None:
        """Free the GPU's memory; a build for CPUs holds none, and stays as it is. Raises `RuntimeFault`."""
        self._version = None
        if self._serving is None or self._is_cpu:
            return  # on CPUs vLLM answers 200 and frees nothing
        server = self.server
        if not server.has_flag("--enable-sleep-mode"):
            raise RuntimeFault("the server was started without sleep mode", "end it to free its memory")
        async with self._failing("the engine cannot sleep"):
            await server.api.post("/sleep?level=2", timeout_s=START_TIMEOUT_S)
            is_sleeping = (await server.api.get("/is_sleeping"))["is_sleeping"]
        if not is_sleeping:
            raise RuntimeFault("the server reports that it is awake after /sleep", self._see_log())

    async def wake(self) -> None:
        """Take the memory again; level 2 kept no weights, so a load has to follow. Raises `RuntimeFault`."""
        self._version = None
        if self._serving is None or self._is_cpu:
            return
        async with self._failing("the engine cannot wake"):
            await self.server.api.post("/wake_up", timeout_s=START_TIMEOUT_S)

    def progress(self) -> EngineProgress:
        """Return counters; a starting server's log counts as progress."""
        activity = 0 if self._starting is None else self._starting.activity
        if self._serving is None:
            return EngineProgress(self._steps + activity, 0, 0, 0)
        streams = self._serving.streams
        counter = self._steps + activity + streams.steps
        waiting, load, kv = streams.num_waiting, streams.load, self._serving.kv_cache
        running = len(streams.open) - waiting
        if load is None:
            return EngineProgress(counter, running, waiting, streams.num_tokens)
        free = None if kv is None else round((1 - load.kv_used_fraction) * kv.capacity_tokens)
        return EngineProgress(counter, running, waiting, streams.num_tokens, load.preempted, free)

    async def stop(self) -> None:
        """End the server and everything it started; idempotent."""
        self._stopped = True
        self._version = None
        self._queue.news.set()
        if self._serving is not None:
            await self._serving.tasks.stop()
            await self._serving.streams.stop()
        if self._starting is not None:
            await self._starting.stop()

    # --- weights ------------------------------------------------------------------------------------------

    async def _take(self, version: int, folder: Path) -> tuple[dict[str, float], float]:
        """Bring the server to `version`; return the phases of a start and the pause, in seconds."""
        folder = peft_folder(folder)
        if is_adapter(folder):
            return await self._take_adapter(version, folder)
        model = ServedModel.of(folder)
        if self._serving is None or model.config != self._serving.model.config:
            phases = await self._boot(version, folder, model)
            return phases, sum(phases.values())
        model.check_same_tensors(self._serving.model)
        return {}, await self._swap(version, folder)

    async def _take_adapter(self, version: int, folder: Path) -> tuple[dict[str, float], float]:
        phases: dict[str, float] = {}
        if self._serving is None:
            base = base_folder(folder)
            phases = await self._boot(version, base, ServedModel.of(base))
        streams = self.streams
        async with self._failing(f"adapter {version} does not load", LoadFailed):
            await streams.adapters.load(version, folder)
        streams.label = version
        return phases, 0.0

    async def _boot(self, version: int, folder: Path, model: ServedModel) -> dict[str, float]:
        """Start a server with the weights in `folder`; return its phases in seconds."""
        assert self._python is not None, "start first"
        await self._end_former_server()
        server = self._starting = VllmServer(self._spec, self._python, folder)
        tasks = TaskSet()
        try:
            await server.start(START_TIMEOUT_S)
            swapper = await Swapper.of(server)
            await swapper.name_version(version)
            dialect, first_token_s = await self._find_dialect(server)
            await self._set_pace(server)
            cache = self._measured(kv_cache(await server.api.text(METRICS)))
        except (ApiError, EngineDied) as exc:
            await server.kill()
            self._declare_dead(exc.problem)
            raise self._death() from exc
        stops = {*self._spec.sampling.stop_token_ids, *model_folder.stop_token_ids(folder)}
        sampling = msgspec.structs.replace(self._spec.sampling, stop_token_ids=tuple(sorted(stops)))
        streams = Streams(server.api, dialect, sampling, self._queue, self._is_gone)
        streams.label = version
        self._serving = _Serving(server, model, swapper, streams, tasks, cache)
        tasks.start(self._watch(server))
        tasks.start(watch_load(server.api, streams.mark_sample, streams.take_load))
        if self._spec.vllm.speculative is not None:
            tasks.start(gate_drafts(server.api, self.progress))
        phases = server.phases_s | {"first_token": first_token_s}
        tokens = None if cache is None else cache.capacity_tokens
        event(
            log,
            "engine.started",
            pid=server.pid,
            phases_s=phases,
            dialect=dialect.name.lower(),
            kv_tokens=tokens,
        )
        return phases

    def _measured(self, cache: KvCache | None) -> KvCache | None:
        """Leave out the null block, which vLLM gives to no request: a small cache would miss it.

        Add how many requests are decoded at once, where that follows from the cache.
        """
        if cache is None:
            return None
        capacity = cache.capacity_tokens - cache.block_tokens
        cache = msgspec.structs.replace(cache, capacity_tokens=capacity)
        if self._spec.max_running is not None:
            return cache
        most = most_running(self._spec, self._is_cpu)
        running = running_of(capacity, self._spec.max_context_tokens, most)
        return msgspec.structs.replace(cache, max_running=running)

    async def _end_former_server(self) -> None:
        if self._serving is None:
            return
        if self._serving.streams.open:
            raise LoadFailed("another model while requests run", "abort them first")
        former, self._serving = self._serving, None
        await former.tasks.stop()
        await former.server.stop()

    async def _find_dialect(self, server: VllmServer) -> tuple[TokenApi, float]:
        """Request one token in each dialect until one works; return it and the seconds that it took."""
        for dialect in TokenApi:
            began = time.monotonic()
            name = f"probe-{next(self._names)}"
            body = request_body(dialect, Request(-1, [0], 1), name, Sampling(), name)
            try:
                num_tokens = sum([len(chunk.token_ids) async for chunk in server.api.stream(dialect, body)])
            except ApiError as exc:
                if exc.status in _UNSUPPORTED and dialect is not TokenApi.COMPLETIONS:
                    continue
                raise
            except StreamBroken as exc:
                raise ApiError(f"no first token: {exc.problem}") from exc
            if num_tokens != 1:
                raise ApiError(f"{dialect} gave {num_tokens} tokens for one")
            return dialect, round(time.monotonic() - began, 3)
        raise AssertionError("the last dialect returns or raises")

    async def _set_pace(self, server: VllmServer) -> None:
        pace = self._spec.tokens_per_s_per_response
        if pace is not None:
            await server.api.rpc("rlboost_pace", steps_per_s=str(pace))
            event(log, "engine.paced", tokens_per_s_per_response=pace)

    async def _swap(self, version: int, folder: Path) -> float:
        """Take the weights in place; return the seconds without tokens. A failure ends the server."""
        up = self._up()

        def is_in_place() -> None:
            up.streams.label = version  # of what comes from here on, of running requests too

        try:
            pause_s = await up.swapper.swap(version, folder, is_in_place)
            await up.streams.adapters.leave()
        except ApiError as exc:
            self._declare_dead(f"the swap to version {version} failed: {exc.problem}")
            raise self._death() from exc
        return pause_s

    # --- life and death -----------------------------------------------------------------------------------

    def _refusal(self, request: Request) -> str | None:
        """Return why a request cannot be accepted: an id beyond the vocabulary kills vLLM's core."""
        if self._version is None or self._serving is None:
            return "no weights are loaded"
        ids, vocabulary = request.token_ids, self._serving.model.vocabulary
        if not ids:
            return "an empty prompt"
        if min(ids) < 0 or max(ids) >= vocabulary:
            return f"token ids outside 0..{vocabulary - 1}"
        if len(ids) + request.max_new_tokens > self._spec.max_context_tokens:
            return f"{len(ids)} + {request.max_new_tokens} tokens exceed {self._spec.max_context_tokens}"
        return None

    async def _unfit(self, python: EnginePython) -> str | None:
        """Return which option this machine cannot serve, or None."""
        options = self._spec.vllm
        if self._spec.promised_gpus and python.is_cpu:
            return f"the vLLM of {python.path} is a build for CPUs, but GPUs were rented"
        if options.speculative == "suffix" and not python.has_suffix_drafts:
            return f"speculative: suffix needs the package arctic-inference, which {python.path} lacks"
        if options.fp8:
            return "fp8 needs a GPU; this vLLM is built for CPUs" if python.is_cpu else await fp8_problem()
        return None

    async def _watch(self, server: VllmServer) -> None:
        await server.ended()
        self._declare_dead("the engine's processes ended")

    async def _is_gone(self, problem: str) -> bool:
        """Return True if a stream broke because the server is gone."""
        if self._died is None and not self._stopped and not await self.server.api.is_healthy():
            self._declare_dead(problem)
        return self._died is not None or self._stopped

    @asynccontextmanager
    async def _failing(self, what: str, kind: type[RuntimeFault] = RuntimeFault) -> AsyncIterator[None]:
        """Raise an error of the server as `kind`, or `EngineDied` if the server no longer answers."""
        try:
            yield
        except (ApiError, StreamBroken) as exc:
            await self._is_gone(exc.problem)
            self._check_alive()
            raise kind(f"{what}: {exc.problem}", self._see_log()) from exc

    def _declare_dead(self, problem: str) -> None:
        self._died = self._died or problem
        self._version = None
        self._queue.room.set()
        self._queue.news.set()
        if self._serving is not None:
            self._serving.tasks.start(self._serving.server.kill())

    def _up(self) -> _Serving:
        self._check_alive()
        if self._serving is None:
            raise RuntimeFault("no weights are loaded", "load a version first")
        return self._serving

    @property
    def _is_cpu(self) -> bool:
        return self._python is not None and self._python.is_cpu

    def _check_alive(self) -> None:
        if self._died is not None:
            raise self._death()

    def _death(self) -> EngineDied:
        return EngineDied(self._died or "the engine's processes ended", self._see_log())

    def _see_log(self) -> str:
        return f"see {self._spec.log}"
