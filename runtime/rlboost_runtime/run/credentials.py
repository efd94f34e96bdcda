"""Credentials of agents: which machine of a run a bearer token stands for, and which machines are revoked.

A machine's credential is its name and an HMAC-SHA256 of it under the run's token, which stays on the head. So
the head keeps no table of credentials, a credential opens nothing of another machine or run, and names are
never reused within a run. What is revoked lies in `revoked.json`, synced; docs/security.md says who may do
what.
"""

from __future__ import annotations

import hmac
from typing import Final

from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.run.folder import RunFolder, read_json, write_json
from rlboost_runtime.run.security import authorised, read_token

MAX_HEADER_CHARS = 512
"""Longest `Authorization` header that is looked at."""
DENIED = "this token does not open this"
"""The text of every refusal, whatever its reason."""
RUN: Final = ""
"""Whom the run's own token stands for, in the place of a machine's name."""
_FILE = "revoked.json"


def make_credential(token: str, machine: str) -> str:
    """Return the bearer token of the agents of `machine` in the run with this token."""
    digest = hmac.digest(token.encode(), f"rlboost agent 1\0{machine}".encode(), "sha256")
    return f"{machine}.{digest.hex()}"


def make_viewer_key(token: str) -> str:
    """Return the key that shows the page of the run with this token, and opens nothing else."""
    return hmac.digest(token.encode(), b"rlboost dashboard 1", "sha256").hex()


def holder_of(header: str | None, token: str) -> str | None:
    """Return the machine whose credential an `Authorization` header carries, `RUN`, or None for nobody's."""
    if header is None or not token or len(header) > MAX_HEADER_CHARS:
        return None
    if authorised(header, token):
        return RUN
    machine = header.removeprefix("Bearer ").rpartition(".")[0]
    if not machine or not machine.isascii():
        return None
    return machine if authorised(header, make_credential(token, machine)) else None


class Revocations:
    """The machines of a run whose credentials open nothing any more. Nothing is ever taken out."""

    def __init__(self, run: RunFolder) -> None:
        self._path = run.path / _FILE
        self._read_at: tuple[int, int] | None = None
        self._machines: frozenset[str] = frozenset()

    def add(self, machines: set[str]) -> None:
        """Revoke, durably. A damaged file is replaced. Raises `OSError`."""
        try:
            known = self.machines()
        except RuntimeFault:
            known = self._machines
            self._path.replace(self._path.with_name(f"{_FILE}.damaged"))
        if not machines <= known or not self._path.exists():
            write_json(self._path, sorted(known | machines), durably=True)
        self._machines = known | machines

    def machines(self) -> frozenset[str]:
        """Return what is revoked, read again where the file has changed. `RuntimeFault`: it is damaged."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return self._machines
        stamp = (status.st_mtime_ns, status.st_ino)
        if stamp != self._read_at:
            told = read_json(self._path)
            if not isinstance(told, list):
                raise RuntimeFault(
                    f"{self._path} is damaged: it holds no list", "start the coordinator again"
                )
            self._machines, self._read_at = frozenset(map(str, told)), stamp
        return self._machines


class Readers:
    """Who may read weights from the head: the run itself, and the agents of machines that are not revoked."""

    def __init__(self, run: RunFolder) -> None:
        self._token = read_token(run)
        self._revoked = Revocations(run)

    def status_for(self, header: str | None) -> int:
        """Return 200, 401 for a token of nobody, 403 for a revoked one. A damaged list admits no agent."""
        holder = holder_of(header, self._token)
        if holder is None:
            return 401
        if holder == RUN:
            return 200
        try:
            return 403 if holder in self._revoked.machines() else 200
        except (RuntimeFault, OSError):
            return 403
