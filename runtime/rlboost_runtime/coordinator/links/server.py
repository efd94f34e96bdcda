"""The coordinator's one public port: TLS, bearer tokens, three WebSockets and six requests."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response, WebSocket, WebSocketDisconnect
from fastapi.responses import JSONResponse
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from rlboost_runtime.errors import NotFound, ProviderError, RLBoostError, RuntimeFault, port_taken
from rlboost_runtime.protocol.messages import MAX_MESSAGE_BYTES
from rlboost_runtime.protocol.prometheus import CONTENT_TYPE, exposition
from rlboost_runtime.protocol.status import read_status
from rlboost_runtime.protocol.transport import listening_socket
from rlboost_runtime.run.credentials import DENIED, RUN, holder_of
from rlboost_runtime.run.folder import RunFolder, read_json, write_json
from rlboost_runtime.run.head import endpoint, listen_host, read_address
from rlboost_runtime.seams import Transport

CLOSE_TIMEOUT_S = 2.0
"""Longest wait for a peer to close its connection."""
MAX_BODY_BYTES = 64 * 1024
"""Longest body of a request."""
_NOT_AN_OBJECT = {"problem": "the body is not a JSON object", "remedy": "send a JSON object"}


@dataclass(frozen=True, slots=True)
class Handlers:
    """Who serves which path."""

    agent: Callable[[Transport, str | None], Awaitable[None]]
    """Takes the machine whose credential it is; None: the run's own token."""
    trainer: Callable[[Transport], Awaitable[None]]
    requests: Callable[[Transport], Awaitable[None]]
    """Takes the endpoint's connection."""
    status: Callable[[], dict[str, Any]]
    preempt: Callable[[str, float | None], Awaitable[None]]
    stop: Callable[[str, str, str, int | None], None]
    """State, problem, remedy, and the exit code where it is not that of the state."""
    runtime: Callable[[str], Awaitable[bytes]]
    """Returns what the machine, which has only dialled out, installs: a tar file."""
    wheels: Callable[[str, str], Awaitable[dict[str, Any] | None]]
    """Returns where and what the packages of the machine's list of that name are; None: not yet. Raises
    `RuntimeFault`: never."""
    is_live: Callable[[str], bool]
    """True for a machine of this run that may still exist and is not revoked."""


class ServedConnection:
    """A WebSocket accepted by us, as a `Transport`."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket

    async def send(self, message: bytes) -> None:
        """Send; raises `ConnectionError` once closed."""
        try:
            await self._websocket.send_bytes(message)
        except (WebSocketDisconnect, RuntimeError) as problem:
            raise ConnectionError(f"connection closed: {problem!r}") from problem

    async def receive(self) -> bytes:
        """Return the next binary message; raises `ConnectionError` once closed."""
        try:
            message = await self._websocket.receive()
        except RuntimeError as problem:
            raise ConnectionError(f"connection closed: {problem}") from problem
        data = message.get("bytes")
        if data is None:
            raise ConnectionError(f"connection closed by the peer, code {message.get('code')}")
        return bytes(data)

    async def close(self) -> None:
        """Close; idempotent."""
        with contextlib.suppress(RuntimeError, WebSocketDisconnect, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._websocket.close()


def make_app(handlers: Handlers, token: str) -> FastAPI:
    """Return the application. Every path requires `Authorization: Bearer TOKEN`: the run's token opens all,
    an agent's credential `/v1/agent`, `/v1/runtime` and `/v1/wheels`. An unknown token gets 401, a known one
    without the right 403, both with the same text (docs/security.md)."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    def judge(header: str | None, for_agents: bool) -> tuple[int, str | None]:
        holder = holder_of(header, token)
        allowed = holder == RUN or (for_agents and holder is not None and handlers.is_live(holder))
        return 401 if holder is None else 200 if allowed else 403, holder or None

    def demand(request: Request, *, for_agents: bool = False) -> str:
        """Return the machine whose credential it is; empty: the run's own token."""
        status, machine = judge(request.headers.get("authorization"), for_agents)
        if status != 200:
            raise HTTPException(status, DENIED)
        return machine or ""

    @app.websocket("/v1/agent")
    async def agent(websocket: WebSocket) -> None:
        status, machine = judge(websocket.headers.get("authorization"), True)
        await _serve(websocket, lambda transport: handlers.agent(transport, machine), status)

    @app.websocket("/v1/trainer")
    async def trainer(websocket: WebSocket) -> None:
        status, _ = judge(websocket.headers.get("authorization"), False)
        await _serve(websocket, handlers.trainer, status)

    @app.websocket("/v1/requests")
    async def requests(websocket: WebSocket) -> None:
        status, _ = judge(websocket.headers.get("authorization"), False)
        await _serve(websocket, handlers.requests, status)

    @app.get("/v1/status")
    async def status(request: Request) -> dict[str, Any]:
        demand(request)
        return handlers.status()

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        demand(request)
        return Response(exposition(read_status(handlers.status())), media_type=CONTENT_TYPE)

    @app.get("/v1/runtime")
    async def runtime(request: Request) -> Response:
        machine = demand(request, for_agents=True)
        return Response(await handlers.runtime(machine), media_type="application/x-tar")

    @app.get("/v1/wheels/{name}")
    async def wheels(name: str, request: Request) -> Response:
        machine = demand(request, for_agents=True)
        try:
            found = await handlers.wheels(machine, name)
        except RuntimeFault as error:
            raise HTTPException(404, _words(error)) from error
        return JSONResponse(found or {}, 202 if found is None else 200)

    @app.post("/v1/preempt")
    async def preempt(request: Request) -> dict[str, Any]:
        demand(request)
        body = await _json(request)
        notice_s = body.get("notice_s")
        if notice_s is not None and not (isinstance(notice_s, int | float) and 0 <= notice_s < 1e6):
            raise HTTPException(400, {"problem": f"notice_s is {notice_s!r}", "remedy": "give seconds"})
        try:
            name = str(body.get("instance", ""))
            await handlers.preempt(name, None if notice_s is None else float(notice_s))
        except NotFound as error:
            raise HTTPException(404, _words(error)) from error
        except ProviderError as error:
            raise HTTPException(503, _words(error)) from error
        return {"ok": True}

    @app.post("/v1/stop", status_code=202)
    async def stop(request: Request) -> dict[str, Any]:
        demand(request)
        body = await _json(request)
        code = body.get("exit_code")
        handlers.stop(
            str(body.get("state", "stopped")),
            str(body.get("problem", "")),
            str(body.get("remedy", "")),
            code if isinstance(code, int) else None,
        )
        return {"ok": True}

    return app


async def _serve(websocket: WebSocket, handler: Callable[[Transport], Awaitable[None]], status: int) -> None:
    if status != 200:
        await websocket.send_denial_response(JSONResponse({"detail": DENIED}, status))
        return
    await websocket.accept()
    connection = ServedConnection(websocket)
    try:
        await handler(connection)
    finally:
        await connection.close()


async def _json(request: Request) -> dict[str, Any]:
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, "the body is too long")
    if not body:
        return {}
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as problem:
        raise HTTPException(400, _NOT_AN_OBJECT) from problem
    if not isinstance(value, dict):
        raise HTTPException(400, _NOT_AN_OBJECT)
    return value


def _words(error: RLBoostError) -> dict[str, str]:
    return {"problem": error.problem, "remedy": error.remedy}


class _WebSocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's own, whose `shutdown` raises `InvalidState` on a connection that its peer is closing."""

    def shutdown(self) -> None:
        """Close the connection, unless it is closing already."""
        if not self.transport.is_closing():
            super().shutdown()


class Server(uvicorn.Server):
    """uvicorn without its own signal handling: our process decides when it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def bind(run: RunFolder) -> socket.socket:
    """Return a listening socket on the run's port, the same one after every restart.

    It is on loopback, or where other machines reach the head (`run.head`).

    Raises `PortTaken` when another program took the port meanwhile.
    """
    known = read_json(run.endpoint)
    address = read_address(run)
    fresh = 0 if address is None else address.control_port
    port = fresh if known is None else int(str(known["url"]).rsplit(":", 1)[1])
    try:
        listener = listening_socket(listen_host(address), port)
    except OSError as problem:
        if problem.errno != errno.EADDRINUSE:
            raise
        raise port_taken(port, "coordinator", run.name) from problem
    write_json(run.endpoint, endpoint(listener.getsockname()[1], address))
    return listener


def make_server(app: FastAPI, run: RunFolder) -> Server:
    """Return the server; serve it with the socket of `bind`."""
    return Server(
        uvicorn.Config(
            app,
            loop="none",
            ws=_WebSocketProtocol,
            ws_max_size=MAX_MESSAGE_BYTES,
            ws_ping_interval=None,
            ws_per_message_deflate=False,
            lifespan="off",
            log_config=None,
            access_log=False,
            ssl_keyfile=run.key,
            ssl_certfile=run.certificate,
            timeout_graceful_shutdown=2,
        )
    )
