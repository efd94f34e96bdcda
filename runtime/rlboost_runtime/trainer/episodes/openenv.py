"""Environments behind a server of OpenEnv, over its WebSocket protocol: `/ws`, one session per episode.

`reset` gets the row's fields that are no prompt. The observation's text is added to the prompt; each response
of the model becomes an action, as text or as a tool call, until the server says that the episode is done, or
the model calls no tool where there are tools. The reward is that of the steps.

A server of the job's own is started by each process that plays episodes. If it ends, so does the process, and
with it the episodes that it played: they count as those of a process that died. A server elsewhere that
cannot be reached, or vanishes, is `UNREACHABLE`, never a reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from rlboost_runtime.job.environment import OpenEnvServer
from rlboost_runtime.trainer.episodes.outcome import EpisodeCall, EpisodeSetup
from rlboost_runtime.trainer.episodes.play import (
    Dialogue,
    LimitMet,
    OwnTime,
    Play,
    client_of,
    program_environment,
)

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_PROMPT_FIELDS = ("prompt", "messages", "answer")
_OURS = ("done", "reward", "metadata")
_RETRY_S = 0.2
ENDING_S = 2.0
"""So long it may take to notice that a server has ended."""


class Unreachable(Exception):
    """The server cannot be reached, or the connection to it is cut."""


def play_openenv(setup: EpisodeSetup) -> Play:
    """Return how episodes at a server are played; starts the job's own. Raises `ValueError` for one that does
    not start, or whose actions cannot be made."""
    settings = setup.openenv
    assert settings is not None
    url = settings.url
    if settings.command is not None:
        url = _start(settings, settings.command, setup.folder)
    assert url is not None
    url = url.rstrip("/")
    actions = Actions.of(url, settings)

    async def play(call: EpisodeCall, own_time: OwnTime, transport: httpx2.AsyncBaseTransport) -> object:
        try:
            return await at_server(call, own_time, transport)
        except Unreachable:
            if settings.command is not None:
                await asyncio.sleep(ENDING_S)  # if the server has ended, so does this process now
            raise

    async def at_server(call: EpisodeCall, own_time: OwnTime, transport: httpx2.AsyncBaseTransport) -> object:
        async with _session(url, settings) as session:
            row = {name: value for name, value in call.row.items() if name not in _PROMPT_FIELDS}
            begun = await session.ask({"type": "reset", "data": row})
            tools = await actions.tools(session)
            dialogue = Dialogue(client_of(call, own_time, transport), call, session.text(begun))
            rewards: list[list[float]] = []
            with contextlib.suppress(LimitMet):
                await _turns(session, dialogue, actions, tools, rewards, setup.max_turns)
        if settings.reward == "sum":
            return [sum(of_turn) for of_turn in rewards]
        return next((of_turn[-1] for of_turn in reversed(rewards) if of_turn), 0.0)

    return play


async def _turns(
    session: OpenEnvSession,
    dialogue: Dialogue,
    actions: Actions,
    tools: list[dict[str, Any]],
    rewards: list[list[float]],
    max_turns: int,
) -> None:
    """Play; `rewards` gets a list per turn, with what each of its actions has earned."""
    for _ in range(max_turns):
        response, calls = await dialogue.ask(tools)
        rewards.append([])
        if tools and not calls:
            return
        for action, call_id in actions.made(response, calls):
            if isinstance(action, str):
                dialogue.answer(call_id, action)
                continue
            result = await session.ask({"type": "step", "data": action})
            if result.get("reward") is not None:
                rewards[-1].append(float(result["reward"]))
            seen = session.text(result)
            if call_id:
                dialogue.answer(call_id, seen)
            if result.get("done"):
                return
            if not call_id:
                dialogue.tell(seen)


class OpenEnvSession:
    """One episode's connection."""

    def __init__(self, connection: ClientConnection, observation: str | None) -> None:
        self._connection = connection
        self._observation = observation

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the server's answer. Raises `Unreachable`, and `RuntimeError` for an error of the server."""
        try:
            await self._connection.send(json.dumps(message, default=str))
            found = json.loads(await self._connection.recv())
        except (OSError, WebSocketException) as problem:
            raise Unreachable(f"the connection to its server is cut: {problem}") from problem
        data = found.get("data") or {}
        if found.get("type") == "error":
            raise RuntimeError(f"its server says: {data.get('message')} ({data.get('code')})")
        return dict(data)

    def text(self, result: dict[str, Any]) -> str:
        """Return what the model reads of an observation. Raises `ValueError` if the field is missing."""
        seen = {k: v for k, v in (result.get("observation") or {}).items() if k not in _OURS}
        if self._observation is not None:
            if self._observation not in seen:
                fields = ", ".join(sorted(seen)) or "nothing"
                raise ValueError(f"the observation has no field {self._observation}; it has {fields}")
            return _as_text(seen[self._observation])
        texts = [value for value in seen.values() if isinstance(value, str) and value]
        if len(texts) == 1:
            return texts[0]
        return _as_text(seen) if seen else ""


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@asynccontextmanager
async def _session(url: str, settings: OpenEnvServer) -> AsyncIterator[OpenEnvSession]:
    address = "ws" + url.removeprefix("http") + "/ws"
    try:
        connection = await connect(
            address, open_timeout=settings.connect_timeout_s, max_size=MAX_MESSAGE_BYTES, proxy=None
        )
    except (OSError, TimeoutError, WebSocketException) as problem:
        raise Unreachable(f"{address} cannot be reached: {problem}") from problem
    try:
        yield OpenEnvSession(connection, settings.observation)
        with contextlib.suppress(OSError, WebSocketException):
            await connection.send(json.dumps({"type": "close"}))
    finally:
        await connection.close()


# --- actions ------------------------------------------------------------------------------------------------


class Actions:
    """How responses become actions: as the server's schema wants them."""

    def __init__(self, field: str | None, schema: dict[str, Any], *, is_mcp: bool) -> None:
        """`field`: the one that gets the response; None: the model calls tools."""
        self._field = field
        self._schema = schema
        self._is_mcp = is_mcp

    @classmethod
    def of(cls, url: str, settings: OpenEnvServer) -> Actions:
        """Return what the server's `/schema` says. Raises `ValueError`."""
        schema = _schema(url, settings.connect_timeout_s)
        known = {k: v for k, v in (schema.get("properties") or {}).items() if k != "metadata"}
        if settings.action is not None:
            if settings.action not in known:
                raise ValueError(
                    f"environment.openenv.action is {settings.action}, but the action has"
                    f" {', '.join(known) or 'no fields'}"
                )
            return cls(settings.action, schema, is_mcp=False)
        if not known or known.get("type", {}).get("const") in ("call_tool", "list_tools"):
            return cls(None, schema, is_mcp=True)
        required = [name for name in schema.get("required") or () if name in known]
        only = required[0] if len(required) == 1 else next(iter(known)) if len(known) == 1 else None
        if only is not None and known[only].get("type") == "string":
            return cls(only, schema, is_mcp=False)
        return cls(None, schema, is_mcp=False)

    async def tools(self, session: OpenEnvSession) -> list[dict[str, Any]]:
        """Return the tools that the model may call; none where its response is the action."""
        if self._field is not None:
            return []
        if not self._is_mcp:
            schema = {k: v for k, v in self._schema.items() if k not in ("title", "description")}
            schema["properties"] = {k: v for k, v in schema["properties"].items() if k != "metadata"}
            return [_tool("step", str(self._schema.get("description", "")), schema)]
        found = await session.ask({"type": "step", "data": {"type": "list_tools"}})
        tools = (found.get("observation") or {}).get("tools") or []
        return [_tool(each["name"], each["description"], each["input_schema"]) for each in tools]

    def made(self, response: str, calls: list[Any]) -> list[tuple[dict[str, Any] | str, str]]:
        """Return actions, each with the id of its call; a text instead: why there is none."""
        if self._field is not None:
            return [({self._field: response}, "")]
        return [(self._of_call(call), call.id) for call in calls]

    def _of_call(self, call: Any) -> dict[str, Any] | str:
        try:
            arguments = json.loads(call.function.arguments or "{}")
        except ValueError as problem:
            return f"error: the arguments are no JSON: {problem}"
        if not isinstance(arguments, dict):
            return "error: the arguments are no JSON object"
        if self._is_mcp:
            return {"type": "call_tool", "tool_name": call.function.name, "arguments": arguments}
        return arguments if call.function.name == "step" else "error: there is one tool, step"


def _tool(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    described = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": described}


def _schema(url: str, timeout_s: float) -> dict[str, Any]:
    """Return the schema of an action; waits for a server that is starting."""
    deadline = time.monotonic() + timeout_s
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        try:
            with opener.open(f"{url}/schema", timeout=timeout_s) as found:
                return dict(json.load(found)["action"])
        except (ValueError, KeyError, TypeError) as problem:
            raise ValueError(f"{url}/schema is not that of an OpenEnv server: {problem!r}") from problem
        except OSError as problem:
            if time.monotonic() >= deadline:
                raise ValueError(f"{url} did not answer within {timeout_s:g} s: {problem}") from problem
        time.sleep(_RETRY_S)


# --- the job's own server -----------------------------------------------------------------------------------


def _start(settings: OpenEnvServer, command: list[str], folder: str) -> str:
    """Start the server and return its address; this process ends with it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [word.replace("{port}", str(port)) for word in command]
    server = subprocess.Popen(words, cwd=folder, env=program_environment(), stdin=subprocess.DEVNULL)
    try:
        _wait(server, port, settings.connect_timeout_s)
    except BaseException:
        server.kill()
        raise

    async def watch() -> None:
        code = await asyncio.to_thread(server.wait)
        print(f"the server {words[0]} ended with exit code {code}", file=sys.stderr, flush=True)
        os._exit(1)

    _watching.append(asyncio.get_running_loop().create_task(watch()))
    return f"http://127.0.0.1:{port}"


_watching: list[asyncio.Task[None]] = []
"""Keeps the task that watches the server."""


def _wait(server: subprocess.Popen[bytes], port: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        if server.poll() is not None:
            raise ValueError(f"the server ended with exit code {server.returncode} before it listened")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        if time.monotonic() >= deadline:
            raise ValueError(f"the server does not listen on 127.0.0.1:{port} after {timeout_s:g} s")
        time.sleep(_RETRY_S)
