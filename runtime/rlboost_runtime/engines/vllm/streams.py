"""Requests under way on one vLLM server, and the queue that their outputs wait in.

Guarantees: every request that was submitted ends in exactly one output with `finished`, unless the server is
gone, in which case its tokens stay without an end; nothing of a request comes after its end; while the reader
does not keep up, nothing is read from the server, which then merges tokens into larger chunks.

Each token is labelled by the policy version that it was sampled under (`label_tokens`). vLLM reports that
with the last chunk only, as spans over the whole response; until then the label is the version that was in
place when the token came. The two must agree: a response whose tokens went out under another label than the
engine's is not passed on as finished.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from rlboost_runtime.engines.base import EngineOutput, Request
from rlboost_runtime.engines.vllm.api import (
    ApiError,
    StreamBroken,
    StreamChunk,
    TokenApi,
    VllmApi,
    request_body,
)
from rlboost_runtime.engines.vllm.command import MODEL
from rlboost_runtime.engines.vllm.metrics import ServerLoad
from rlboost_runtime.engines.vllm.swap import Adapters
from rlboost_runtime.logs import event
from rlboost_runtime.protocol.messages import Sampling

log = logging.getLogger(__name__)

MAX_UNREAD = 4096
"""Chunks and ends that wait for their reader before streams are read no further."""
ABORT_GRACE_S = 5.0
"""Time that an aborted request gets to send its last tokens before its connection is closed."""
_FINISHED = {"stop": "stop", "length": "length", "abort": "aborted"}


class OutputQueue:
    """Outputs on their way to the one reader; those of one version in a row are merged."""

    def __init__(self) -> None:
        self._waiting: deque[EngineOutput] = deque()
        self._num_waiting = 0
        self.news = asyncio.Event()
        """Set when there may be something to read."""
        self.room = asyncio.Event()
        """Set while more may come."""
        self.room.set()

    def put(self, policy_version: int) -> EngineOutput:
        """Return the output that takes what comes now, of this version."""
        self.news.set()
        self._num_waiting += 1
        if self._num_waiting > MAX_UNREAD:
            self.room.clear()
        if not self._waiting or self._waiting[-1].policy_version != policy_version:
            self._waiting.append(EngineOutput(policy_version))
        return self._waiting[-1]

    def take(self) -> EngineOutput | None:
        """Return the oldest output that waits, None where there is none."""
        output = self._waiting.popleft() if self._waiting else None
        if not self._waiting:
            self._num_waiting = 0
            self.room.set()
        return output


class TaskSet:
    """Tasks that end with their owner."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run `work` beside everything else."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def stop(self) -> None:
        """Cancel all and wait for their ends."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class _Stream:
    """A request under way."""

    request: Request
    model: str
    salt: str
    """Keeps prefix caches of different versions apart."""
    adapter_version: int | None
    """Its policy version where that is an adapter's; else tokens are labelled as they come."""
    task: asyncio.Task[None] | None = None
    engine_id: str = ""
    labels: list[int] = field(default_factory=list)
    """Versions of the tokens so far, one each."""
    is_over: bool = False


class Streams:
    """All requests of one server."""

    def __init__(
        self,
        api: VllmApi,
        dialect: TokenApi,
        sampling: Sampling,
        queue: OutputQueue,
        is_gone: Callable[[str], Awaitable[bool]],
    ) -> None:
        self._api = api
        self.dialect = dialect
        """How the server is asked for tokens."""
        self.sampling = sampling
        """How tokens are sampled; its stop tokens include the model's own."""
        self.adapters = Adapters(api)
        self.label = -1
        """Policy version of the tokens that come now."""
        self.steps = 0
        """Grows with everything that happens."""
        self.num_tokens = 0
        self.load: ServerLoad | None = None
        """The scheduler's last report."""
        self._num_submitted = self._num_sampled = 0
        self._num_at_request = 0
        self._queue = queue
        self._is_gone = is_gone  # given a stream's problem: True if the server is gone
        self._open: dict[int, _Stream] = {}
        self._tasks = TaskSet()

    @property
    def open(self) -> tuple[int, ...]:
        """Numbers of the requests that have not ended."""
        return tuple(self._open)

    @property
    def num_waiting(self) -> int:
        """Requests that the server does not execute: those in its queues, and those submitted since it was
        last asked. Where it does not report its queues, those without a token."""
        if self.load is None:
            return sum(1 for stream in self._open.values() if not stream.labels)
        return min(len(self._open), self.load.waiting + self._num_submitted - self._num_sampled)

    def mark_sample(self) -> None:
        """Note that the server is asked now: what is submitted from here on is not in its answer."""
        self._num_at_request = self._num_submitted

    def take_load(self, load: ServerLoad | None) -> None:
        """Take the server's answer; None: it no longer reports its load."""
        self.load = load
        self._num_sampled = self._num_at_request

    def submit(self, request: Request) -> None:
        """Start a request on a connection of its own, under the version that is served now."""
        model = self.adapters.begin()
        own = None if model == MODEL else self.label
        stream = _Stream(request, model, f"v{self.label}", own)
        self._open[request.request_id] = stream
        self.steps += 1
        self._num_submitted += 1
        stream.task = self._tasks.start(self._follow(stream))

    async def abort(self, request_ids: list[int]) -> None:
        """Stop these; their last outputs are queued when this returns.

        Those with tokens are aborted by the engine's own id, so that their last tokens are sent; before the
        first token the id is not known, and closing the connection aborts them.
        """
        streams = [self._open[number] for number in request_ids if number in self._open]
        known = [stream for stream in streams if stream.engine_id and self.dialect is TokenApi.GENERATE]
        await self._send_abort([stream.engine_id for stream in known])
        if ending := _tasks_of(known):
            await asyncio.wait(ending, timeout=ABORT_GRACE_S)
        tasks = _tasks_of(streams)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            self._end(stream, "aborted")

    async def read_to_the_end(self, timeout_s: float) -> None:
        """Read what a dead server had written; then forget the requests."""
        if tasks := _tasks_of(list(self._open.values())):
            await asyncio.wait(tasks, timeout=timeout_s)
        self._open.clear()

    async def stop(self) -> None:
        """Close all connections."""
        await self._tasks.stop()
        self._open.clear()

    # --- helpers ------------------------------------------------------------------------------------------

    async def _follow(self, stream: _Stream) -> None:
        """Read one request's stream from its start to its end."""
        name = str(stream.request.request_id)
        body = request_body(
            self.dialect, stream.request, name, stream.request.sampled(self.sampling), stream.salt,
            stream.model,
        )  # fmt: skip
        try:
            async for chunk in self._api.stream(self.dialect, body):
                self.take_chunk(stream, chunk)
                if not self._queue.room.is_set():
                    await self._queue.room.wait()
        except (ApiError, StreamBroken) as exc:
            if not await self._is_gone(exc.problem):
                self._end(stream, "failed", exc.problem)
        finally:
            if self.adapters.end(stream.model):
                self._tasks.start(self._tidy())

    def take_chunk(self, stream: _Stream, chunk: StreamChunk) -> None:
        """Pass on the tokens of a chunk by version."""
        stream.engine_id = chunk.engine_id
        self.steps += 1
        self.num_tokens += len(chunk.token_ids)
        own = stream.adapter_version
        label, spans = (self.label, chunk.spans) if own is None else (own, [])
        runs, problem = label_tokens(stream.labels, len(chunk.token_ids), label, spans)
        start = 0
        for version, count in runs:
            end = start + count
            ids, logprobs = chunk.token_ids[start:end], chunk.logprobs[start:end]
            self._queue.put(version).add(stream.request.request_id, ids, logprobs)
            stream.labels += [version] * count
            start = end
        if problem:
            self._end(stream, "failed", problem)
        elif chunk.finish is not None:
            self._end(stream, _FINISHED.get(chunk.finish, "failed"))

    def _end(self, stream: _Stream, reason: str, problem: str = "") -> None:
        """Report how a request ended, once."""
        if stream.is_over:
            return
        stream.is_over = True
        number = stream.request.request_id
        if self._open.get(number) is stream:
            del self._open[number]
        label = stream.labels[-1] if stream.labels else self.label
        self._queue.put(label).end(number, reason, problem)

    async def _send_abort(self, engine_ids: list[str]) -> None:
        if not engine_ids:
            return
        try:
            await self._api.post("/inference/v1/abort_requests", {"request_ids": engine_ids})
        except ApiError as exc:
            event(log, "engine.abort_failed", level=logging.WARNING, problem=exc.problem)

    async def _tidy(self) -> None:
        try:
            await self.adapters.tidy()
        except ApiError as exc:
            event(log, "adapter.kept", level=logging.WARNING, problem=exc.problem)


def _tasks_of(streams: list[_Stream]) -> set[asyncio.Task[None]]:
    return {stream.task for stream in streams if stream.task is not None}


def label_tokens(
    labels: Sequence[int], num_new: int, label: int, spans: Sequence[tuple[str, int, int]]
) -> tuple[list[tuple[int, int]], str]:
    """Return (version, count) runs for `num_new` tokens after those labelled already, and a problem or "".

    `label`: the version in place now. `spans`: (version, start, end) in tokens of the response, half-open;
    empty if the engine has not reported any. Tokens that no span covers get `label`.
    """
    reported = dict(_numbered(spans))
    wrong = [k for k, ours in enumerate(labels) if reported.get(k, ours) != ours]
    if wrong:
        first = wrong[0]
        problem = f"token {first} was labelled version {labels[first]}, the engine reports {reported[first]}"
        return [(label, num_new)] if num_new else [], problem
    versions = [reported.get(len(labels) + k, label) for k in range(num_new)]
    return [(version, len(list(run))) for version, run in groupby(versions)], ""


def _numbered(spans: Sequence[tuple[str, int, int]]) -> list[tuple[int, int]]:
    """Return (token, version) for every token of spans whose version is a number, as ours are."""
    found = [(int(name), start, end) for name, start, end in spans if name.isdecimal()]
    return [(k, version) for version, start, end in found for k in range(start, end)]
