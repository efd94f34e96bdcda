from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path

import pytest
from websockets.asyncio.server import Request, Response, ServerConnection, serve

from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.protocol import transport
from rlboost_runtime.protocol.messages import MAX_MESSAGE_BYTES
from rlboost_runtime.run import security
from rlboost_runtime.run.folder import RunFolder

pytestmark = pytest.mark.integration


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "one")
    security.create_secrets(run)
    return run


def check(connection: ServerConnection, request: Request) -> Response | None:
    if request.path == "/busy":
        return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, "restarting\n")
    if request.headers.get("Authorization") != "Bearer right":
        return connection.respond(HTTPStatus.UNAUTHORIZED, "no\n")
    return None


async def echo(connection: ServerConnection) -> None:
    async for message in connection:
        if message == b"bye":
            return
        await connection.send(message)


@asynccontextmanager
async def echo_server(run: RunFolder) -> AsyncIterator[int]:
    async with serve(
        echo,
        "127.0.0.1",
        0,
        ssl=security.server_context(run),
        process_request=check,
        max_size=MAX_MESSAGE_BYTES,
        close_timeout=1,
    ) as server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize("scheme", ["https", "wss"])
async def test_messages_come_back_whole_and_in_order(run: RunFolder, scheme: str) -> None:
    async with echo_server(run) as port:
        link = await transport.connect(
            f"{scheme}://127.0.0.1:{port}/v1/agent", "right", run.certificate.read_text(), timeout_s=5
        )
        messages = [b"", b"\x00" * 5_000_000, b"last"]
        for message in messages:
            await link.send(message)
        assert [await link.receive() for _ in messages] == messages
        await link.close()
        await link.close()


async def test_a_closed_connection_is_a_connection_error(run: RunFolder) -> None:
    async with echo_server(run) as port:
        link = await transport.connect(
            f"https://127.0.0.1:{port}/", "right", run.certificate.read_text(), timeout_s=5
        )
        await link.send(b"bye")
        with pytest.raises(ConnectionError):
            await link.receive()
        with pytest.raises(ConnectionError):
            await link.send(b"x")


async def test_a_wrong_token_is_final(run: RunFolder) -> None:
    async with echo_server(run) as port:
        with pytest.raises(ProtocolError, match="401") as caught:
            await transport.connect(
                f"https://127.0.0.1:{port}/", "wrong", run.certificate.read_text(), timeout_s=5
            )
    assert "wrong" not in str(caught.value)
    assert "of the same run" in caught.value.remedy


async def test_a_busy_server_may_be_asked_again(run: RunFolder) -> None:
    async with echo_server(run) as port:
        with pytest.raises(ConnectionError, match="503"):
            await transport.connect(
                f"https://127.0.0.1:{port}/busy", "right", run.certificate.read_text(), timeout_s=5
            )


async def test_another_certificate_never_sees_the_token(run: RunFolder, tmp_path: Path) -> None:
    other = RunFolder(tmp_path / "other")
    security.create_secrets(other)
    async with echo_server(other) as port:
        with pytest.raises(ProtocolError, match="certificate") as caught:
            await transport.connect(
                f"https://127.0.0.1:{port}/", "right", run.certificate.read_text(), timeout_s=5
            )
    assert "this run's head" in caught.value.remedy


async def test_nobody_there_is_a_connection_error(run: RunFolder) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(ConnectionError):
            await transport.connect(
                f"https://127.0.0.1:{port}/", "right", run.certificate.read_text(), timeout_s=5
            )


async def test_a_silent_server_is_given_up_at_the_deadline(run: RunFolder) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        async with asyncio.timeout(5):
            with pytest.raises(ConnectionError, match=r"within 0\.2 s"):
                await transport.connect(
                    f"https://127.0.0.1:{silent.getsockname()[1]}/",
                    "right",
                    run.certificate.read_text(),
                    timeout_s=0.2,
                )


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/", "ws://127.0.0.1:1/", "127.0.0.1:1", ""])
async def test_plain_text_urls_are_refused(run: RunFolder, url: str) -> None:
    with pytest.raises(ProtocolError, match=f"cannot dial '{url}'"):
        await transport.connect(url, "right", run.certificate.read_text(), timeout_s=1)


async def test_close_is_bounded_when_the_peer_is_stuck(run: RunFolder) -> None:
    stuck = asyncio.Event()

    async def never_reads(connection: ServerConnection) -> None:
        connection.transport.pause_reading()
        await stuck.wait()

    async with serve(
        never_reads, "127.0.0.1", 0, ssl=security.server_context(run), close_timeout=0.1
    ) as server:
        port = server.sockets[0].getsockname()[1]
        link = await transport.connect(
            f"https://127.0.0.1:{port}/", "right", run.certificate.read_text(), timeout_s=5
        )
        async with asyncio.timeout(4):
            await link.close()
        stuck.set()
