"""HTTP to one vLLM server on this machine, over its Unix socket.

Guarantees: a stream's chunks come in order; a stream without a finish reason raises `StreamBroken`, whether
by an error inside an HTTP 200, a missing end or a lost connection, after everything that came before it. The
engine's own id of a request is taken from the stream, never constructed by us.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from rlboost_runtime.engines.base import Request
from rlboost_runtime.engines.vllm.command import MODEL
from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.protocol.messages import Sampling

CONNECT_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 120.0
"""Longest wait for an answer other than tokens or weights: a pause waits for one engine step."""
LOST_LOGPROB = -9999.0
"""What vLLM sends in place of a logprob that is no number, or missing."""
_BASE = "http://engine"  # the host is never looked up: the connection is a Unix socket


class TokenApi(StrEnum):
    """How tokens are requested."""

    GENERATE = "/inference/v1/generate"
    """Token ids in and out, ids of requests that can be aborted, spans of weight versions."""
    COMPLETIONS = "/v1/completions"
    """Older or differently started servers; a request is aborted by hanging up."""


class ApiError(RuntimeFault):
    """The server answered with an error; `status` is HTTP's, 0 where there was no answer."""

    def __init__(self, problem: str, status: int = 0) -> None:
        super().__init__(problem, "see the engine's log")
        self.status = status


class StreamBroken(RuntimeFault):
    """The stream ended without a finish reason."""


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """New tokens of one request. `finish`: None while it goes on, else vLLM's finish reason.

    `spans`: (version, start, end) over all tokens of the request, on the last chunk of servers that report
    it.
    """

    engine_id: str
    token_ids: list[int]
    logprobs: list[float]
    finish: str | None
    spans: list[tuple[str, int, int]]


# --- what the server sends: only what we read ---------------------------------------------------------


class _TokenLogprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_TokenLogprob] = []  # /inference/v1/generate
    token_logprobs: list[float | None] = []  # /v1/completions


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: int = 0


class _Line(msgspec.Struct):
    choices: list[_Choice] = []
    request_id: str = ""
    id: str = ""
    error: _Error | str | None = None


_line_decoder = msgspec.json.Decoder(_Line)


class VllmApi:
    """One server. Used from one event loop; every call may run beside the others.

    Every call has a connection of its own: one that lay idle may be closed by the server (vLLM does after
    5 s) in the moment in which it is used again, and a failed swap costs the engine.
    """

    def __init__(self, socket: Path, key: str) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path=str(socket), limit=0, force_close=True),
            headers={"Authorization": f"Bearer {key}"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            json_serialize=lambda value: msgspec.json.encode(value).decode(),
        )

    async def close(self) -> None:
        """Close all connections; streams break."""
        await self._session.close()

    async def is_healthy(self) -> bool:
        """Return True if the server answers and its engine lives."""
        try:
            await self.get("/health", CONTROL_TIMEOUT_S)
        except ApiError:
            return False
        return True

    async def get(self, path: str, timeout_s: float = CONTROL_TIMEOUT_S) -> Any:  # any JSON
        """GET and return the answer. Raises `ApiError`."""
        return await self._ask("GET", path, None, timeout_s)

    async def post(
        self, path: str, body: Mapping[str, object] | None = None, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> Any:  # any JSON
        """POST and return the answer. Raises `ApiError`."""
        return await self._ask("POST", path, body, timeout_s)

    async def send(self, path: str, body: Mapping[str, object], timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """POST something that is answered by a status only. Raises `ApiError`."""
        await self._read("POST", path, body, timeout_s)

    async def rpc(self, method: str, **arguments: str) -> Any:  # any JSON
        """Call a method of every worker. Raises `ApiError`."""
        return await self.post("/collective_rpc", {"method": method, "kwargs": arguments})

    async def has_route(self, path: str) -> bool:
        """Return True if the server knows `path`, where a GET has no effect. Raises `ApiError`."""
        try:
            await self.get(path)
        except ApiError as exc:
            if exc.status == 0:
                raise
            return exc.status != 404  # 405: it expects a POST
        return True

    async def text(self, path: str) -> str:
        """GET something that is no JSON, such as the metrics. Raises `ApiError`."""
        return (await self._read("GET", path, None, CONTROL_TIMEOUT_S)).decode()

    async def stream(self, dialect: TokenApi, body: Mapping[str, object]) -> AsyncIterator[StreamChunk]:
        """Request tokens and yield them as they come. Raises `ApiError` (refused) and `StreamBroken`.

        It has no deadline of its own: a request may wait long for its turn, and an engine that hangs is
        detected by its counters. Closing the iterator hangs up, by which the server drops the request.
        """
        try:
            async with self._session.post(_BASE + dialect, json=body) as response:
                if response.status != 200:
                    raise _refusal(response.status, await response.read())
                async for line in _lines(response.content):
                    chunk = _chunk(line)
                    if chunk is not None:
                        yield chunk
                        if chunk.finish is not None:
                            return
        except (aiohttp.ClientError, OSError) as exc:
            raise StreamBroken(f"connection lost: {exc!r}", "see the engine's log") from exc
        raise StreamBroken("the stream ended without a finish", "see the engine's log")

    async def _ask(self, method: str, path: str, body: Mapping[str, object] | None, timeout_s: float) -> Any:
        data = await self._read(method, path, body, timeout_s)
        try:
            return msgspec.json.decode(data) if data else {}
        except msgspec.DecodeError as exc:
            raise ApiError(f"{path} did not answer in JSON: {exc}") from exc

    async def _read(
        self, method: str, path: str, body: Mapping[str, object] | None, timeout_s: float
    ) -> bytes:
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(method, _BASE + path, json=body) as answer,
            ):
                data = await answer.read()
                if answer.status != 200:
                    raise _refusal(answer.status, data)
                return data
        except TimeoutError as exc:
            raise ApiError(f"{path} was not answered within {timeout_s:g} s") from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise ApiError(f"{path} failed: {exc!r}") from exc


def request_body(
    dialect: TokenApi, request: Request, name: str, sampling: Sampling, salt: str, model: str = MODEL
) -> dict[str, object]:
    """Return what is posted for `request`. `name` must be unique among the server's requests.

    `sampling.stop_token_ids` are all that end it: the model's own must be among them. `salt` keeps prefix
    caches of different policy versions apart.
    """
    limits: dict[str, object] = {
        "max_tokens": request.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p if sampling.temperature > 0 else 1.0,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        "detokenize": False,
    }
    common: dict[str, object] = {
        "request_id": name,
        "model": model,
        "stream": True,
        "cache_salt": salt,
        "priority": request.priority,
    }
    if dialect is TokenApi.GENERATE:
        return common | {"token_ids": request.token_ids, "sampling_params": limits | {"logprobs": 0}}
    limits.pop("detokenize")
    ids_only = {"return_token_ids": True, "return_tokens_as_token_ids": True}  # there is no tokenizer
    return common | limits | {"prompt": request.token_ids, "logprobs": 0} | ids_only


def _refusal(status: int, data: bytes) -> ApiError:
    try:
        error = _line_decoder.decode(data).error
    except msgspec.DecodeError:
        error = None
    message = error.message if isinstance(error, _Error) else error
    return ApiError(message or data[:200].decode(errors="replace") or f"HTTP {status}", status)


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the payloads of the server-sent events."""
    rest = b""
    async for data in content.iter_any():
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                yield event[6:]


def _chunk(line: bytes) -> StreamChunk | None:
    """Return the chunk in a line; None if there is none. Raises `StreamBroken` for errors."""
    if line == b"[DONE]":
        return None
    try:
        found = _line_decoder.decode(line)
    except msgspec.DecodeError as exc:
        raise StreamBroken(f"a line that cannot be read: {exc}", "see the engine's log") from exc
    if found.error is not None:
        message = found.error.message if isinstance(found.error, _Error) else found.error
        raise StreamBroken(message or "an error without a message", "see the engine's log")
    if not found.choices:
        return None
    choice = found.choices[0]
    token_ids = choice.token_ids or []
    logprobs = [] if choice.logprobs is None else _values(choice.logprobs)
    if len(logprobs) != len(token_ids):
        raise StreamBroken(f"{len(token_ids)} tokens but {len(logprobs)} logprobs", "see the engine's log")
    if logprobs and not min(logprobs) > LOST_LOGPROB:
        raise StreamBroken("a token without a logprob: the model computes no numbers", "check its weights")
    spans = [(span.version, span.start, span.end) for span in choice.weight_versions or ()]
    return StreamChunk(found.request_id or found.id, token_ids, logprobs, choice.finish_reason, spans)


def _values(logprobs: _Logprobs) -> list[float]:
    if logprobs.content:
        return [entry.logprob for entry in logprobs.content]
    return [LOST_LOGPROB if value is None else value for value in logprobs.token_logprobs]
