"""The private folder in which a server's socket lies.

Guarantees: only this user can enter it; its path is short, as the paths of Unix sockets must be (107 bytes);
folders of servers that were killed together with their agent are removed by one that is made an hour later,
those of servers that live or are starting never.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from pathlib import Path

SOCKET = "s"
PREFIX = "rlboost-vllm-"
FORGOTTEN_S = 3600.0
"""Age from which a folder without a listener belongs to no server that is still starting: vLLM binds its
socket long before it listens."""
_CONNECT_TIMEOUT_S = 1.0


def make_socket_folder() -> Path:
    """Make a new folder of mode 700, after removing those that nobody uses any more."""
    remove_stale(Path(tempfile.gettempdir()))
    return Path(tempfile.mkdtemp(prefix=PREFIX))


def remove_stale(parent: Path) -> None:
    """Remove the folders below `parent` whose server is gone; others' folders cannot be, and stay."""
    for folder in parent.glob(f"{PREFIX}*"):
        if _is_stale(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_stale(folder: Path) -> bool:
    try:
        return time.time() - folder.stat().st_mtime > FORGOTTEN_S and not _has_listener(folder)
    except OSError:
        return False


def _has_listener(folder: Path) -> bool:
    """Whether a server lives: the kernel refuses connections to a socket whose owner is gone."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_TIMEOUT_S)
        try:
            probe.connect(str(folder / SOCKET))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # busy, or not ours to judge
    return True
