"""The sampling half of Tinker's API, so that its `SamplingClient` samples from the fleet: `/api/v1/...`.

As the SDK 0.38 sends it; docs/endpoint.md says how to use it. A sample is a future: `asample` begins it and
names it by its sampling session and number, so that one that is sent again is the same one; `retrieve_future`
waits for it. Sessions hold no state, so a client goes on after a restart of the endpoint: a future that is
gone then gets 410, upon which the SDK asks for the sample anew.
"""

from __future__ import annotations

import asyncio
import secrets
from array import array
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from rlboost_runtime.errors import RLBoostError
from rlboost_runtime.inference.answering import Unauthorised, read_body
from rlboost_runtime.inference.bodies import BadRequest, Ids, NoSuchModel, SamplingBody
from rlboost_runtime.inference.fleet import RequestLost
from rlboost_runtime.inference.model import NotReady
from rlboost_runtime.inference.replies import ChoicePiece, finite
from rlboost_runtime.inference.service import Service

KEY_PREFIX = "tml-"
"""The SDK wants keys that begin so: a key of the run with this before it."""
POLL_S = 30.0
"""Longest wait of one `retrieve_future`; the SDK's own timeout is 45 s."""
KEEP_S = 600.0
"""How long a finished sample waits for its client."""
DEFAULT_MAX_TOKENS = 256
_PROTOBUF = "application/x-protobuf"
_SESSION = "rlboost-"
_STOP_REASONS = {"stop": 0, "length": 1}
"""STOP_REASON_STOP and STOP_REASON_LENGTH of its protobuf."""


class _Chunk(BaseModel):
    type: str = "encoded_text"
    tokens: Ids = []


class _Prompt(BaseModel):
    chunks: list[_Chunk] = Field(min_length=1)


class _Params(BaseModel):
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_k: int = -1
    top_p: float = Field(default=1.0, gt=0, le=1)


class SampleBody(BaseModel):
    """`POST /api/v1/asample`."""

    prompt: _Prompt
    sampling_params: _Params = _Params()
    num_samples: int = Field(default=1, ge=1)
    sampling_session_id: str | None = Field(default=None, max_length=96)
    seq_id: int | None = None
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_alt_tokens_k: int = 0
    target_prompt_logprobs: Any = None

    def prompt_ids(self) -> list[int]:
        """Return the prompt. Raises `BadRequest` for one that is not only tokens."""
        if other := [chunk.type for chunk in self.prompt.chunks if chunk.type != "encoded_text"]:
            raise BadRequest(f"the prompt has a chunk of type {other[0]}", "send encoded_text only", "prompt")
        ids = [token for chunk in self.prompt.chunks for token in chunk.tokens]
        if not ids:
            raise BadRequest("the prompt is empty", "send at least one token", "prompt")
        return ids

    def sampling(self) -> SamplingBody:
        """Return how to sample. Raises `BadRequest` for what cannot be done."""
        for name in (
            *("prompt_logprobs", "topk_prompt_logprobs", "topk_sample_logprobs"),
            *("prompt_alt_tokens_k", "target_prompt_logprobs"),
        ):
            if getattr(self, name):
                raise BadRequest(f"{name} is not supported", f"leave {name} out", name)
        params, stop = self.sampling_params, self.sampling_params.stop
        texts = [stop] if isinstance(stop, str) else [each for each in stop or [] if isinstance(each, str)]
        ids = [each for each in stop or [] if isinstance(each, int)]
        body = SamplingBody(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            max_tokens=params.max_tokens or DEFAULT_MAX_TOKENS,
            stop=texts or None,
            stop_token_ids=ids or None,
            ignore_eos=stop == [],
            n=self.num_samples,
        )
        body.refuse_unsupported()
        return body


class _SessionBody(BaseModel):
    session_id: str = Field(default="", max_length=64)
    sampling_session_seq_id: int = 0
    base_model: str | None = None
    model_path: str | None = None


class _FutureBody(BaseModel):
    request_id: str


class _CancelBody(BaseModel):
    request_ids: list[str] = []
    request_id: str | None = None


@dataclass(slots=True, eq=False)
class _Future:
    """A sample that is being generated."""

    task: asyncio.Task[list[ChoicePiece]]
    timer: asyncio.TimerHandle | None = field(default=None)


class Samples:
    """The samples under way, by request id."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._futures: dict[str, _Future] = {}

    def begin(self, body: SampleBody) -> tuple[str, list[str]]:
        """Begin a sample, or find the one of that name; return its request id, and an id per sequence."""
        session = body.sampling_session_id or f"{_SESSION}{secrets.token_hex(8)}"
        name = f"{session}:{secrets.token_hex(8) if body.seq_id is None else body.seq_id}"
        if name not in self._futures:
            task = asyncio.create_task(self._sample(name, body))
            future = self._futures[name] = _Future(task)
            task.add_done_callback(lambda _: self._forget_later(name, future))
        return name, [f"{name}:{index}" for index in range(body.num_samples)]

    async def wait(self, name: str) -> _Future | None:
        """Return a sample once it is over, or `POLL_S` later; None for one that is not known."""
        future = self._futures.get(name)
        if future is not None:
            await asyncio.wait({future.task}, timeout=POLL_S)
        return future

    def cancel(self, name: str) -> None:
        """Stop a sample that nobody wants; unknown ones are fine."""
        future = self._futures.pop(name, None)
        if future is not None:
            future.task.cancel()

    def _forget_later(self, name: str, future: _Future) -> None:
        def forget() -> None:
            if self._futures.get(name) is future:
                del self._futures[name]

        future.timer = asyncio.get_running_loop().call_later(KEEP_S, forget)

    async def _sample(self, name: str, body: SampleBody) -> list[ChoicePiece]:
        """Return the sequences, complete. Raises `RLBoostError`."""
        sampling = body.sampling()
        wanted = self._service.ask(name, [body.prompt_ids()], sampling, sampling.max_tokens)
        choices = [ChoicePiece(index) for index in range(len(wanted))]
        async with aclosing(self._service.pieces(wanted, sampling, may_return=False)) as pieces:
            async for piece in pieces:
                if piece is not None:
                    choices[piece.index].add(piece)
        return choices


def authorization(request: Request) -> str | None:
    """Return the `Authorization` header that says the same as the SDK's; None where there is no key."""
    key = request.headers.get("x-api-key", "")
    return f"Bearer {key.removeprefix(KEY_PREFIX)}" if key.startswith(KEY_PREFIX) else None


def add_tinker_routes(app: FastAPI, service: Service, opens: Callable[[str | None], bool]) -> None:
    """Add the routes. `opens`: whether an `Authorization` header carries a key."""
    samples = Samples(service)

    def demand(request: Request) -> None:
        if not opens(authorization(request)):
            raise Unauthorised

    def add(path: str, reply: dict[str, Any]) -> None:
        @app.post(f"/api/v1/{path}")
        async def answer(request: Request) -> dict[str, Any]:
            demand(request)
            return reply

    # the plain transport of the SDK takes SSL_CERT_FILE
    add("client/config", {"use_pyqwest_transport": False})
    add("session_heartbeat", {"type": "session_heartbeat"})
    add("telemetry", {"status": "accepted"})
    add("sessions/{session}/finish", {})

    @app.post("/api/v1/create_session")
    async def create_session(request: Request) -> dict[str, Any]:
        demand(request)
        return {"type": "create_session", "session_id": f"{_SESSION}{secrets.token_hex(8)}"}

    @app.get("/api/v1/healthz")
    async def healthz(request: Request) -> dict[str, Any]:
        demand(request)
        return {"status": "ok"}

    @app.get("/api/v1/get_server_capabilities")
    async def capabilities(request: Request) -> dict[str, Any]:
        demand(request)
        model = service.model()
        known = {"model_name": model.name, "max_context_length": model.max_model_len}
        return {"supported_models": [known | {"trainable": False, "sampleable": True}]}

    @app.get("/api/v1/samplers/{sampler}")
    async def sampler(request: Request, sampler: str) -> dict[str, Any]:
        demand(request)
        return {"sampler_id": sampler, "base_model": service.model().name, "model_path": None}

    @app.post("/api/v1/create_sampling_session")
    async def create_sampling_session(request: Request) -> dict[str, Any]:
        demand(request)
        body = await read_body(request, _SessionBody)
        _require_served(service, body.base_model, body.model_path)
        name = f"{body.session_id or _SESSION + secrets.token_hex(8)}-{body.sampling_session_seq_id}"
        return {"type": "create_sampling_session", "sampling_session_id": name}

    @app.post("/api/v1/asample")
    async def asample(request: Request) -> dict[str, Any]:
        demand(request)
        body = await read_body(request, SampleBody)
        _require_served(service, body.base_model, body.model_path)
        name, sequences = samples.begin(body)
        return {"request_id": name, "sample_sequence_ids": sequences}

    @app.post("/api/v1/cancel_future")
    async def cancel(request: Request) -> dict[str, Any]:
        demand(request)
        body = await read_body(request, _CancelBody)
        for name in [*body.request_ids, *([body.request_id] if body.request_id else [])]:
            samples.cancel(name)
        return {}

    @app.post("/api/v1/retrieve_future")
    async def retrieve(request: Request) -> Response:
        demand(request)
        name = (await read_body(request, _FutureBody)).request_id
        future = await samples.wait(name)
        if future is None or future.task.cancelled():
            return JSONResponse({"detail": f"{name} is not known"}, 410)
        if not future.task.done():
            return JSONResponse({"type": "try_again", "request_id": name, "queue_state": "active"})
        problem = future.task.exception()
        if isinstance(problem, NotReady):  # busy, or the model is not there yet: asked again after a while
            samples.cancel(name)
            return JSONResponse({"detail": str(problem)}, 410)
        if problem is not None:
            return JSONResponse(_failed(problem))
        return _sampled(future.task.result(), request.headers.get("accept", ""))


def _require_served(service: Service, base_model: str | None, model_path: str | None) -> None:
    """Raise `NoSuchModel` for another model than the run's."""
    if model_path is not None:
        raise NoSuchModel(f"there is no model at {model_path}", "give the run's name as base_model")
    service.named(base_model)


def _failed(problem: BaseException) -> dict[str, Any]:
    if not isinstance(problem, RLBoostError):
        raise problem
    category: Literal["user", "server"] = "server" if isinstance(problem, RequestLost) else "user"
    return {"error": f"{problem.problem}: {problem.remedy}", "category": category}


# --- the answer ---------------------------------------------------------------------------------------------


def _sampled(choices: list[ChoicePiece], accept: str) -> Response:
    if _PROTOBUF in accept:
        return Response(b"".join(_field(1, _sequence(each)) for each in choices), media_type=_PROTOBUF)
    sequences = [
        {"stop_reason": each.finish_reason, "tokens": each.ids, "logprobs": finite(each.logprobs)}
        for each in choices
    ]
    return JSONResponse({"type": "sample", "sequences": sequences})


def _sequence(choice: ChoicePiece) -> bytes:
    """Return a `SampledSequence`: stop_reason (1), tokens as int32 (2), logprobs as float32 (3)."""
    reason = _STOP_REASONS.get(choice.finish_reason or "stop", 0)
    return (
        bytes((1 << 3, reason))
        + _field(2, array("i", choice.ids).tobytes())
        + _field(3, array("f", choice.logprobs).tobytes())
    )


def _field(number: int, content: bytes) -> bytes:
    """Return a length-delimited field of a protobuf message."""
    return bytes((number << 3 | 2,)) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*found, value))
