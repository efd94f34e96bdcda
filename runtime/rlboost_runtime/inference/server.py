"""The endpoint's routes, keys and errors. docs/endpoint.md lists them.

A stream ends with a finish reason and `[DONE]`, or with a line that has an error: clients notice no other
end. While nothing comes, comments keep it alive. Every route but `/health` requires a key of the run's
`secrets/api_keys`; whoever has none gets 401, whatever was asked.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ValidationError

from rlboost_runtime.errors import RLBoostError
from rlboost_runtime.inference import replies
from rlboost_runtime.inference.bodies import (
    BadRequest,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    NoSuchModel,
    SamplingBody,
    TokenizeBody,
)
from rlboost_runtime.inference.fleet import RequestLost
from rlboost_runtime.inference.model import NotReady
from rlboost_runtime.inference.replies import ChoicePiece, Form
from rlboost_runtime.inference.service import DEFAULT_MAX_TOKENS, Busy, Service
from rlboost_runtime.protocol.messages import GenerateMessage

MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_ID_CHARS = 128
RETRY_BUSY_S, RETRY_NOT_READY_S = 1, 5

Body = TypeVar("Body", bound=BaseModel)


class Unauthorised(Exception):
    """The request has no key that opens this."""


class TooLong(Exception):
    """The body has more than `MAX_BODY_BYTES`."""


class Keys:
    """The keys in a file, one a line; read again when it changes, so that one can be added or taken out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._keys: list[bytes] = []

    def opens(self, header: str | None) -> bool:
        """Return True if an `Authorization` header carries a key."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return False
        stamp = (status.st_mtime_ns, status.st_ino)
        if stamp != self._stamp:
            self._keys = [
                line.strip().encode() for line in self._path.read_text().splitlines() if line.strip()
            ]
            self._stamp = stamp
        given = (header or "").removeprefix("Bearer ").encode("utf-8", "surrogateescape")
        return any([hmac.compare_digest(given, key) for key in self._keys])  # noqa: C419 - all, in equal time


def make_app(service: Service, keys: Keys) -> FastAPI:
    """Return the application."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    _answer_errors(app, keys)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if service.is_ready else 503)

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        _demand(request, keys)
        model = service.model()
        found = {"id": model.name, "object": "model", "created": model.created, "owned_by": "rlboost"}
        return {"object": "list", "data": [found | {"max_model_len": model.max_model_len}]}

    @app.post("/inference/v1/generate")
    async def generate(request: Request) -> Response:
        _demand(request, keys)
        body = await _read(request, GenerateBody)
        body.check()
        service.named(body.model)
        name, params = _request_id(request), body.sampling_params
        wanted = service.ask(
            name, [body.token_ids], params, params.max_tokens or DEFAULT_MAX_TOKENS, _session(request)
        )
        choices = await _whole(service, request, wanted, params)
        return JSONResponse(replies.generated(name, body.token_ids, choices))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        _demand(request, keys)
        body = await _read(request, CompletionBody)
        body.check()
        model = service.named(body.model)
        prompts = [model.encode(p) if isinstance(p, str) else p for p in body.prompts()]
        form = _form(request, service, body, prompts, has_logprobs=body.logprobs is not None)
        wanted = service.ask(
            form.request_id, prompts, body, body.max_tokens or DEFAULT_MAX_TOKENS, _session(request)
        )
        return await _answer(service, request, form, wanted, body)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        _demand(request, keys)
        body = await _read(request, ChatBody)
        body.check()
        tools = None if body.tool_choice == "none" else body.tools
        options = body.chat_template_kwargs | {
            "add_generation_prompt": body.add_generation_prompt and not body.continue_final_message,
            "continue_final_message": body.continue_final_message,
        }
        prompt = service.named(body.model).render(body.conversation(), tools, **options)
        form = _form(request, service, body, [prompt], has_logprobs=body.logprobs)
        limit = body.max_completion_tokens or body.max_tokens
        wanted = service.ask(form.request_id, [prompt], body, limit, _session(request))
        return await _answer(service, request, form, wanted, body)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        _demand(request, keys)
        body, model = await _read(request, TokenizeBody), service.model()
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest("send either prompt or messages", "send one of them", "prompt")
        if body.messages is not None:
            ids = model.render(body.messages, add_generation_prompt=body.add_generation_prompt)
        else:
            ids = model.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)
        strings = model.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        length = model.max_model_len
        return {"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": strings}

    @app.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, Any]:
        _demand(request, keys)
        body, model = await _read(request, DetokenizeBody), service.model()
        if body.tokens and max(body.tokens) >= len(model.tokenizer):
            raise BadRequest(f"token id {max(body.tokens)} is not in the vocabulary", "correct it", "tokens")
        return {"prompt": model.decode(body.tokens, skip_special_tokens=False)}

    return app


# --- requests ----------------------------------------------------------------------------------------------


def _demand(request: Request, keys: Keys) -> None:
    if not keys.opens(request.headers.get("authorization")):
        raise Unauthorised


async def _read(request: Request, kind: type[Body]) -> Body:
    """Return the body. Raises `BadRequest`."""
    data = b""
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY_BYTES:
            raise TooLong
    try:
        return kind.model_validate(json.loads(data))
    except ValidationError as problem:
        first = problem.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise BadRequest(f"{place or 'the body'}: {first['msg']}", "correct it", place or None) from problem
    except (ValueError, RecursionError) as problem:
        raise BadRequest("the body is no JSON", "send a JSON object") from problem


def _session(request: Request) -> str:
    return request.headers.get("x-session-id", "")[:MAX_ID_CHARS]


def _request_id(request: Request) -> str:
    """Return the id that the client gave its request, or a new one. Raises `BadRequest`."""
    given = request.headers.get("x-request-id")
    if given is None:
        return secrets.token_hex(12)
    if not re.fullmatch(rf"[\x21-\x7e]{{1,{MAX_ID_CHARS}}}", given):
        raise BadRequest("X-Request-ID is not 1 to 128 printable characters", "send another", "X-Request-ID")
    return given


def _form(
    request: Request,
    service: Service,
    body: CompletionBody | ChatBody,
    prompts: list[list[int]],
    *,
    has_logprobs: bool,
) -> Form:
    model = service.model()

    def token_name(token_id: int) -> str:
        if body.return_tokens_as_token_ids:
            return f"token_id:{token_id}"
        return model.decode([token_id], skip_special_tokens=False)

    return Form(
        _request_id(request),
        model.name,
        isinstance(body, ChatBody),
        has_logprobs,
        body.return_token_ids,
        token_name,
        prompts,
    )


# --- answers -----------------------------------------------------------------------------------------------


async def _answer(
    service: Service,
    request: Request,
    form: Form,
    wanted: list[GenerateMessage],
    body: CompletionBody | ChatBody,
) -> Response:
    if not body.stream:
        choices = await _whole(service, request, wanted, body)
        return JSONResponse(form.whole(choices, body.n))
    has_usage = body.stream_options is not None and body.stream_options.include_usage
    lines = _lines(service, form, wanted, body, has_usage, may_return=_may_return(request))
    return StreamingResponse(lines, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def _may_return(request: Request) -> bool:
    return "x-request-id" in request.headers


async def _whole(
    service: Service, request: Request, wanted: list[GenerateMessage], body: SamplingBody
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
    service: Service,
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


def _answer_errors(app: FastAPI, keys: Keys) -> None:
    """Answer every error in OpenAI's shape."""

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
        if not keys.opens(request.headers.get("authorization")):
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
