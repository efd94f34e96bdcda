"""Every route of the coordinator's and the weight server's ports, and what each token gets there."""

from __future__ import annotations

import asyncio
import inspect
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPSConnection
from pathlib import Path

import pytest
from fastapi.routing import APIRoute, APIWebSocketRoute

from rlboost_runtime.coordinator.links.server import Handlers, bind, make_app, make_server
from rlboost_runtime.run import security
from rlboost_runtime.run.credentials import Readers, Revocations, make_credential
from rlboost_runtime.run.folder import RunFolder, write_json
from rlboost_runtime.seams import Transport
from rlboost_runtime.weights.serve import http
from rlboost_runtime.weights.serve.catalog import StoreCatalog
from rlboost_runtime.weights.store.store import WeightStore

pytestmark = pytest.mark.integration
WHO = ("nobody", "wrong", "forged", "other run", "revoked", "live", "run")
REFUSED = {"nobody": 401, "wrong": 401, "forged": 401, "other run": 401, "revoked": 403, "live": 403}
AGENTS = frozenset({("WEBSOCKET", "/v1/agent"), ("GET", "/v1/runtime"), ("GET", "/v1/wheels/{name}")})
"""What an agent may use; all else is the run's alone, so a new route is closed to agents until it is here."""
OPENED = {"WEBSOCKET": 101, "GET": (200, 202), "POST": (200, 202, 400)}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "demo")
    folder.path.mkdir()
    write_json(folder.job_json, {})
    security.create_secrets(folder)
    Revocations(folder).add({"spot-1"})
    return folder


def headers_of(run: RunFolder) -> dict[str, dict[str, str]]:
    token = security.read_token(run)
    told = {
        "wrong": "x" * len(token),
        "forged": "spot-2." + make_credential(token, "spot-3").partition(".")[2],
        "other run": make_credential("another run's token", "spot-2"),
        "revoked": make_credential(token, "spot-1"),
        "live": make_credential(token, "spot-2"),
        "run": token,
    }
    return {"nobody": {}} | {who: {"Authorization": f"Bearer {text}"} for who, text in told.items()}


async def _end(transport: Transport, machine: str | None = None) -> None:
    await transport.close()


async def _nothing(*_: object) -> bytes:
    return b""


async def _no_wheels(machine: str, name: str) -> None:
    return None


@contextmanager
def coordinator(run: RunFolder) -> Iterator[tuple[int, set[tuple[str, str]]]]:
    """Serve the coordinator's port; yield it and the routes that its router knows."""
    handlers = Handlers(
        agent=_end, trainer=_end, requests=_end, status=dict, preempt=_nothing, stop=lambda *_: None,
        runtime=_nothing, wheels=_no_wheels,
        is_live=lambda machine: machine not in Revocations(run).machines(),
    )  # fmt: skip
    listener, app = bind(run), make_app(handlers, security.read_token(run))
    routes: set[tuple[str, str]] = set()
    for route in app.routes:
        if isinstance(route, APIWebSocketRoute):
            routes.add(("WEBSOCKET", route.path))
        else:
            assert isinstance(route, APIRoute), f"{route} is served without a check of the token"
            routes |= {(method, route.path) for method in route.methods}
    server = make_server(app, run)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        yield listener.getsockname()[1], routes
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


def ask(run: RunFolder, port: int, method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
    context = security.client_context(run.certificate.read_text())
    connection = HTTPSConnection("127.0.0.1", port, context=context, timeout=10.0)
    if method == "WEBSOCKET":
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
        headers, method = headers | upgrade | {"Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="}, "GET"
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, b"" if answer.status == 101 else answer.read()
    finally:
        connection.close()


def test_each_route_of_the_coordinator_opens_to_its_users_alone(run: RunFolder) -> None:
    with coordinator(run) as (port, routes):
        assert {
            ("GET", "/v1/status"),
            ("POST", "/v1/stop"),
            ("WEBSOCKET", "/v1/trainer"),
            ("WEBSOCKET", "/v1/requests"),
        } | AGENTS <= routes
        refusals = set()
        for method, path in sorted(routes):
            for who, headers in headers_of(run).items():
                status, body = ask(run, port, method, path, headers)
                allowed = who == "run" or (who == "live" and (method, path) in AGENTS)
                wanted = OPENED[method] if allowed else REFUSED[who]
                assert status in (wanted if isinstance(wanted, tuple) else (wanted,)), (who, method, path)
                refusals |= set() if allowed else {body}
        assert len(refusals) == 1  # says nothing of what was wrong


def test_each_route_of_the_weight_server_is_for_reading_and_refuses_the_revoked(run: RunFolder) -> None:
    methods = {name for name, _ in inspect.getmembers(http._Handler) if name.startswith("do_")}
    assert methods == {"do_GET"}  # publishes nothing, whoever asks
    paths = set(re.findall(r'self\.path == "([^"]+)"', inspect.getsource(http._Handler)))
    assert paths == {"/v1/weights/latest"}
    paths |= {"/v1/weights/3/manifest.json", "/v1/weights/3/have", "/elsewhere", "/v1/wheels/a-1.whl"}
    paths |= {"/v1/wheels/..%2Fsecrets", "/v1/wheels/../files/a", "/v1/wheels/.draft"}
    with weight_server(run) as port:
        for path in sorted(paths):
            answers = {who: ask(run, port, "GET", path, headers) for who, headers in headers_of(run).items()}
            assert {who: answers[who][0] for who in WHO} == REFUSED | {"live": 404, "run": 404}
            assert len({body for who, (_, body) in answers.items() if who not in ("live", "run")}) == 1
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert ask(run, port, method, "/v1/weights/3", headers_of(run)["live"])[0] == 501
        live = headers_of(run)["live"]
        Revocations(run).add({"spot-2"})  # by the coordinator, another process
        assert ask(run, port, "GET", "/v1/weights/latest", live)[0] == 403


@contextmanager
def weight_server(run: RunFolder) -> Iterator[int]:
    listener, stop = socket.create_server(("127.0.0.1", 0)), threading.Event()
    catalog = StoreCatalog(WeightStore(run.weights), 1.0)
    server = http.WeightHttpServer(listener, security.server_context(run), Readers(run).status_for, catalog)
    thread = threading.Thread(target=server.serve_until, args=(stop,))
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        stop.set()
        thread.join(10)


def test_revocations_outlive_their_process_and_damage_opens_nothing(run: RunFolder) -> None:
    live = headers_of(run)["live"]["Authorization"]
    later = Revocations(run)
    later.add({"spot-4"})
    assert Revocations(run).machines() == {"spot-1", "spot-4"}
    (run.path / "revoked.json").write_text("[")
    assert Readers(run).status_for(live) == 403
    later.add({"spot-5"})
    assert Revocations(run).machines() == {"spot-1", "spot-4", "spot-5"}
    assert Readers(run).status_for(live) == 200
