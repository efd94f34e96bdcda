"""The routes by which environments reach the model: OpenAI's, below `/episodes/NAME/v1`, all recorded.

They listen on a Unix socket in the run's folder, which reaches into the sandbox of environments, and for
programs of the user's on the head's loopback. The trainer opens and closes episodes with the run's token;
each episode has a key of its own, which opens nothing else.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from rlboost_runtime.inference import replies
from rlboost_runtime.inference.answering import (
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
    GenerateBody,
    SamplingBody,
)
from rlboost_runtime.inference.episodes import (
    OF_TOKENS,
    Episode,
    EpisodeOpening,
    Episodes,
    Place,
)
from rlboost_runtime.inference.fleet import RequestLost
from rlboost_runtime.inference.model import EndpointModel
from rlboost_runtime.inference.replies import ChoicePiece
from rlboost_runtime.inference.service import Service
from rlboost_runtime.protocol.messages import GenerateMessage
from rlboost_runtime.run.security import authorised

MSGPACK = "application/msgpack"


class RecordingService:
    """The service as one request of an episode sees it: what it yields is recorded."""

    def __init__(
        self, service: Service, episode: Episode, places: Sequence[Place], max_response: int
    ) -> None:
        """`places`: one per prompt."""
        self._service = service
        self._episode = episode
        self._places = places
        self._most = max_response

    def model(self) -> EndpointModel:
        """Return what is served. Raises `NotReady`."""
        return self._service.model()

    def ask(self, name: str, body: SamplingBody, max_tokens: int | None) -> list[GenerateMessage]:
        """Ask the fleet. Raises what `Service.ask` raises; a request that is refused is no turn."""
        try:
            return self._ask(name, body, max_tokens)
        except Exception:
            self._episode.take_back_turn()
            raise

    def _ask(self, name: str, body: SamplingBody, max_tokens: int | None) -> list[GenerateMessage]:
        model, opening = self.model(), self._episode.opening
        rooms = [
            min(place.room(self._most), model.max_model_len - len(place.prompt_ids)) for place in self._places
        ]
        if min(rooms) < 1:
            self._episode.meet_limit(OF_TOKENS)
            raise BadRequest(
                "the episode has no room for another token (algorithm.max_response_tokens and"
                f" max_prompt_tokens, together {model.max_model_len})",
                "end it",
                "context_length_exceeded",
            )
        return self._service.ask(
            name, [place.prompt_ids for place in self._places], body, min(rooms) if max_tokens is None
            else min(max_tokens, *rooms), opening.name, episode=opening.response,
        )  # fmt: skip

    async def pieces(
        self, requests: Sequence[GenerateMessage], body: SamplingBody, *, may_return: bool
    ) -> AsyncGenerator[ChoicePiece | None, None]:
        """Yield what `Service.pieces` yields. A client that has left does not return: that would be another
        turn."""
        choices = [ChoicePiece(index) for index in range(len(requests))]
        self._episode.wait()
        try:
            async with aclosing(self._service.pieces(requests, body, may_return=False)) as pieces:
                async for piece in pieces:
                    if piece is not None:
                        choice = choices[piece.index]
                        choice.add(piece)
                        if piece.finish_reason is not None:
                            self._record(choice, body)
                    yield piece
        except RequestLost as problem:
            self._episode.lose(str(problem))
            raise
        finally:
            self._episode.resume()

    def _record(self, choice: ChoicePiece, body: SamplingBody) -> None:
        model = self.model()
        self._episode.record(
            self._places[choice.index // body.n], choice.ids, choice.logprobs,
            text=model.decode(choice.ids, skip_special_tokens=False),
            shown=model.decode(choice.ids, skip_special_tokens=True),
            finish_reason=choice.finish_reason or "", versions=choice.versions,
        )  # fmt: skip


def make_episode_app(service: Service, episodes: Episodes, token: str, max_response_tokens: int) -> FastAPI:
    """Return the application. `token`: the run's."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    answer_errors(app, lambda request: False)

    def demand_trainer(request: Request) -> None:
        if not authorised(request.headers.get("authorization"), token):
            raise Unauthorised

    def episode_of(request: Request, name: str) -> Episode:
        episode = episodes.get(name)
        header = request.headers.get("authorization")
        if episode is None or not authorised(header, episode.opening.key):
            raise Unauthorised
        return episode

    def recording(episode: Episode, places: Sequence[Place]) -> RecordingService:
        return RecordingService(service, episode, places, max_response_tokens)

    @app.post("/episodes")
    async def opened(request: Request) -> Response:
        demand_trainer(request)
        service.model()  # `NotReady` before there is one
        episodes.open(msgspec.msgpack.decode(await request.body(), type=EpisodeOpening))
        return Response(status_code=204)

    @app.delete("/episodes/{name}")
    async def closed(request: Request, name: str) -> Response:
        demand_trainer(request)
        record = episodes.close(name)
        if record is None:
            return Response(status_code=404)
        return Response(msgspec.msgpack.encode(record), media_type=MSGPACK)

    @app.get("/episodes/{name}/clock")
    async def clock(request: Request, name: str) -> Response:
        demand_trainer(request)
        episode = episodes.get(name)
        if episode is None:
            return Response(status_code=404)
        return Response(msgspec.msgpack.encode(episode.clock()), media_type=MSGPACK)

    @app.get("/episodes/{name}/v1/models")
    async def models(request: Request, name: str) -> dict[str, Any]:
        episode_of(request, name)
        return {"object": "list", "data": [service.model().described()]}

    @app.post("/episodes/{name}/v1/chat/completions")
    async def chat(request: Request, name: str) -> Response:
        episode = episode_of(request, name)
        body = await read_body(request, ChatBody)
        body.check()
        episode.begin_turn(body)
        opening, model = episode.opening, service.model()
        options = opening.template_args | body.chat_template_kwargs | body.render_options()
        text = model.render_text(
            episode.as_written(body.conversation()), body.tools_to_find(), chat_template=opening.template,
            **options,
        )  # fmt: skip
        place = episode.at_rendered(text, partial(model.encode, add_special_tokens=False))
        asking = recording(episode, [place])
        form = form_of(
            request, asking, body, [place.prompt_ids], has_logprobs=body.logprobs, written_calls=episode.raw
        )
        wanted = asking.ask(form.request_id, body, body.max_completion_tokens or body.max_tokens)
        return await answer(asking, request, form, wanted, body)

    @app.post("/episodes/{name}/v1/completions")
    async def completions(request: Request, name: str) -> Response:
        episode = episode_of(request, name)
        body = await read_body(request, CompletionBody)
        body.check()
        episode.begin_turn(body)
        model = service.model()
        places = [
            episode.at_text(prompt, model.encode, partial(model.encode, add_special_tokens=False))
            if isinstance(prompt, str)
            else episode.at_ids(prompt)
            for prompt in body.prompts()
        ]
        asking = recording(episode, places)
        prompts = [place.prompt_ids for place in places]
        form = form_of(request, asking, body, prompts, has_logprobs=body.logprobs is not None)
        return await answer(asking, request, form, asking.ask(form.request_id, body, body.max_tokens), body)

    @app.post("/episodes/{name}/inference/v1/generate")
    async def generate(request: Request, name: str) -> Response:
        episode = episode_of(request, name)
        body = await read_body(request, GenerateBody)
        body.check()
        params = body.sampling_params
        episode.begin_turn(params)
        asking = recording(episode, [episode.at_ids(body.token_ids)])
        asked = request_id(request)
        wanted = asking.ask(asked, params, params.max_tokens)
        return JSONResponse(
            replies.generated(asked, body.token_ids, await whole(asking, request, wanted, params))
        )

    return app
