"""The endpoint's routes under the unmodified openai client, over a coordinator that the test plays."""

from __future__ import annotations

import asyncio
import json
import socket
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from rlboost_runtime.engines.emulated import emulated_response
from rlboost_runtime.inference import __main__ as process
from rlboost_runtime.inference import fleet as fleet_module
from rlboost_runtime.inference import service as service_module
from rlboost_runtime.inference.fleet import Fleet
from rlboost_runtime.inference.model import EndpointModel, NotReady
from rlboost_runtime.inference.reasoning import Tags
from rlboost_runtime.inference.server import Keys, make_app
from rlboost_runtime.inference.service import Service
from rlboost_runtime.protocol.messages import GenerateMessage, Sampling
from rlboost_runtime.seams import SystemClock
from tests.unit.inference.played_coordinator import LENGTH, MODEL, STOP_ID, Coordinator, Letters


class Rig:
    def __init__(self, coordinator: Coordinator, app: Any, key: str, fleet: Fleet) -> None:
        self.coordinator, self.fleet = coordinator, fleet
        transport = httpx.ASGITransport(app)
        self.http = httpx.AsyncClient(transport=transport, base_url="https://head")
        self.client = openai.AsyncOpenAI(
            base_url="https://head/v1",
            api_key=key,
            http_client=httpx.AsyncClient(transport=transport),
            max_retries=0,
        )
        self.key = {"Authorization": f"Bearer {key}"}

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body, headers=self.key)


@asynccontextmanager
async def rig(
    folder: Path, *, max_requests: int = 8, is_ready: bool = True, model: EndpointModel = MODEL
) -> AsyncIterator[Rig]:
    keys = folder / "api_keys"
    keys.write_text("sk-one\nsk-two\n")
    coordinator = Coordinator()
    fleet = Fleet("run", coordinator.dial, SystemClock())

    def load() -> EndpointModel:
        if not is_ready:
            raise NotReady("the model has not been published yet", "try again in a moment")
        return model

    service = Service(fleet, load, max_requests)
    linked = asyncio.create_task(fleet.run())
    while not fleet.is_up:  # noqa: ASYNC110 - two turns of the loop
        await asyncio.sleep(0)
    try:
        yield Rig(coordinator, make_app(service, Keys(keys)), "sk-two", fleet)
    finally:
        linked.cancel()


def expected(prompt: str, max_tokens: int, stops: tuple[int, ...] = (STOP_ID,)) -> list[int]:
    return emulated_response(list(prompt.encode()), max_tokens, Sampling(stop_token_ids=stops))[0]


def text_of(ids: Sequence[int]) -> str:
    return bytes(ids).decode("latin-1")


async def test_a_completion_streams_the_same_as_it_answers_whole(tmp_path: Path) -> None:
    wanted = expected("hello", 20)
    async with rig(tmp_path) as its:
        ask: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 20}
        ids = {"return_token_ids": True}
        whole = await its.client.completions.create(**ask, logprobs=0, extra_body=ids)
        (choice,) = whole.choices
        assert choice.text == text_of(wanted)
        assert choice.finish_reason == "length"
        assert choice.model_extra["token_ids"] == wanted
        assert choice.model_extra["prompt_token_ids"] == list(b"hello")
        assert len(choice.logprobs.token_logprobs) == 20
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (
            5,
            20,
            25,
        )
        stream = await its.client.completions.create(
            **ask, stream=True, stream_options={"include_usage": True}, extra_body=ids
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].text for c in chunks[:-1]) == text_of(wanted)
        assert [i for c in chunks[:-1] for i in c.choices[0].model_extra["token_ids"]] == wanted
        assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == ["length"]
        assert chunks[-1].usage == whole.usage
        sampling = its.coordinator.asked[0].sampling
        assert sampling == Sampling(0.7, 0.9, (STOP_ID,), ignore_eos=True), "the run's own"
        assert not its.coordinator.open, "what is delivered is withdrawn"


async def test_a_stream_goes_on_where_the_lost_connection_left_it(tmp_path: Path) -> None:
    async with rig(tmp_path) as its:
        its.coordinator.drop_after = 9
        stream = await its.client.completions.create(model="tiny", prompt="hello", max_tokens=20, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        assert text == text_of(expected("hello", 20))
        assert [asked.offset for asked in its.coordinator.asked] == [0, 9]


async def test_a_response_that_is_lost_ends_its_stream_with_an_error(tmp_path: Path) -> None:
    async with rig(tmp_path) as its:
        its.coordinator.problem = "5 tokens of it were delivered, 0 are known"
        stream = await its.client.completions.create(model="tiny", prompt="hello", stream=True)
        with pytest.raises(openai.APIError, match="5 tokens of it"):
            _ = [chunk async for chunk in stream]
        with pytest.raises(openai.InternalServerError, match="5 tokens of it"):
            await its.client.completions.create(model="tiny", prompt="hello")


async def test_several_prompts_and_choices_keep_their_order(tmp_path: Path) -> None:
    async with rig(tmp_path) as its:
        found = await its.client.completions.create(model="tiny", prompt=["one", "two"], n=2, max_tokens=5)
        assert [c.index for c in found.choices] == [0, 1, 2, 3]
        wanted = [text_of(expected(p, 5)) for p in ("one", "one", "two", "two")]
        assert [c.text for c in found.choices] == wanted
        assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (6, 20)
        ids = await its.client.completions.create(
            model="tiny", prompt=[list(b"one"), list(b"two")], max_tokens=5
        )
        assert [c.text for c in ids.choices] == wanted[::2]


async def test_a_chat_renders_messages_parts_and_tools(tmp_path: Path) -> None:
    prompt = "system: be short\nuser: hello\nthere\ntools: 1\n"
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    ask: dict[str, Any] = {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "be short"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "there"}],
            },
        ],
        "tools": [tool],
        "max_completion_tokens": 12,
    }
    wanted = expected(prompt, 12)
    async with rig(tmp_path) as its:
        found = await its.client.chat.completions.create(
            **ask, logprobs=True, top_logprobs=0, extra_body={"return_token_ids": True}
        )
        (choice,) = found.choices
        assert (choice.message.role, choice.message.content) == ("assistant", text_of(wanted))
        assert choice.model_extra["token_ids"] == wanted
        assert found.model_extra["prompt_token_ids"] == list(prompt.encode())
        assert len(choice.logprobs.content) == len(wanted)
        stream = await its.client.chat.completions.create(
            **ask, stream=True, extra_headers={"X-Session-ID": "episode 7"}
        )
        chunks = [chunk async for chunk in stream]
        assert its.coordinator.asked[-1].session == "episode 7"
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content for c in chunks) == text_of(wanted)
        none = await its.client.chat.completions.create(**ask, tool_choice="none")
        assert none.usage.prompt_tokens == len(prompt)
        assert (
            its.coordinator.asked[-1].token_ids
            == array("i", list(prompt.replace("1", "0").encode())).tobytes()
        )
        with pytest.raises(openai.BadRequestError, match="chat template refuses this: unknown role"):
            await its.client.chat.completions.create(model="tiny", messages=[{"role": "nobody"}])


async def test_a_stop_string_ends_a_response_and_frees_its_machine(tmp_path: Path) -> None:
    text = text_of(expected("hello", 60))
    stop = text[30:33]
    async with rig(tmp_path) as its:
        found = await its.client.completions.create(model="tiny", prompt="hello", max_tokens=60, stop=stop)
        assert found.choices[0].text == text[: text.index(stop)]
        assert found.choices[0].finish_reason == "stop"
        assert found.usage.completion_tokens == text.index(stop) + 3
        assert its.coordinator.withdrawn


async def test_ids_in_ids_and_logprobs_out(tmp_path: Path) -> None:
    wanted = expected("hello", 9, (7, STOP_ID))
    params = {"temperature": 0.0, "max_tokens": 9, "stop_token_ids": [7], "logprobs": 1, "seed": 3, "new": 1}
    async with rig(tmp_path) as its:
        found = await its.post(
            "/inference/v1/generate", model="tiny", token_ids=list(b"hello"), sampling_params=params
        )
        (choice,) = found.json()["choices"]
        assert choice["token_ids"] == wanted
        assert [e["token"] for e in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in wanted]
        assert all(-100 < e["logprob"] <= 0 for e in choice["logprobs"]["content"])
        assert its.coordinator.asked[0].sampling == Sampling(0.0, 0.9, (7, STOP_ID), ignore_eos=True)
        ignoring = params | {"ignore_eos": True, "stop_token_ids": []}
        await its.post("/inference/v1/generate", token_ids=[1], sampling_params=ignoring)
        assert its.coordinator.asked[1].sampling.stop_token_ids == ()


async def test_a_client_that_left_comes_back_under_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "LINGER_S", 0.2)
    async with rig(tmp_path, max_requests=1) as its:
        its.coordinator.holds.clear()

        async def ask(**headers: str) -> httpx.Response:
            body = {"prompt": "hello", "max_tokens": 20}
            return await its.http.post("/v1/completions", json=body, headers=its.key | headers)

        for headers in ({"X-Request-ID": "mine"}, {}):
            leaving = asyncio.create_task(ask(**headers))
            while its.fleet.num_open != 1:  # noqa: ASYNC110
                await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            if headers:
                assert its.fleet.num_open == 1, "it is kept for a while"
                its.coordinator.holds.set()
                changed = {"prompt": "another", "max_tokens": 20}
                answer = await its.http.post("/v1/completions", json=changed, headers=its.key | headers)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Request-ID")
                back = await ask(**headers)
                assert back.json()["choices"][0]["text"] == text_of(expected("hello", 20))
                assert len(its.coordinator.asked) == 1, "nothing was generated twice"
                its.coordinator.holds.clear()
            assert its.fleet.num_open == 0


async def test_a_client_that_leaves_frees_its_whole_answer_at_once(tmp_path: Path) -> None:
    async with rig(tmp_path) as its:
        its.coordinator.holds.clear()
        body = json.dumps({"prompt": "hello", "max_tokens": 20}).encode()
        headers = [(b"authorization", its.key["Authorization"].encode())]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
        told = [{"type": "http.request", "body": body}]

        async def receive() -> dict[str, Any]:
            if told:
                return told.pop()
            while not its.coordinator.open:  # noqa: ASYNC110
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None: ...

        async with asyncio.timeout(service_module.KEEP_ALIVE_S / 2):
            await its.http._transport.app(scope | {"query_string": b""}, receive, send)  # type: ignore[attr-defined]
        assert its.fleet.num_open == 0
        assert its.coordinator.withdrawn


@pytest.mark.parametrize("streams", [True, False])
async def test_no_more_than_allowed_are_under_way_in_a_burst(tmp_path: Path, streams: bool) -> None:
    async with rig(tmp_path) as its:
        its.coordinator.holds.clear()
        ask = {"prompt": "hello", "max_tokens": 20, "n": 2, "stream": streams}
        burst = [asyncio.create_task(its.post("/v1/completions", **ask)) for _ in range(20)]
        async with asyncio.timeout(5):
            while sum(task.done() for task in burst) < 16:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert its.fleet.num_open == 8
        its.coordinator.holds.set()
        answers = await asyncio.gather(*burst)
        assert sorted(answer.status_code for answer in answers) == [200] * 4 + [429] * 16


async def test_errors_have_openais_shape(tmp_path: Path) -> None:
    async with rig(tmp_path, max_requests=1) as its:
        ask: dict[str, Any] = {"model": "tiny", "prompt": "hello"}
        with pytest.raises(openai.NotFoundError, match="'gpt' does not exist"):
            await its.client.completions.create(model="gpt", prompt="x")
        its.coordinator.holds.clear()
        headers = {"X-Request-ID": "first"}
        first = asyncio.create_task(its.client.completions.create(**ask, extra_headers=headers))
        while not its.coordinator.asked:  # noqa: ASYNC110
            await asyncio.sleep(0)
        with pytest.raises(openai.RateLimitError) as busy:
            await its.client.completions.create(**ask)
        its.coordinator.holds.set()
        await first
        its.coordinator.asked.clear()
        assert busy.value.response.headers["Retry-After"] == "1"
        refused: list[tuple[str, dict[str, Any]]] = [
            ("max_tokens", {"max_tokens": LENGTH}), ("prompt", {"prompt": []}), ("prompt", {"prompt": [999]}),
            ("temperature", {"temperature": -1}), ("echo", {"echo": True}), ("logprobs", {"logprobs": 5}),
            ("top_k", {"extra_body": {"top_k": 5}}), ("guided_regex", {"extra_body": {"guided_regex": "a"}}),
            ("bad_words", {"extra_body": {"bad_words": ["a"]}}),
            ("logit_bias", {"logit_bias": {"5": 1}}), ("n", {"n": 0}), ("n", {"n": 2}),
        ]  # fmt: skip
        for param, change in refused:
            with pytest.raises(openai.BadRequestError) as bad:
                await its.client.completions.create(**(ask | change))
            assert str(bad.value.param).startswith(param), change
        chat: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
        for change in (
            {"response_format": {"type": "json_object"}}, {"tool_choice": "required"},
            {"logprobs": True, "top_logprobs": 3},
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        ):  # fmt: skip
            with pytest.raises(openai.BadRequestError):
                await its.client.chat.completions.create(**(chat | change))
        assert its.coordinator.asked == [], "nothing of this reached the fleet"
        for body in (b"", b"{", b"[]", b'"x"', b"[" * 100_000, b"\xff"):
            answer = await its.http.post("/v1/completions", content=body, headers=its.key)
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_a_run_without_a_model_asks_to_wait(tmp_path: Path) -> None:
    async with rig(tmp_path, is_ready=False) as its:
        assert (await its.http.get("/health")).status_code == 503
        answer = await its.post("/v1/completions", prompt="x")
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
    async with rig(tmp_path) as its:
        assert (await its.http.get("/health")).status_code == 200


async def test_every_route_but_health_wants_a_key_and_tells_nothing_without(tmp_path: Path) -> None:
    async with rig(tmp_path) as its:
        app = its.http._transport.app  # type: ignore[attr-defined]
        routes = {(method, route.path) for route in app.routes for method in route.methods}
        assert len(routes) >= 7
        bodies = set()
        for method, path in routes - {("GET", "/health")} | {("GET", "/v1"), ("PUT", "/tokenize")}:
            for header in ({}, {"Authorization": "Bearer sk-"}, {"Authorization": "Bearer sk-onex"}):
                answer = await its.http.request(method, path, content=b"nonsense", headers=header)
                assert answer.status_code == 401, (path, header)
                bodies.add(answer.content)
        assert len(bodies) == 1
        assert (await its.http.get("/v1/models", headers=its.key)).json()["data"][0][
            "max_model_len"
        ] == LENGTH
        (tmp_path / "api_keys").write_text("sk-new\n")
        assert (await its.http.get("/v1/models", headers=its.key)).status_code == 401, (
            "a key can be taken out"
        )


async def test_no_client_waits_for_ever_for_what_has_failed_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Letters, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        raise KeyError("broken")

    async with rig(tmp_path) as its, asyncio.timeout(5):
        monkeypatch.setattr(Letters, "decode", broken)
        with pytest.raises(KeyError):
            await its.post("/v1/completions", prompt="hello", max_tokens=4)
        assert its.fleet.num_open == 0
        monkeypatch.setattr(fleet_module, "UNREAD_S", 0.0)
        its.fleet.open([GenerateMessage("late", b"", 4, Sampling())])
        await asyncio.sleep(0.05)
        assert its.fleet.num_open == 0
        with pytest.raises(fleet_module.RequestLost):
            async with its.fleet.read("late"):
                pass


async def test_text_becomes_ids_and_back(tmp_path: Path) -> None:
    async with rig(tmp_path) as its:
        found = (await its.post("/tokenize", prompt="hey", return_token_strs=True)).json()
        assert (found["tokens"], found["count"], found["token_strs"]) == (list(b"hey"), 3, ["h", "e", "y"])
        assert (await its.post("/detokenize", tokens=list(b"hey"))).json() == {"prompt": "hey"}
        messages = [{"role": "user", "content": "hi"}]
        assert (await its.post("/tokenize", messages=messages)).json()["count"] == len("user: hi\ntools: 0\n")
        assert (await its.post("/detokenize", tokens=[999])).status_code == 400


async def test_a_stream_that_waits_says_that_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "KEEP_ALIVE_S", 0.01)
    async with rig(tmp_path) as its:
        its.coordinator.holds.clear()
        asyncio.get_running_loop().call_later(0.1, its.coordinator.holds.set)
        answer = await its.post("/v1/completions", prompt="hello", max_tokens=4, stream=True)
        lines = [line for line in answer.text.split("\n\n") if line]
        assert lines[0] == ": waiting for tokens"
        assert lines[-1] == "data: [DONE]"
        texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1] if line.startswith("data")]
        assert "".join(texts) == text_of(expected("hello", 4))


async def test_reasoning_is_apart_from_the_answer_whole_and_streamed(tmp_path: Path) -> None:
    prompt = "user: hi\ntools: 0\n"
    text = text_of(expected(prompt, 60))
    tags = Tags("tools: 0", text[30])  # the template leaves the reasoning open
    thoughts, _, answer = text.partition(text[30])
    ask: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 60}
    async with rig(tmp_path, model=replace(MODEL, reasoning=tags)) as its:
        whole = (await its.client.chat.completions.create(**ask)).choices[0].message
        assert (whole.model_extra["reasoning"], whole.content) == (thoughts, answer)
        assert whole.model_extra["reasoning_content"] == thoughts
        stream = await its.client.chat.completions.create(**ask, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
        assert "".join(d.model_extra.get("reasoning", "") for d in deltas) == thoughts
        assert "".join(d.content for d in deltas) == answer
        hidden = await its.client.chat.completions.create(**ask, extra_body={"include_reasoning": False})
        assert "reasoning" not in hidden.choices[0].message.model_extra
        assert hidden.choices[0].message.content == answer


async def test_each_line_of_a_stream_has_the_usage_so_far_if_it_is_wanted(tmp_path: Path) -> None:
    async with rig(tmp_path) as its:
        stream = await its.client.completions.create(
            model="tiny", prompt="hello", max_tokens=20, stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key] # vLLM's
        )  # fmt: skip
        counts = [chunk.usage.completion_tokens async for chunk in stream]
    assert counts == [*sorted(set(counts)), 20]
    assert len(counts) > 3


async def test_a_text_completions_logprobs_say_where_their_tokens_begin(tmp_path: Path) -> None:
    async with rig(tmp_path) as its:
        ask: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 20, "logprobs": 0}
        whole = (await its.client.completions.create(**ask)).choices[0]
        assert whole.logprobs.text_offset == list(range(20))
        stream = await its.client.completions.create(**ask, stream=True)
        assert [i async for c in stream for i in c.choices[0].logprobs.text_offset] == list(range(20))


async def test_what_no_template_and_no_tokenizer_may_be_given_is_refused(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "x"}]
    async with rig(tmp_path) as its:
        for name in ("chat_template", "tokenize", "messages", "self"):
            body = {"messages": messages, "chat_template_kwargs": {name: "{{ 1 }}"}}
            answer = await its.post("/v1/chat/completions", **body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template_kwargs")
        for data in (b'{"prompt": "\\ud800"}', b'{"prompt": "x", "temperature": NaN}'):
            answer = await its.http.post("/v1/completions", content=data, headers=its.key)
            assert answer.status_code == 400
        info = (await its.http.get("/tokenizer_info", headers=its.key)).json()
        assert (info["chat_template"], info["model_max_length"]) == ("lines", LENGTH)
        assert (await its.http.get("/version", headers=its.key)).json()["version"]


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="an option of Linux")
async def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "UNREAD_MS", 500)
    ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                writer.write(bytes(1_000_000))
                await writer.drain()
        except OSError as problem:
            ended.set_result(problem)

    listener = process._listener("127.0.0.1", 0)
    async with await asyncio.start_server(send, sock=listener):
        with socket.create_connection(listener.getsockname()):
            async with asyncio.timeout(30):
                assert isinstance(await ended, OSError)
