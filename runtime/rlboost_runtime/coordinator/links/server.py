"""The coordinator's one public port: TLS, bearer token, two WebSockets and five requests."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response, WebSocket, WebSocketDisconnect

from rlboost_runtime.errors import NotFound, ProviderError, RLBoostError, port_taken
from rlboost_runtime.protocol.messages import MAX_MESSAGE_BYTES
from rlboost_runtime.protocol.prometheus import CONTENT_TYPE, exposition
from rlboost_runtime.protocol.status import read_status
from rlboost_runtime.run.folder import RunFolder, read_json, write_json
from rlboost_runtime.run.head import endpoint, listen_host, read_address
from rlboost_runtime.run.security import authorised
from rlboost_runtime.seams import Transport

CLOSE_TIMEOUT_S = 2.0
"""Longest wait for a peer to close its connection."""
_NOT_AN_OBJECT = {"problem": "the body is not a JSON object", "remedy": "send a JSON object"}


@dataclass(frozen=True, slots=True)
class Handlers:
    """Who serves which path."""

    agent: Callable[[Transport], Awaitable[None]]
    trainer: Callable[[Transport], Awaitable[None]]
    status: Callable[[], dict[str, Any]]
    preempt: Callable[[str, float | None], Awaitable[None]]
    stop: Callable[[str, str, str, int | None], None]
    """State, problem, remedy, and the exit code where it is not that of the state."""
    runtime: Callable[[], Awaitable[bytes]]
    """Returns what a machine that has only dialled out installs: a tar file."""


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
    """Return the application. Every path requires `Authorization: Bearer <the run's token>`."""
    app = FastAPI(openapi_url=None)

    def demand(authorization: str | None) -> None:
        if not authorised(authorization, token):
            raise HTTPException(401, "wrong or missing run token")

    @app.websocket("/v1/agent")
    async def agent(websocket: WebSocket) -> None:
        await _serve(websocket, handlers.agent, token)

    @app.websocket("/v1/trainer")
    async def trainer(websocket: WebSocket) -> None:
        await _serve(websocket, handlers.trainer, token)

    @app.get("/v1/status")
    async def status(request: Request) -> dict[str, Any]:
        demand(request.headers.get("authorization"))
        return handlers.status()

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        demand(request.headers.get("authorization"))
        return Response(exposition(read_status(handlers.status())), media_type=CONTENT_TYPE)

    @app.get("/v1/runtime")
    async def runtime(request: Request) -> Response:
        demand(request.headers.get("authorization"))
        return Response(await handlers.runtime(), media_type="application/x-tar")

    @app.post("/v1/preempt")
    async def preempt(request: Request) -> dict[str, Any]:
        demand(request.headers.get("authorization"))
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
        demand(request.headers.get("authorization"))
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


async def _serve(websocket: WebSocket, handler: Callable[[Transport], Awaitable[None]], token: str) -> None:
    if not authorised(websocket.headers.get("authorization"), token):
        await websocket.close(4401)  # before accept: the peer sees HTTP 403
        return
    await websocket.accept()
    connection = ServedConnection(websocket)
    try:
        await handler(connection)
    finally:
        await connection.close()


async def _json(request: Request) -> dict[str, Any]:
    body = await request.body()
    if not body:
        return {}
    try:
        value = await request.json()
    except ValueError as problem:
        raise HTTPException(400, _NOT_AN_OBJECT) from problem
    if not isinstance(value, dict):
        raise HTTPException(400, _NOT_AN_OBJECT)
    return value


def _words(error: RLBoostError) -> dict[str, str]:
    return {"problem": error.problem, "remedy": error.remedy}


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
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((listen_host(address), port))
    except OSError as problem:
        listener.close()
        if problem.errno != errno.EADDRINUSE:
            raise
        raise port_taken(port, "coordinator", run.name) from problem
    listener.listen(1024)
    write_json(run.endpoint, endpoint(listener.getsockname()[1], address))
    return listener


def make_server(app: FastAPI, run: RunFolder) -> Server:
    """Return the server; serve it with the socket of `bind`."""
    return Server(
        uvicorn.Config(
            app,
            loop="none",
            ws="websockets-sansio",
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
