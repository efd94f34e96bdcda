"""The endpoint's routes, keys and errors. docs/endpoint.md lists them.

Every route but `/health` requires a key of the run's `secrets/api_keys`; whoever has none gets 401, whatever
was asked.
"""

from __future__ import annotations

import hmac
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from rlboost_runtime.inference import replies
from rlboost_runtime.inference.answering import (
    MAX_ID_CHARS,
    Unauthorised,
    answer,
    answer_errors,
    form_of,
    read_body,
    request_id,
    whole,
)
from rlboost_runtime.inference.bodies import (
    BadRequest,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    TokenizeBody,
    as_conversation,
)
from rlboost_runtime.inference.reasoning import ReasoningText, Tags
from rlboost_runtime.inference.service import DEFAULT_MAX_TOKENS, Service
from rlboost_runtime.inference.tinker import add_tinker_routes, authorization


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
    answer_errors(
        app, lambda request: keys.opens(request.headers.get("authorization") or authorization(request))
    )

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if service.is_ready else 503)

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        _demand(request, keys)
        model = service.model()
        return {"object": "list", "data": [model.described()]}

    @app.post("/inference/v1/generate")
    async def generate(request: Request) -> Response:
        _demand(request, keys)
        body = await read_body(request, GenerateBody)
        body.check()
        service.named(body.model)
        name, params = request_id(request), body.sampling_params
        wanted = service.ask(
            name, [body.token_ids], params, params.max_tokens or DEFAULT_MAX_TOKENS, _session(request)
        )
        choices = await whole(service, request, wanted, params)
        return JSONResponse(replies.generated(name, body.token_ids, choices))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        _demand(request, keys)
        body = await read_body(request, CompletionBody)
        body.check()
        model = service.named(body.model)
        prompts = [model.encode(p) if isinstance(p, str) else p for p in body.prompts()]
        form = form_of(request, service, body, prompts, has_logprobs=body.logprobs is not None)
        wanted = service.ask(
            form.request_id, prompts, body, body.max_tokens or DEFAULT_MAX_TOKENS, _session(request)
        )
        return await answer(service, request, form, wanted, body)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        _demand(request, keys)
        body = await read_body(request, ChatBody)
        body.check()
        options = body.chat_template_kwargs | body.render_options()
        model = service.named(body.model)
        text = model.render_text(body.conversation(), body.tools_to_find(), **options)
        prompt, tags = model.encode(text, add_special_tokens=False), model.reasoning
        divide = None if tags is None else partial(ReasoningText, tags, is_open=_ends_within(text, tags))
        form = form_of(request, service, body, [prompt], has_logprobs=body.logprobs, divide=divide)
        limit = body.max_completion_tokens or body.max_tokens
        wanted = service.ask(form.request_id, [prompt], body, limit, _session(request))
        return await answer(service, request, form, wanted, body)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        _demand(request, keys)
        body, model = await read_body(request, TokenizeBody), service.model()
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest("send either prompt or messages", "send one of them", "prompt")
        if body.messages is not None:
            ids = model.render(
                as_conversation(body.messages), add_generation_prompt=body.add_generation_prompt
            )
        else:
            ids = model.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)
        strings = model.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        length = model.max_model_len
        return {"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": strings}

    @app.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, Any]:
        _demand(request, keys)
        body, model = await read_body(request, DetokenizeBody), service.model()
        if body.tokens and max(body.tokens) >= len(model.tokenizer):
            raise BadRequest(f"token id {max(body.tokens)} is not in the vocabulary", "correct it", "tokens")
        return {"prompt": model.decode(body.tokens, skip_special_tokens=False)}

    @app.get("/tokenizer_info")
    async def tokenizer_info(request: Request) -> dict[str, Any]:
        _demand(request, keys)
        return service.model().tokenizer_described()

    @app.get("/version")
    async def version(request: Request) -> dict[str, str]:
        _demand(request, keys)
        return {"version": metadata.version("rlboost")}

    add_tinker_routes(app, service, keys.opens)
    return app


def _demand(request: Request, keys: Keys) -> None:
    if not keys.opens(request.headers.get("authorization")):
        raise Unauthorised


def _ends_within(prompt: str, tags: Tags) -> bool:
    """Return True if a prompt leaves the reasoning open."""
    return prompt.rfind(tags.opening) > prompt.rfind(tags.closing) and prompt.rstrip().endswith(tags.opening)


def _session(request: Request) -> str:
    return request.headers.get("x-session-id", "")[:MAX_ID_CHARS]
