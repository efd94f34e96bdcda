"""The routes' work: from a checked body to the pieces of its choices."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from rlboost_runtime.inference.bodies import BadRequest, NoSuchModel, SamplingBody
from rlboost_runtime.inference.fleet import Fleet, RequestLost
from rlboost_runtime.inference.model import EndpointModel, NotReady
from rlboost_runtime.inference.replies import ChoicePiece
from rlboost_runtime.inference.text import Words
from rlboost_runtime.protocol.messages import GenerateMessage

KEEP_ALIVE_S = 5.0
"""A stream without tokens says that it lives this often: a response may wait for a machine."""
LINGER_S = 120.0
"""How long a response is kept whose client left and had given it an id to come back with."""
DEFAULT_MAX_TOKENS = 16
"""Of `/v1/completions`, as OpenAI has it."""


class Busy(NotReady):
    """As many requests are under way as may be."""


class Service:
    """One model, one fleet."""

    def __init__(self, fleet: Fleet, load: Callable[[], EndpointModel], max_requests: int) -> None:
        self._fleet = fleet
        self._load = load
        self._max_requests = max_requests
        self._model: EndpointModel | None = None

    @property
    def is_ready(self) -> bool:
        """True if a request would be taken now."""
        try:
            self.model()
        except NotReady:
            return False
        return self._fleet.is_up

    def model(self) -> EndpointModel:
        """Return what is served. Raises `NotReady`."""
        if self._model is None:
            self._model = self._load()
        return self._model

    def named(self, name: str | None) -> EndpointModel:
        """Return the model that a request names. Raises `NoSuchModel`."""
        model = self.model()
        if name not in (None, "", model.name):
            raise NoSuchModel(f"the model {name!r} does not exist", f"this run serves {model.name!r}")
        return model

    def ask(
        self,
        name: str,
        prompts: Sequence[list[int]],
        body: SamplingBody,
        max_tokens: int | None,
        session: str = "",
        episode: int | None = None,
    ) -> list[GenerateMessage]:
        """Ask the fleet for `body.n` responses per prompt; return what was asked, for `pieces`. `max_tokens`
        None: what the context has room for. `episode`: what they are turns of. Raises `BadRequest`, `Busy`
        and `NotReady`."""
        model = self.model()
        if not self._fleet.is_up and self._fleet.version is None:
            raise NotReady("the coordinator cannot be reached", "try again in a moment")
        if len(prompts) * body.n > self._max_requests:
            text = f"{len(prompts) * body.n} responses are more than this run makes at once"
            raise BadRequest(text, f"ask for at most {self._max_requests} per request", "n")
        ends = () if body.ignore_eos else model.stop_token_ids
        stops = tuple(sorted({*ends, *(body.stop_token_ids or ())}))
        sampling = model.sampling_of(body.temperature, body.top_p, stops)
        requests: list[GenerateMessage] = []
        for prompt in prompts:
            room = model.max_model_len - len(prompt)
            limit = room if max_tokens is None else max_tokens
            if not prompt:
                raise BadRequest("the prompt has no tokens", "send at least one", "prompt")
            if limit > room or room < 1:
                raise BadRequest(
                    f"{len(prompt)} prompt tokens and {max(1, limit)} new ones exceed the context of"
                    f" {model.max_model_len}",
                    "send a shorter prompt, or lower max_tokens",
                    "max_tokens",
                )
            if max(prompt) >= len(model.tokenizer):
                raise BadRequest(f"token id {max(prompt)} is not in the vocabulary", "correct it", "prompt")
            data = array("i", prompt).tobytes()
            requests += [
                GenerateMessage(
                    f"{name}/{len(requests) + i}", data, limit, sampling, session=session, episode=episode
                )
                for i in range(body.n)
            ]
        if any(map(self._fleet.is_another, requests)):
            raise BadRequest(
                f"request {name} is known and asks for something else", "use another id", "X-Request-ID"
            )
        if self._fleet.num_open_with(requests) > self._max_requests:
            raise Busy(f"{self._fleet.num_open} requests are under way", "try again later")
        self._fleet.open(requests)
        return requests

    async def pieces(
        self, requests: Sequence[GenerateMessage], body: SamplingBody, *, may_return: bool
    ) -> AsyncGenerator[ChoicePiece | None, None]:
        """Yield what the choices grow by, in any order; None: nothing for a while. Closing it withdraws what
        is not delivered: at once, or after `LINGER_S` if the client may return. Raises `RequestLost`."""
        found: asyncio.Queue[ChoicePiece | Exception | None] = asyncio.Queue(maxsize=2 * len(requests))

        async def read(index: int, request: GenerateMessage) -> None:
            try:
                async with aclosing(
                    self._grow(index, request, body, LINGER_S if may_return else 0.0)
                ) as grown:
                    async for piece in grown:
                        await found.put(piece)
            except Exception as problem:  # noqa: BLE001 - whatever it is, the client must not wait for ever
                await found.put(problem)

        readers = [asyncio.create_task(read(i, request)) for i, request in enumerate(requests)]
        num_left = len(readers)
        try:
            while num_left:
                piece = await found.get()
                if isinstance(piece, Exception):
                    raise piece
                num_left -= piece is not None and piece.finish_reason is not None
                yield piece
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _grow(
        self, index: int, request: GenerateMessage, body: SamplingBody, linger_s: float
    ) -> AsyncGenerator[ChoicePiece | None, None]:
        words = Words(
            self.model(), body.stops, stop_token_ids=request.sampling.stop_token_ids,
            skip_special_tokens=body.skip_special_tokens,
        )  # fmt: skip
        sent, reason = 0, None
        async with self._fleet.read(request.request_id, linger_s) as response:
            while reason is None:
                if not await response.grown(sent, KEEP_ALIVE_S):
                    yield None
                    continue
                text = words.add(response.ids[sent:])
                end = words.num_tokens
                if not words.is_stopped and response.finish_reason and end == len(response.ids):
                    text, reason = text + words.flush(), response.finish_reason
                if words.is_stopped:
                    reason = "stop"
                if reason == "quarantined":
                    raise RequestLost("it made several engines fail", "send another request")
                response.is_delivered = reason is not None
                logprobs = response.logprobs[sent:end].tolist()
                versions = list(response.versions) if reason is not None else []
                ids = response.ids[sent:end].tolist()
                stopped_by = words.stopped_by or _stop_token(ids, reason, body)
                yield ChoicePiece(index, text, ids, logprobs, reason, stopped_by, versions)
                sent = end


def _stop_token(ids: Sequence[int], reason: str | None, body: SamplingBody) -> int | None:
    """Return the token by which the request wanted the response to end; None if it did not."""
    return ids[-1] if reason == "stop" and ids and ids[-1] in (body.stop_token_ids or ()) else None
