"""What an OpenAI client may ask of a server, with greedy answers: each case asks and returns what it got.

The same cases are put to our endpoint and to vLLM's own server (`tests/vllm/test_vllm_conformance.py`), with
a model that knows a few texts by heart (`memorised_model`), so that rounding decides nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import openai

MODEL = "by-heart"
PROMPT, TEXT = "Once", " upon a time a naïve café in 東京 sold 3 kinds of tea ✓ and 4 of cake."
HI, HELLO = [{"role": "user", "content": "hi"}], "Hello there. How can I help?"
ADD = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "add 2 and 3"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
CALLED: list[Any] = [
    *ADD,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "5"},
]
RESULT = "That makes 5."
TEMPLATE = (
    "{% for t in tools or [] %}#{{ t.function.name }}: {{ t.function.description }}\n{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MAX_PROMPT, MAX_RESPONSE = 160, 128
LEARNED = 0.01
"""Mean loss per token, in nats, below which no rounding changes a greedy answer."""


def memorised_model(folder: Path) -> Path:
    """Write a tiny model, trained until it continues the prompts above with their texts."""
    import torch

    from rlboost_runtime.job import TinyModel
    from rlboost_runtime.trainer.models import tiny

    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    called = json.loads(json.dumps(CALLED))
    for message in called:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])

    def ids_of(messages: list[Any], tools: list[Any] | None) -> list[int]:
        text = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False
        )
        return tokenizer.encode(text)

    lessons = [
        (tokenizer.encode(PROMPT), TEXT),
        (ids_of(HI, None), HELLO),
        (ids_of(ADD, TOOLS), CALL),
        (ids_of(called, TOOLS), RESULT),
    ]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = tiny.make_model(TinyModel(init="tiny"), MAX_PROMPT + MAX_RESPONSE)
        rows = [(prompt, [*prompt, *tokenizer.encode(text), tiny.END_ID]) for prompt, text in lessons]
        longest = max(len(ids) for _, ids in rows)
        ids_BL = torch.tensor([ids + [tiny.PAD_ID] * (longest - len(ids)) for _, ids in rows])
        labels_BL = torch.full_like(ids_BL, -100)
        for number, (prompt, ids) in enumerate(rows):
            labels_BL[number, len(prompt) : len(ids)] = ids_BL[number, len(prompt) : len(ids)]
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.99), weight_decay=0.0)
        for _ in range(1000):
            loss = model(ids_BL, labels=labels_BL).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if loss < LEARNED:
                break
        assert loss < LEARNED, f"not learned by heart: {loss}"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Server(NamedTuple):
    """A server with its clients."""

    sync: openai.OpenAI
    asynchronous: Callable[[], openai.AsyncOpenAI]
    http: httpx2.Client
    """Of the server's root, with the key."""


Case = Callable[[Server], Any]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Register a case by its name."""
    CASES[function.__name__.replace("_", " ").strip()] = function
    return function


GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


def usage(found: Any) -> tuple[int, int, int]:
    """Return prompt, completion and all tokens."""
    return found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens


def complete(server: Server, **changes: Any) -> Any:
    """Return a completion of the text that is known by heart."""
    return server.sync.completions.create(**GREEDY | {"prompt": PROMPT, "max_tokens": 100} | changes)


def chat(server: Server, **changes: Any) -> Any:
    """Return a chat completion."""
    return server.sync.chat.completions.create(**GREEDY | {"messages": HI, "max_tokens": 60} | changes)


@case
def a_completion_of_text(server: Server) -> Any:
    found = complete(server)
    (choice,) = found.choices
    assert choice.text == TEXT
    return choice.text, choice.finish_reason, usage(found), found.object, found.model


@case
def a_completion_of_token_ids(server: Server) -> Any:
    ids = server.http.post("/tokenize", json={"model": MODEL, "prompt": PROMPT}).json()["tokens"]
    found = complete(server, prompt=ids, extra_body={"return_token_ids": True})
    (choice,) = found.choices
    assert choice.text == TEXT
    return choice.text, choice.model_extra["token_ids"], choice.model_extra["prompt_token_ids"], usage(found)


@case
def several_prompts(server: Server) -> Any:
    found = complete(server, prompt=[PROMPT, "Once upon", PROMPT], max_tokens=12)
    return [(choice.index, choice.finish_reason) for choice in found.choices], [
        found.choices[i].text for i in (0, 2)
    ]


@case
def a_cut_by_max_tokens(server: Server) -> Any:
    found = complete(server, max_tokens=7)
    return found.choices[0].text, found.choices[0].finish_reason, usage(found)


@case
def a_character_cut_in_the_middle(server: Server) -> Any:
    text = TEXT.encode()
    inside = text.index("東".encode()) + 1
    found = complete(server, max_tokens=inside)
    return found.choices[0].text, usage(found)


@case
def a_stop_string(server: Server) -> Any:
    found = complete(server, stop=["kinds", "never"])
    (choice,) = found.choices
    assert choice.text == TEXT[: TEXT.index("kinds")]
    return choice.text, choice.finish_reason, choice.model_extra.get("stop_reason")


@case
def a_stop_token(server: Server) -> Any:
    ids = server.http.post("/tokenize", json={"model": MODEL, "prompt": "3"}).json()["tokens"]
    found = complete(server, extra_body={"stop_token_ids": ids})
    (choice,) = found.choices
    return choice.text, choice.finish_reason, choice.model_extra.get("stop_reason")


@case
def an_end_that_is_ignored(server: Server) -> Any:
    found = chat(server, extra_body={"ignore_eos": True}, max_tokens=40)
    assert found.choices[0].message.content.startswith(HELLO)
    return found.choices[0].finish_reason, usage(found)


@case
def a_stream(server: Server) -> Any:
    chunks = list(complete(server, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text == TEXT
    reasons = [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    return text, reasons, usage(chunks[-1]), {chunk.id for chunk in chunks} == {chunks[0].id}


@case
def a_stream_with_a_stop_string(server: Server) -> Any:
    chunks = list(complete(server, stream=True, stop=["sold 3"]))
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text == TEXT[: TEXT.index("sold 3")]
    return text, [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason]


@case
def usage_in_every_chunk(server: Server) -> Any:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(complete(server, stream=True, max_tokens=9, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    return counts == sorted(counts), counts[-1], usage(chunks[-1])


@case
def logprobs_of_a_completion(server: Server) -> Any:
    found = complete(server, max_tokens=10, logprobs=0)
    logprobs = found.choices[0].logprobs
    return logprobs.tokens, [round(each, 3) for each in logprobs.token_logprobs], logprobs.text_offset


@case
def tokens_as_ids(server: Server) -> Any:
    found = complete(server, max_tokens=6, logprobs=0, extra_body={"return_tokens_as_token_ids": True})
    return found.choices[0].logprobs.tokens


@case
def a_chat(server: Server) -> Any:
    found = chat(server)
    (choice,) = found.choices
    assert choice.message.content == HELLO
    return choice.message.content, choice.message.role, choice.finish_reason, usage(found), found.object


@case
def a_chat_in_parts(server: Server) -> Any:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    whole = [{"type": "text", "text": "hi"}]
    asked = [chat(server, messages=[{"role": "user", "content": each}]) for each in (whole, parts)]
    return asked[0].choices[0].message.content, [usage(each)[0] for each in asked]


@case
def a_chat_with_max_completion_tokens(server: Server) -> Any:
    found = server.sync.chat.completions.create(**GREEDY, messages=HI, max_completion_tokens=5)
    return found.choices[0].message.content, found.choices[0].finish_reason


@case
def a_chat_stream(server: Server) -> Any:
    chunks = list(chat(server, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == HELLO
    return text, chunks[0].choices[0].delta.role, chunks[-1].choices[0].finish_reason


@case
def logprobs_of_a_chat(server: Server) -> Any:
    found = chat(server, logprobs=True, max_tokens=8)
    return [(each.token, each.bytes, round(each.logprob, 3)) for each in found.choices[0].logprobs.content]


@case
def a_tool_call(server: Server) -> Any:
    found = chat(server, messages=ADD, tools=TOOLS, max_tokens=100)
    (choice,) = found.choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 3})
    return choice.finish_reason, call.type, choice.message.content, usage(found)


@case
def a_tool_call_in_a_stream(server: Server) -> Any:
    name, arguments, reasons, content = "", "", [], ""
    for chunk in chat(server, messages=ADD, tools=TOOLS, max_tokens=100, stream=True):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for call in choice.delta.tool_calls or ():
                name += call.function.name or ""
                arguments += call.function.arguments or ""
    return name, json.loads(arguments), reasons, content.strip()


@case
def tools_that_must_not_be_called(server: Server) -> Any:
    found = chat(server, messages=ADD, tools=TOOLS, tool_choice="none", max_tokens=100)
    return bool(found.choices[0].message.tool_calls), found.choices[0].finish_reason


@case
def the_result_of_a_tool(server: Server) -> Any:
    found = chat(server, messages=CALLED, tools=TOOLS)
    assert found.choices[0].message.content == RESULT
    return found.choices[0].finish_reason, usage(found)


@case
def many_at_once(server: Server) -> Any:
    async def ask() -> list[Any]:
        async with server.asynchronous() as client:
            return await asyncio.gather(
                *(
                    client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=20 + i % 3)
                    for i in range(12)
                )
            )

    return [(each.choices[0].text, each.usage.completion_tokens) for each in asyncio.run(ask())]


@case
def several_choices_that_are_sampled(server: Server) -> Any:
    found = complete(server, n=3, temperature=1.0, max_tokens=5)
    return [choice.index for choice in found.choices], usage(found)


@case
def several_choices_that_are_greedy(server: Server) -> Any:
    found = complete(server, n=2, max_tokens=5)
    return [choice.text for choice in found.choices]


@case
def a_field_that_nobody_knows(server: Server) -> Any:
    found = complete(server, max_tokens=5, extra_body={"no_such_parameter": 7})
    return found.choices[0].text


@case
def the_models(server: Server) -> Any:
    (model,) = server.sync.models.list().data
    return model.id, model.object, model.model_extra["max_model_len"]


@case
def tokens_of_a_chat(server: Server) -> Any:
    found = server.http.post("/tokenize", json={"model": MODEL, "messages": HI}).json()
    back = server.http.post("/detokenize", json={"model": MODEL, "tokens": found["tokens"]}).json()
    return found["tokens"], found["count"], found["max_model_len"], back["prompt"]


def refused(ask: Callable[[], Any]) -> tuple[str, int | None]:
    """Return the client's error and the status."""
    try:
        ask()
    except openai.APIStatusError as exc:
        error = exc
    else:
        return "answered", None
    if error.status_code != 401:  # vLLM's says {"error": "Unauthorized"}
        assert isinstance(error.body, dict), "an error has OpenAI's shape"
        assert error.body["message"]
    return type(error).__name__, error.status_code


@case
def another_models_name(server: Server) -> Any:
    return refused(lambda: complete(server, model="no-such-model"))


@case
def another_key(server: Server) -> Any:
    return refused(lambda: complete(server._replace(sync=server.sync.with_options(api_key="wrong"))))


@case
def a_prompt_that_is_too_long(server: Server) -> Any:
    return refused(lambda: complete(server, prompt="x" * (MAX_PROMPT + MAX_RESPONSE + 1)))


@case
def more_tokens_than_there_is_room_for(server: Server) -> Any:
    return refused(lambda: complete(server, max_tokens=MAX_PROMPT + MAX_RESPONSE))


@case
def a_temperature_below_zero(server: Server) -> Any:
    return refused(lambda: complete(server, temperature=-1.0))


@case
def messages_of_the_wrong_kind(server: Server) -> Any:
    return refused(lambda: chat(server, messages="hi"))


@case
def no_prompt(server: Server) -> Any:
    return refused(lambda: complete(server, prompt=None))
