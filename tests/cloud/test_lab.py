"""The lab itself: a machine that is reset tells its peers before it is gone, one taken in silence does not.

What tests of whole runs wait for depends on it, however busy the host is.
"""

from __future__ import annotations

import contextlib
import socket
import time

import pytest
from cloudlab.client import Lab
from cloudlab.machine import GATEWAY
from lab_machines import rented

pytestmark = pytest.mark.usefixtures("account")

HELD_MIB = 1024
"""Memory of the process that has the connection, as an engine has it. The kernel frees that first and closes
the connection after, while the machine's other processes are long dead."""
DIAL = f"""\
setsid python3 - <<'END' > /dev/null 2>&1 &
import mmap, socket, time
held = mmap.mmap(-1, {HELD_MIB} << 20)
held.madvise(mmap.MADV_NOHUGEPAGE)
for _ in range({HELD_MIB}):
    held.write(bytes(1 << 20))
line = socket.create_connection(("{GATEWAY}", {{port}}))
line.sendall(b"here")
time.sleep(1000)
END
"""


@pytest.fixture
def listener():
    with socket.create_server((GATEWAY, 0)) as made:
        made.settimeout(30)
        yield made


def dial(lab: Lab, listener: socket.socket, machine: str) -> socket.socket:
    """Have the machine connect to us from a process that takes long to end."""
    lab.ask("shell", id=machine, script=DIAL.format(port=listener.getsockname()[1]))
    peer, _ = listener.accept()
    peer.settimeout(30)
    assert peer.recv(4) == b"here"
    return peer


def reclaim(lab: Lab, machine: str, how: str) -> float:
    """Have it taken; return how long that took."""
    began = time.monotonic()
    lab.ask("reclaim", id=machine, how=how)
    return time.monotonic() - began


def is_listed(lab: Lab, machine: str) -> bool:
    (found,) = [m for m in lab.machines() if m["id"] == machine]
    return found["ended_at"] is None


@pytest.mark.parametrize("turn", range(3))
def test_a_reset_machine_says_so_before_it_is_gone(lab: Lab, listener: socket.socket, turn: int) -> None:
    with rented(lab, "") as (machine, _), dial(lab, listener, machine) as peer:
        reclaim(lab, machine, "reset")
        peer.settimeout(1.0)
        with contextlib.suppress(ConnectionResetError):
            assert peer.recv(1) == b"", "nothing was sent but the end"


def test_a_machine_taken_in_silence_says_nothing_and_is_listed_for_a_while(
    lab: Lab, listener: socket.socket
) -> None:
    with rented(lab, "") as (machine, _), dial(lab, listener, machine) as peer:
        took_s = reclaim(lab, machine, "silent")
        peer.settimeout(max(0.1, 5.0 - took_s))
        with pytest.raises(TimeoutError):
            peer.recv(1)
        assert is_listed(lab, machine)
        deadline = time.monotonic() + 10
        while is_listed(lab, machine):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        peer.settimeout(1.0)
        with pytest.raises(TimeoutError):
            peer.recv(1)
