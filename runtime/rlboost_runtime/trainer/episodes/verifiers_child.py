"""The process that plays a taskset of verifiers: `PYTHON -P verifiers_child.py SOCKET FOLDER`, in the Python
environment that has verifiers 0.4 and the taskset. Nothing of RLBoost is imported here, and nothing of ours
imports this. With `--tasks NUMBER` it prints tasks as rows instead.

SOCKET and FOLDER are as in `child`, and so is the protocol, but for its encoding: everything is JSON. The
taskset is used as it is. Its requests go through verifiers' own client for training to the endpoint's route
for token ids (`/inference/v1/generate`), over a loopback port that leads to the endpoint's socket. Chat
programs are costly to start, so the agent is by default a loop in this process (`LoopHarness`); any other
harness of verifiers may be named.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import resource
import socket
import ssl
import struct
import sys
import traceback
from contextlib import AsyncExitStack
from typing import Any, ClassVar

import httpx
import verifiers.v1 as vf
from openai import AsyncOpenAI, BadRequestError, DefaultAsyncHttpxClient
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.utils.loaders import env_config_type, load_environment, load_taskset, taskset_config_type

__all__ = ["LoopHarness"]

LOADED = -1
SOCKET_NAME = "endpoint.sock"
HARNESS = "rlboost_loop"
"""The name by which verifiers finds `LoopHarness`."""
MODEL = "policy"
MAX_TASKS = 1_000_000
_HEADER = struct.Struct("<I")
_LIMITS = ("max_turns", "context_length_exceeded")


class LoopHarness(vf.Harness[vf.HarnessConfig]):
    """An agent that answers, calls tools, and is done when it calls none: what verifiers' own `null` does,
    without a process per turn."""

    APPENDS_SYSTEM_PROMPT: ClassVar[bool] = True
    SUPPORTS_MCP: ClassVar[bool] = True
    SUPPORTS_RESUME: ClassVar[bool] = True
    EXECUTES_CODE: ClassVar[bool] = False
    NEEDS_CONTAINER: ClassVar[bool] = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Play one segment; every request goes through `endpoint`, which records it."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        messages += _as_messages(prompt)
        servers = {name: {"url": url} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            own = DefaultAsyncHttpxClient(timeout=None, verify=_authorities())
            client = await stack.enter_async_context(
                AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None, http_client=own)
            )
            tools, dispatch, connected = await connect_mcp({"mcpServers": servers}, stack)
            asked: dict[str, Any] = {"tools": tools} if tools else {}
            while True:
                try:
                    answer = await client.chat.completions.create(model=ctx.model, messages=messages, **asked)
                except BadRequestError as refusal:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=str(refusal))
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                calls: list[Any] = list(message.tool_calls)
                for call in calls:
                    result = await _call(call.function.name, call.function.arguments, dispatch, connected)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


@functools.cache
def _authorities() -> ssl.SSLContext:
    """Return what a client trusts, read once: a client made without it reads every authority's certificate
    again, which was half of a turn's cost."""
    return httpx.create_ssl_context()


async def _call(name: str, arguments: str, dispatch: dict[str, Any], servers: dict[str, Any]) -> Any:
    try:
        given = json.loads(arguments or "{}")
    except ValueError as problem:
        return f"error: the arguments are no JSON: {problem}"
    if not isinstance(given, dict) or name not in dispatch:
        return f"error: there is no tool {name} with such arguments; there are {', '.join(dispatch)}"
    return await call_mcp(servers, dispatch, name, given)


def _as_messages(prompt: Any) -> list[dict[str, Any]]:
    """Return what a task begins with as messages of OpenAI's API."""
    if prompt is None:
        return []
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [message.model_dump(exclude_none=True, mode="json") for message in prompt]


# --- the taskset --------------------------------------------------------------------------------------------


def taskset_of(setup: dict[str, Any]) -> Any:
    """Return the taskset. Raises what its import raises."""
    sys.path.insert(0, setup["folder"])
    name = setup["taskset"]
    return load_taskset(taskset_config_type(name).model_validate({"id": name, **setup["config"]}))


def rows_of(taskset: Any, most: int) -> list[dict[str, Any]]:
    """Return the first tasks as rows of a data file: prompt, answer where it has one, and the task itself."""
    rows = []
    for task in itertools.islice(taskset, most):
        data = task.data
        messages = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        messages += _as_messages(data.prompt)
        row: dict[str, Any] = {"messages": messages}
        if getattr(data, "answer", None) is not None:
            row["answer"] = str(data.answer)
        rows.append(row | {"task": data.model_dump(mode="json", exclude_defaults=True)})
    return rows


def environment_of(setup: dict[str, Any]) -> Any:
    """Return the environment with its one agent as the job wants it. Raises `ValueError` for several."""
    sys.modules[HARNESS] = sys.modules[__name__]
    sys.path.insert(0, setup["folder"])
    name = setup["taskset"]
    kind = env_config_type(name)
    roles = [field for field, info in kind.model_fields.items() if isinstance(info.default, vf.AgentConfig)]
    if len(roles) != 1:
        raise ValueError(
            f"taskset {name} has the agents {', '.join(roles) or 'none'}; one can be trained, not several"
        )
    agent = {
        "harness": {"id": setup["harness"] or HARNESS, **setup["harness_config"]},
        "runtime": {"type": "subprocess"},
        "max_turns": setup["max_turns"],
    }
    wanted = {"taskset": {"id": name, **setup["config"]}, roles[0]: agent}
    return load_environment(kind.model_validate(wanted))


# --- episodes -----------------------------------------------------------------------------------------------


class TasksetPlayer:
    """Plays episodes as they are asked for."""

    def __init__(self, setup: dict[str, Any], environment: Any, port: int) -> None:
        self._setup = setup
        self._environment = environment
        self._port = port
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def start(self, call: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """Play an episode; its end is written to `writer`."""

        async def run() -> None:
            number = call["number"]
            try:
                answer = await self._played(call)
            except asyncio.CancelledError:
                answer = [number, None, "timeout", f"not over within {self._setup['timeout_s']:g} s"]
            except MemoryError as error:
                answer = [number, None, "memory", f"it needs more memory than it may have: {error!r}"]
            except BaseException as error:  # noqa: BLE001 - the edge of the process: a taskset may raise anything
                traceback.print_exception(error)
                answer = [number, None, "raised", f"{type(error).__name__}: {error}"[:2000]]
            write(writer, answer)
            self._tasks.pop(number, None)

        self._tasks[call["number"]] = asyncio.create_task(run())

    def end(self, number: int) -> None:
        """End an episode that has taken too long."""
        task = self._tasks.get(number)
        if task is not None:
            task.cancel()

    async def _played(self, call: dict[str, Any]) -> list[Any]:
        number, environment = call["number"], self._environment
        kind = environment._task_cls
        task = kind(kind.data_type().model_validate(call["row"]["task"]), environment.config.taskset.task)
        variable = f"EPISODE_{number}_API_KEY"
        os.environ[variable] = call["key"]
        try:
            context = vf.ModelContext(client=self._client(call, variable), model=MODEL, sampling={})
            episode = await environment.run_episode(task, context)
        finally:
            del os.environ[variable]
        return [number, *_verdict(episode)]

    def _client(self, call: dict[str, Any], variable: str) -> Any:
        return vf.TrainClientConfig(
            base_url=f"http://127.0.0.1:{self._port}/episodes/{call['name']}/v1", api_key_var=variable,
            renderer=call["renderer"], renderer_model_name=self._setup["tokenizer"],
        )  # fmt: skip


def _verdict(episode: Any) -> list[Any]:
    """Return reward, failure and problem of an episode that is over."""
    (trace,) = episode.traces if len(episode.traces) == 1 else (None,)
    errors = [*episode.errors, *(trace.errors if trace is not None else ())]
    if errors and not any(limit in error.message for error in errors for limit in _LIMITS):
        last = errors[-1]
        print(last.traceback or last.message, flush=True)
        kind = "memory" if "MemoryError" in last.message else "raised"
        return [None, kind, f"{last.type}: {last.message}"[:2000]]
    if trace is None:
        return [None, "raised", f"the episode has {len(episode.traces)} traces; one can be trained"]
    reward = float(trace.reward)
    if reward != reward or reward in (float("inf"), float("-inf")):
        return [None, "no_number", f"its reward is {reward}"]
    return [reward, "", ""]


# --- the process --------------------------------------------------------------------------------------------


async def read(reader: asyncio.StreamReader) -> Any:
    """Return the next message. Raises `IncompleteReadError` once the other side is gone."""
    (length,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    return json.loads(await reader.readexactly(length))


def write(writer: asyncio.StreamWriter, answer: list[Any]) -> None:
    """Send an answer."""
    data = json.dumps(answer).encode()
    writer.write(_HEADER.pack(len(data)) + data)


async def relay(folder: int) -> int:
    """Lead connections to a loopback port to the endpoint's socket; return the port."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(
                f"/proc/self/fd/{folder}/{SOCKET_NAME}"
            )
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    return int(server.sockets[0].getsockname()[1])


async def serve(connection: socket.socket, folder: int) -> None:
    """Play until the trainer closes the connection."""
    reader, writer = await asyncio.open_connection(sock=connection)
    setup = await read(reader)
    try:
        if setup["memory_bytes"] is not None:
            resource.setrlimit(resource.RLIMIT_AS, (setup["memory_bytes"],) * 2)
        environment = environment_of(setup)
        serving = environment.serving()
        await serving.__aenter__()
    except BaseException as error:  # noqa: BLE001 - the edge of the process: a taskset may raise anything
        traceback.print_exception(error)
        write(writer, [LOADED, None, "load", f"{type(error).__name__}: {error}"[:2000]])
        await writer.drain()
        return
    player = TasksetPlayer(setup, environment, await relay(folder))
    write(writer, [LOADED])
    try:
        while True:
            asked = await read(reader)
            if isinstance(asked, int):
                player.end(asked)
            else:
                player.start(asked, writer)
    finally:
        await serving.__aexit__(None, None, None)


def main(arguments: list[str]) -> None:
    """Serve the socket that the arguments name, or print tasks."""
    if arguments[0] == "--tasks":
        for row in rows_of(taskset_of(json.load(sys.stdin)), int(arguments[1])):
            print(json.dumps(row, ensure_ascii=False))
        return
    connection, folder = map(int, arguments)
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):  # the trainer has ended
        asyncio.run(serve(socket.socket(fileno=connection), folder))


if __name__ == "__main__":
    main(sys.argv[1:])
