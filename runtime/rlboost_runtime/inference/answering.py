"""Bodies in, answers and errors out, in OpenAI's shape: what all routes that generate have in common.

A stream ends with a finish reason and `[DONE]`, or with a line that has an error: clients notice no other
end. While nothing comes, comments keep it alive.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ValidationError

from rlboost_runtime.errors import RLBoostError
from rlboost_runtime.inference import replies
from rlboost_runtime.inference.bodies import (
    BadRequest,
    ChatBody,
    CompletionBody,
    NoSuchModel,
    SamplingBody,
)
from rlboost_runtime.inference.fleet import RequestLost
from rlboost_runtime.inference.model import EndpointModel, NotReady
from rlboost_runtime.inference.reasoning import ReasoningText
from rlboost_runtime.inference.replies import ChoicePiece, Form
from rlboost_runtime.inference.service import Busy
from rlboost_runtime.protocol.messages import GenerateMessage

MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_ID_CHARS = 128
RETRY_BUSY_S, RETRY_NOT_READY_S = 1, 5

Body = TypeVar("Body", bound=BaseModel)


class Unauthorised(Exception):
    """The request has no key that opens this."""


class TooLong(Exception):
    """The body has more than `MAX_BODY_BYTES`."""


class Generating(Protocol):
    """What an answer is made from."""

    def model(self) -> EndpointModel:
        """Return what is served. Raises `NotReady`."""

    def pieces(
        self, requests: Sequence[GenerateMessage], body: SamplingBody, *, may_return: bool
    ) -> AsyncGenerator[ChoicePiece | None, None]:
        """Yield what the choices grow by; None: nothing for a while."""


# --- requests ----------------------------------------------------------------------------------------------


async def read_body(request: Request, kind: type[Body]) -> Body:
    """Return the body. Raises `BadRequest`."""
    data = b""
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY_BYTES:
            raise TooLong
    try:
        value = json.loads(data, parse_constant=_no_constant)
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
        return kind.model_validate(value)
    except ValidationError as problem:
        first = problem.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise BadRequest(f"{place or 'the body'}: {first['msg']}", "correct it", place or None) from problem
    except (ValueError, RecursionError) as problem:
        raise BadRequest("the body is no JSON", "send a JSON object") from problem


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def request_id(request: Request) -> str:
    """Return the id that the client gave its request, or a new one. Raises `BadRequest`."""
    given = request.headers.get("x-request-id")
    if given is None:
        return secrets.token_hex(12)
    if not re.fullmatch(rf"[\x21-\x7e]{{1,{MAX_ID_CHARS}}}", given):
        raise BadRequest("X-Request-ID is not 1 to 128 printable characters", "send another", "X-Request-ID")
    return given


def form_of(
    request: Request,
    service: Generating,
    body: CompletionBody | ChatBody,
    prompts: list[list[int]],
    *,
    has_logprobs: bool,
    written_calls: dict[str, str] | None = None,
    divide: Callable[[], ReasoningText] | None = None,
) -> Form:
    """Return how the request wants its answer. `written_calls` takes how the model wrote tool calls; `divide`
    makes what takes the reasoning out of the text."""
    model = service.model()

    def token_name(token_id: int) -> str:
        if body.return_tokens_as_token_ids:
            return f"token_id:{token_id}"
        return model.decode([token_id], skip_special_tokens=False)

    return Form(
        request_id(request),
        model.name,
        isinstance(body, ChatBody),
        has_logprobs,
        body.return_token_ids,
        token_name,
        prompts,
        finds_tools=isinstance(body, ChatBody) and bool(body.tools_to_find()),
        written_calls={} if written_calls is None else written_calls,
        divide=divide,
        shows_reasoning=not isinstance(body, ChatBody) or body.include_reasoning,
        has_running_usage=body.stream_options is not None and body.stream_options.continuous_usage_stats,
    )


# --- answers -----------------------------------------------------------------------------------------------


async def answer(
    service: Generating,
    request: Request,
    form: Form,
    wanted: list[GenerateMessage],
    body: CompletionBody | ChatBody,
) -> Response:
    """Return the whole answer, or its stream."""
    if not body.stream:
        choices = await whole(service, request, wanted, body)
        return JSONResponse(form.whole(choices, body.n))
    has_usage = body.stream_options is not None and body.stream_options.include_usage
    lines = _lines(service, form, wanted, body, has_usage, may_return=_may_return(request))
    return StreamingResponse(lines, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def _may_return(request: Request) -> bool:
    return "x-request-id" in request.headers


async def whole(
    service: Generating, request: Request, wanted: list[GenerateMessage], body: SamplingBody
) -> list[ChoicePiece]:
    """Return all choices, complete. Ends early if the client leaves. Raises `RequestLost`."""
    choices = [ChoicePiece(index) for index in range(len(wanted))]

    async def gather() -> None:
        async with aclosing(service.pieces(wanted, body, may_return=_may_return(request))) as pieces:
            async for piece in pieces:
                if piece is not None:
                    choices[piece.index].add(piece)

    gathering, leaving = asyncio.create_task(gather()), asyncio.create_task(_left(request))
    try:
        await asyncio.wait({gathering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if gathering.done():
            gathering.result()
    finally:
        for task in (gathering, leaving):
            task.cancel()
        await asyncio.gather(gathering, leaving, return_exceptions=True)
    return choices


async def _left(request: Request) -> None:
    """Return when the client of a request whose body was read has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _lines(
    service: Generating,
    form: Form,
    wanted: list[GenerateMessage],
    body: SamplingBody,
    has_usage: bool,
    *,
    may_return: bool,
) -> AsyncIterator[str]:
    """Yield the lines of a stream."""
    begun: set[int] = set()
    num_tokens = 0
    try:
        async with aclosing(service.pieces(wanted, body, may_return=may_return)) as pieces:
            async for piece in pieces:
                if piece is None:
                    yield ": waiting for tokens\n\n"
                    continue
                num_tokens += len(piece.ids)
                yield _line(form.chunk(piece, is_first=piece.index not in begun))
                begun.add(piece.index)
    except RequestLost as problem:
        yield _line(replies.error(str(problem), "server_error", code="request_lost"))
        return
    if has_usage:
        yield _line(form.usage_chunk(num_tokens))
    yield "data: [DONE]\n\n"


def _line(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n"


# --- errors ------------------------------------------------------------------------------------------------


def answer_errors(app: FastAPI, opens: Callable[[Request], bool]) -> None:
    """Answer every error in OpenAI's shape. `opens`: whether a request has a key, and so may know what is
    there."""

    def answers(status: int, kind: str, retry_s: int | None = None) -> Callable[[Request, Any], Response]:
        headers = None if retry_s is None else {"Retry-After": str(retry_s)}

        def answer(request: Request, problem: Any) -> Response:
            text = (
                f"{problem.problem}: {problem.remedy}" if isinstance(problem, RLBoostError) else str(problem)
            )
            param = problem.param if isinstance(problem, BadRequest) else None
            return JSONResponse(replies.error(text, kind, param), status, headers)

        return answer

    def denied(request: Request, problem: Any) -> Response:
        return JSONResponse(replies.error("this key does not open this", "invalid_request_error"), 401)

    def too_long(request: Request, problem: Any) -> Response:
        text = f"the body has more than {MAX_BODY_BYTES} bytes"
        return JSONResponse(replies.error(text, "invalid_request_error"), 413)

    def elsewhere(request: Request, problem: Any) -> Response:
        if not opens(request):
            return denied(request, problem)
        text = f"{request.method} {request.url.path} is not served here"
        return JSONResponse(replies.error(text, "invalid_request_error"), problem.status_code)

    app.add_exception_handler(Unauthorised, denied)
    app.add_exception_handler(TooLong, too_long)
    app.add_exception_handler(BadRequest, answers(400, "invalid_request_error"))
    app.add_exception_handler(NoSuchModel, answers(404, "invalid_request_error"))
    app.add_exception_handler(404, elsewhere)
    app.add_exception_handler(405, elsewhere)
    app.add_exception_handler(Busy, answers(429, "rate_limit_error", RETRY_BUSY_S))
    app.add_exception_handler(NotReady, answers(503, "service_unavailable", RETRY_NOT_READY_S))
    app.add_exception_handler(RequestLost, answers(503, "server_error", RETRY_BUSY_S))
