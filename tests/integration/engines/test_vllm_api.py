"""Control of a vLLM server over its socket, against a server that hangs up when it likes."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import contextmanager

import pytest

from rlboost_runtime.engines.vllm.api import VllmApi

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
"""By HTTP/1.1 it promises that the connection stays open."""


@contextmanager
def a_server_that_hangs_up_after_each_answer(path):
    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                while b"\r\n\r\n" not in connection.recv(65536):
                    pass
                connection.sendall(ANSWER)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    return "s"


async def test_a_call_does_not_go_out_on_a_connection_that_the_server_has_closed(path):
    """vLLM closes idle ones after 5 s; a busy agent sees that only after it has asked again."""
    with a_server_that_hangs_up_after_each_answer(path):
        api = VllmApi(path, "key")
        try:
            for _ in range(3):
                assert await api.post("/pause?mode=keep") == {}
                time.sleep(0.05)  # noqa: ASYNC251  # the loop is busy while the server closes
        finally:
            await api.close()
