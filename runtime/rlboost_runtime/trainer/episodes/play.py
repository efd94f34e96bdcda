"""How an environment is played: a user's class, a user's function, or a program.

- A **class** is made once per episode. `reset` gets those fields of the row that it has parameters for and
  may return a text that is added to the prompt. With a method `step(response) -> str | None` the environment
  is a conversation: each response is given to it, and what it returns is the next message; None ends it.
  Without one, its other public methods are tools, and the episode lasts as long as the model calls some.
  `get_reward() -> float` says the reward; without it the job's `reward` scores the last response.
- A **function**, `async def episode(client, row)`, is given an `openai.AsyncOpenAI` and returns the reward,
  or None for the job's.
- A **program** reads the row from standard input and prints {"reward": number} as its last line.

The class's methods run in threads, so that they may block. An episode's time stands still while it waits for
the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pydantic

from rlboost_runtime.trainer.episodes.outcome import EpisodeCall, EpisodeSetup

MODEL = "policy"
"""The endpoint of an episode serves one model, whatever name it is asked for."""
LIMITS = ("max_turns", "context_length_exceeded")
"""What the endpoint refuses a request for that would exceed the episode's limits."""
MAX_OUTPUT_BYTES = 16 * 1024 * 1024
_DIAL_S = 10.0

Play = Callable[[EpisodeCall, "OwnTime", httpx2.AsyncBaseTransport], Awaitable[object]]
"""Plays an episode; returns what its environment says the reward is."""


class OwnTime:
    """Counts an episode's own time and ends it after `seconds`; it stands still within `model`."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._timeout = asyncio.timeout(seconds)
        self._num_waiting = 0

    async def __aenter__(self) -> OwnTime:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self._timeout.__aexit__(*exc)

    @property
    def is_over(self) -> bool:
        """True once it has ended the episode."""
        return self._timeout.expired()

    @contextmanager
    def model(self) -> Iterator[None]:
        """Wait for the model."""
        now = asyncio.get_running_loop().time
        due = self._timeout.when()
        if self._num_waiting == 0 and due is not None:
            self._left = due - now()
            self._timeout.reschedule(None)
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1
            if self._num_waiting == 0 and not self._timeout.expired():
                self._timeout.reschedule(now() + self._left)


class _Timed(httpx2.AsyncBaseTransport):
    """A transport whose time is the model's: a response is there whole when it returns."""

    def __init__(self, transport: httpx2.AsyncBaseTransport, own_time: OwnTime) -> None:
        self._transport = transport
        self._own_time = own_time

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        with self._own_time.model():
            response = await self._transport.handle_async_request(request)
            await response.aread()
            return response


def client_of(
    call: EpisodeCall, own_time: OwnTime, transport: httpx2.AsyncBaseTransport
) -> openai.AsyncOpenAI:
    """Return the episode's client."""
    timeout = httpx2.Timeout(None, connect=_DIAL_S)
    return openai.AsyncOpenAI(
        base_url=f"http://rlboost/episodes/{call.name}/v1",
        api_key=call.key,
        timeout=timeout,
        http_client=httpx2.AsyncClient(
            transport=_Timed(transport, own_time), timeout=timeout, trust_env=False
        ),
    )


def is_limit(error: BaseException) -> bool:
    """Return True if the endpoint refused a request because of the episode's limits."""
    return isinstance(error, openai.BadRequestError) and error.param in LIMITS


# --- functions ----------------------------------------------------------------------------------------------


def play_function(function: Callable[..., Awaitable[object]]) -> Play:
    """Return how a user's function is played."""

    async def play(call: EpisodeCall, own_time: OwnTime, transport: httpx2.AsyncBaseTransport) -> object:
        return await function(client_of(call, own_time, transport), call.row)

    return play


# --- classes ------------------------------------------------------------------------------------------------


class Threads:
    """The threads in which environments run."""

    def __init__(self, num: int) -> None:
        self._pool = ThreadPoolExecutor(num, thread_name_prefix="environment")
        self._running: set[object] = set()

    @property
    def are_busy(self) -> bool:
        """True while an environment runs in any of them."""
        return bool(self._running)

    async def run(self, function: Callable[..., object], *arguments: object, **named: object) -> Any:
        """Return what `function` returns. Cancelled, it leaves the thread running."""

        mark = object()

        def marked() -> object:
            try:
                return function(*arguments, **named)
            finally:
                self._running.discard(mark)

        self._running.add(mark)
        return await asyncio.get_running_loop().run_in_executor(self._pool, marked)


def play_class(kind: type, max_turns: int, threads: Threads) -> Play:
    """Return how environments of a user's class are played. Raises `ValueError` for a class that is none."""
    if not callable(getattr(kind, "reset", None)):
        raise ValueError(f"{kind.__name__} has no method reset")
    talks = callable(getattr(kind, "step", None))
    tools = {} if talks else tools_of(kind)
    if not talks and not tools:
        raise ValueError(f"{kind.__name__} has neither a method step nor a tool (a public method)")

    async def play(call: EpisodeCall, own_time: OwnTime, transport: httpx2.AsyncBaseTransport) -> object:
        environment = await threads.run(kind)
        client = client_of(call, own_time, transport)
        told = await threads.run(environment.reset, **_fitting(environment.reset, call.row))
        dialogue = Dialogue(client, call, "" if told is None else str(told))
        with contextlib.suppress(LimitMet):
            if talks:
                await _talk(environment, dialogue, max_turns, threads)
            else:
                await _use_tools(environment, dialogue, tools, max_turns, threads)
        if not callable(getattr(environment, "get_reward", None)):
            return None
        return await threads.run(environment.get_reward)

    return play


class LimitMet(Exception):
    """The episode asked for more than it may have."""


class Dialogue:
    """What model and environment have said: messages, or plain text for a model without a chat template."""

    def __init__(self, client: openai.AsyncOpenAI, call: EpisodeCall, told: str) -> None:
        self._client = client
        self._text = call.prompt + told
        self._messages: list[dict[str, Any]] | None = None
        if call.messages is not None:
            self._messages = [dict(message) for message in call.messages]
            if told and self._messages and self._messages[-1]["role"] == "user":
                self._messages[-1]["content"] += told
            elif told:
                self._messages.append({"role": "user", "content": told})

    async def ask(self, tools: list[dict[str, Any]] | None = None) -> tuple[str, list[Any]]:
        """Return the model's response and the tools that it calls."""
        try:
            if self._messages is None:
                answer = await self._client.completions.create(
                    model=MODEL, prompt=self._text, extra_body={"max_tokens": None}
                )
                self._text += answer.choices[0].text
                return answer.choices[0].text, []
            messages: Any = self._messages
            offered: Any = tools or openai.omit
            reply = await self._client.chat.completions.create(model=MODEL, messages=messages, tools=offered)
        except openai.BadRequestError as refusal:
            if is_limit(refusal):
                raise LimitMet from refusal
            raise
        said = reply.choices[0].message
        self._messages.append(said.model_dump(exclude_none=True))
        return said.content or "", list(said.tool_calls or [])

    def tell(self, text: str) -> None:
        """Add what the environment says."""
        if self._messages is None:
            self._text += text
        else:
            self._messages.append({"role": "user", "content": text})

    def answer(self, call_id: str, text: str) -> None:
        """Add what a tool returned."""
        assert self._messages is not None
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    @property
    def is_chat(self) -> bool:
        """True if it has messages."""
        return self._messages is not None


async def _talk(environment: Any, dialogue: Dialogue, max_turns: int, threads: Threads) -> None:
    for _ in range(max_turns):
        response, _calls = await dialogue.ask()
        seen = await threads.run(environment.step, response)
        if seen is None:
            return
        dialogue.tell(str(seen))


async def _use_tools(
    environment: Any,
    dialogue: Dialogue,
    tools: dict[str, dict[str, Any]],
    max_turns: int,
    threads: Threads,
) -> None:
    if not dialogue.is_chat:
        raise ValueError("tools need a chat template, and the prompt is plain text")
    for _ in range(max_turns):
        _, calls = await dialogue.ask(list(tools.values()))
        if not calls:
            return
        for call in calls:
            name = call.function.name
            try:
                if name not in tools:
                    raise ValueError(f"there is no tool {name}; there are {', '.join(tools)}")
                result = await threads.run(getattr(environment, name), **json.loads(call.function.arguments))
            except Exception as error:  # noqa: BLE001 - the model is told what its call led to
                result = f"error: {error}"
            dialogue.answer(call.id, str(result))


def _fitting(function: Callable[..., object], row: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the row that `function` has parameters for."""
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return row
    return {name: value for name, value in row.items() if name in parameters}


def tools_of(kind: type) -> dict[str, dict[str, Any]]:
    """Return OpenAI's description of the public methods of a class, by name, but for `reset` and
    `get_reward`. Raises `ValueError` for one whose parameters have no types."""
    found = {}
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_") and name not in ("reset", "get_reward"):
            found[name] = _tool(name, method)
    return found


def _tool(name: str, method: Callable[..., object]) -> dict[str, Any]:
    text = inspect.getdoc(method) or ""
    said = dict(re.findall(r"^\s*(\w+)(?: \([^)]*\))?: (.+)$", text, re.MULTILINE))
    types = inspect.get_annotations(method, eval_str=True)
    fields: dict[str, Any] = {}
    for parameter in list(inspect.signature(method).parameters.values())[1:]:
        if parameter.name not in types:
            raise ValueError(f"tool {name}: parameter {parameter.name} has no type; write one")
        default = ... if parameter.default is parameter.empty else parameter.default
        described = pydantic.Field(default, description=said.get(parameter.name))
        fields[parameter.name] = (types[parameter.name], described)
    schema = pydantic.create_model(name, **fields).model_json_schema()
    schema.pop("title", None)
    for each in schema.get("properties", {}).values():
        each.pop("title", None)
    described = {"name": name, "description": text.split("\n\n")[0], "parameters": schema}
    return {"type": "function", "function": described}


# --- programs -----------------------------------------------------------------------------------------------


def play_command(setup: EpisodeSetup) -> Play:
    """Return how a program is played. It cannot say when it waits for the model: whoever has started this
    process ends it."""
    assert setup.command is not None

    async def play(call: EpisodeCall, own_time: OwnTime, transport: httpx2.AsyncBaseTransport) -> object:
        environment = program_environment() | {
            "OPENAI_BASE_URL": f"{call.url}/episodes/{call.name}/v1",
            "OPENAI_API_KEY": call.key,
        }
        asked = {"prompt": call.prompt, "messages": call.messages, "row": call.row}
        with own_time.model():
            process = await asyncio.create_subprocess_exec(
                *setup.command or (), cwd=setup.folder, env=environment, stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
            try:
                out, err = await process.communicate(json.dumps(asked, default=str).encode())
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        sys.stderr.buffer.write(err[-MAX_OUTPUT_BYTES:])
        sys.stderr.flush()
        return _reward_of(process.returncode or 0, out, err)

    return play


def program_environment() -> dict[str, str]:
    """Return ours for a program: `python` without a folder is the one that runs this, whatever the shell that
    launched the run had on its path; one from elsewhere does not get our packages."""
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    paths = [str(Path(sys.executable).parent), ours.get("PATH", os.defpath)]
    return ours | {"PATH": os.pathsep.join(paths)}


def _reward_of(code: int, out: bytes, err: bytes) -> object:
    if code:
        said = err.decode(errors="replace").strip().splitlines()
        if said and said[-1].startswith("MemoryError"):
            raise MemoryError(f"exit code {code}")
        raise ChildProcessError(f"exit code {code}: {said[-1] if said else 'it printed nothing'}")
    lines = out.decode(errors="replace").strip().splitlines()
    last = lines[-1] if lines else ""
    try:
        return json.loads(last)["reward"]
    except (ValueError, KeyError, TypeError) as problem:
        raise ValueError(f'its last line is no {{"reward": number}}: {last[:200]!r}') from problem
