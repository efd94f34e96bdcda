"""Which connections a weight server ends."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from rlboost_runtime.weights.serve import connections
from rlboost_runtime.weights.serve.connections import (
    AUTHORISE_S,
    LEAST_BYTES,
    UNREAD_S,
    Connection,
    Connections,
)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(5)
    with ours, theirs:
        yield ours, theirs


def is_open(theirs: socket.socket) -> bool:
    theirs.setblocking(False)
    try:
        return theirs.recv(1) != b""
    except BlockingIOError:
        return True


def test_without_the_token_it_ends(pair: tuple[socket.socket, socket.socket]) -> None:
    connection, began = Connection(pair[0]), time.monotonic()
    connection.check(began + AUTHORISE_S - 1)
    assert is_open(pair[1])
    connection.check(began + AUTHORISE_S + 1)
    assert not is_open(pair[1])


def test_idle_between_answers_it_goes_on(pair: tuple[socket.socket, socket.socket]) -> None:
    connection = Connection(pair[0], is_authorised=True)
    with connection.sending_to("a"):
        pass
    connection.check(time.monotonic() + 100 * UNREAD_S)
    assert is_open(pair[1])


@pytest.mark.parametrize(("taken", "goes_on"), [(LEAST_BYTES, True), (LEAST_BYTES // 5, False), (0, False)])
def test_who_takes_next_to_nothing_is_cut_off(
    pair: tuple[socket.socket, socket.socket], taken: int, goes_on: bool
) -> None:
    connection, began = Connection(pair[0], is_authorised=True), time.monotonic()
    with connection.sending_to("a"):
        for i in range(1, 5):
            connection.sent_bytes += taken
            connection.check(began + i * (UNREAD_S - 1))
            if i == 1:
                assert is_open(pair[1])
        assert is_open(pair[1]) == goes_on


def test_a_new_answer_has_its_own_time(pair: tuple[socket.socket, socket.socket]) -> None:
    connection = Connection(pair[0], is_authorised=True, _seen_at=-1e9)
    with connection.sending_to("a"):
        connection.check(time.monotonic())
        assert is_open(pair[1])


def test_there_are_only_so_many(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 1)
    both = Connections()
    assert both.add(pair[0])
    assert not both.add(pair[1])
    assert pair[1].fileno() == -1
    both.drop(pair[0])
    other, another = socket.socketpair()
    with other, another:
        assert both.add(other)
