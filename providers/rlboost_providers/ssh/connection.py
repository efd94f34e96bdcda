"""One SSH connection to a host of the user's, as `ssh` would make it: config, agent, keys, jump host.

Guarantees: a host whose key is not known, or has changed, is refused, with its fingerprint and what to type;
every wait has a deadline; requests travel on standard input, never in arguments. Passwords are not asked for.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from rlboost_runtime.errors import ConfigError, CredentialsRejected, NoCapacity, ProviderError

CONNECT_S = 8.0
"""Longest wait for TCP, and again for the key exchange and the sign-in."""
ANSWER_S = 30.0
"""Longest wait for the host's answer; ending a machine takes up to 10 s."""
KEEPALIVE_S = 10
"""A connection through a router that forgets is kept alive, and its loss noticed."""

_HOST = re.compile(r"(?:(?P<user>[^@\s]+)@)?(?P<name>\[[^\]]+\]|[^:@\s]+)(?::(?P<port>\d+))?")
_NO_KEY = "No authentication methods available"  # paramiko has no class for it
_RUN = "import sys;i=sys.stdin.buffer;exec(compile(i.read(int(i.readline())),'rlboost','exec'))"
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class HostAddress:
    """Where a host is and who we are there."""

    name: str
    port: int
    user: str | None
    keys: tuple[str, ...]
    jump: str | None


def address_of(host: str, *, jump_host: str | None = None, identity_file: str | None = None) -> HostAddress:
    """Return what `host` (USER@HOST:PORT, or a name of ~/.ssh/config) stands for. Raises `ConfigError`."""
    match = _HOST.fullmatch(host)
    if match is None:
        raise ConfigError(f"{host!r} is no host", "write USER@HOST or USER@HOST:PORT")
    name = match["name"].strip("[]")
    config = _config(name)
    keys = [identity_file] if identity_file else [*config.get("identityfile", [])]
    return HostAddress(
        name=str(config.get("hostname", name)),
        port=int(match["port"] or config.get("port", 22)),
        user=match["user"] or config.get("user"),
        keys=tuple(str(Path(key).expanduser()) for key in keys),
        jump=jump_host or config.get("proxyjump"),
    )


class SshHost:
    """A host that answers requests (`ssh_host`). One request at a time; any thread may ask."""

    def __init__(
        self,
        host: str,
        *,
        jump_host: str | None = None,
        identity_file: str | None = None,
        host_key: str | None = None,
    ) -> None:
        """`host_key`: the only public key by which it is known; None: what `ssh` knows of it."""
        self.host = host
        self._jump_host = jump_host
        self._identity_file = identity_file
        self._host_key = host_key
        self._clients: list[Any] = []  # paramiko has no types of its own; the last one is the host's
        self._lock = threading.Lock()

    def ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        """Return the answer of `ssh_host` to `request`. Raises like `talk`."""
        program = resources.files("rlboost_runtime.remote").joinpath("ssh_host.py").read_bytes()
        answer: dict[str, Any] = self.talk(program, request, lambda said: json.loads(said.read()))
        return answer

    def talk(
        self,
        program: bytes,
        request: Mapping[str, object],
        hear: Callable[[BinaryIO], Answer],
        payload: Iterable[bytes] = (),
        quiet_s: float = ANSWER_S,
    ) -> Answer:
        """Run `program` on the host with one line of JSON and `payload` as its input; return what `hear`
        makes of its output, which may not pause for `quiet_s`.

        Raises `NoCapacity` where the host cannot be reached, `CredentialsRejected` where it or we are
        refused, `ProviderError` where it answers nonsense, and what `hear` raises.
        """
        with self._lock:
            try:
                with _explained(self.host):
                    if not self._clients or not self._clients[-1].get_transport().is_active():
                        self._connect()
                    return self._talk(program, request, hear, payload, quiet_s)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        while self._clients:
            self._clients.pop().close()

    def _connect(self) -> None:
        self.close()
        address = address_of(self.host, jump_host=self._jump_host, identity_file=self._identity_file)
        channel = None
        if address.jump and address.jump.lower() != "none":
            jump = address_of(address.jump, identity_file=self._identity_file)
            self._clients.append(_open(jump, None))
            channel = (
                self._clients[-1]
                .get_transport()
                .open_channel(
                    "direct-tcpip", (address.name, address.port), ("127.0.0.1", 0), timeout=CONNECT_S
                )
            )
        self._clients.append(_open(address, channel, self._host_key))

    def _talk(
        self,
        program: bytes,
        request: Mapping[str, object],
        hear: Callable[[BinaryIO], Answer],
        payload: Iterable[bytes],
        quiet_s: float,
    ) -> Answer:
        session = self._clients[-1].get_transport().open_session(timeout=CONNECT_S)
        with contextlib.closing(session):
            session.settimeout(quiet_s)
            session.exec_command(f'exec python3 -c "{_RUN}"')
            session.sendall(f"{len(program)}\n".encode() + program + json.dumps(request).encode() + b"\n")
            for part in payload:
                session.sendall(part)
            session.shutdown_write()
            try:
                answer, nonsense = hear(session.makefile("rb")), None
            except ValueError as error:  # perhaps it failed; then it says why
                nonsense = error
            if not session.status_event.wait(quiet_s):
                raise TimeoutError("no further message")
            status = session.recv_exit_status()
            if status != 0:
                complaint = session.makefile_stderr("rb").read().decode(errors="replace").strip()
                raise ProviderError(
                    f"{self.host}: a command failed (status {status}): {complaint.splitlines()[-1:]}",
                    f"check that `ssh {self.host} python3 --version` prints 3.9 or later",
                )
            if nonsense is not None:
                raise nonsense
        return answer


def _open(address: HostAddress, channel: Any, host_key: str | None = None) -> Any:
    import paramiko

    class Refuse(paramiko.MissingHostKeyPolicy):  # type: ignore[misc] # paramiko has no types
        def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
            raise CredentialsRejected(
                f"the host key of {hostname} is not known: {fingerprint(key)}",
                f"compare it with what its administrator says, then type: ssh {_typed(address)}",
            )

    client = paramiko.SSHClient()
    if host_key is None:
        client.load_system_host_keys()
    else:
        _know(client, address, host_key)
    client.set_missing_host_key_policy(Refuse())
    try:
        client.connect(
            address.name,
            address.port,
            username=address.user,
            key_filename=[key for key in address.keys if Path(key).exists()] or None,
            sock=channel,
            timeout=CONNECT_S,
            banner_timeout=CONNECT_S,
            auth_timeout=CONNECT_S,
        )
    except BaseException:
        client.close()
        raise
    client.get_transport().set_keepalive(KEEPALIVE_S)
    return client


def _know(client: Any, address: HostAddress, host_key: str) -> None:
    """Let the client know the host by this key and no other."""
    from paramiko.hostkeys import HostKeyEntry

    name = address.name if address.port == 22 else f"[{address.name}]:{address.port}"
    entry = HostKeyEntry.from_line(f"{name} {host_key}")
    if entry is None:
        raise ConfigError(f"{host_key!r} is no host key", "it is one line: ssh-ed25519 AAAA...")
    client.get_host_keys().add(name, entry.key.get_name(), entry.key)


@contextlib.contextmanager
def _explained(host: str) -> Iterator[None]:
    try:
        import paramiko
    except ImportError as missing:
        raise ConfigError(
            "infra: ssh needs paramiko, which is not installed", "type: pip install 'rlboost[ssh]'"
        ) from missing
    try:
        yield
    except paramiko.BadHostKeyException as error:
        raise CredentialsRejected(
            f"the host key of {host} has changed: it is {fingerprint(error.key)} now, and was"
            f" {fingerprint(error.expected_key)}",
            "the connection may be intercepted; if the host was reinstalled, type:"
            f" ssh-keygen -R {error.hostname}, and connect once by hand",
        ) from error
    except (paramiko.AuthenticationException, paramiko.PasswordRequiredException) as error:
        raise _not_let_in(host, str(error)) from error
    except (paramiko.SSHException, OSError, EOFError) as error:
        if str(error) == _NO_KEY:
            raise _not_let_in(host, "no SSH key was found") from error
        reason = "no such name" if isinstance(error, socket.gaierror) else str(error) or type(error).__name__
        raise NoCapacity(
            f"{host} cannot be reached: {reason}", "check that the machine is up; the connection is retried"
        ) from error
    except ValueError as error:
        raise ProviderError(
            f"{host} sent an invalid answer: {error}", "check what its shell prints at login"
        ) from error


def _not_let_in(host: str, why: str) -> CredentialsRejected:
    return CredentialsRejected(
        f"{host} refused the SSH login: {why}",
        f"make sure that `ssh -o BatchMode=yes {host} true` works: add your key there, or to ssh-agent",
    )


def fingerprint(key: Any) -> str:
    """Return a host key's fingerprint as OpenSSH prints it: SHA256:..."""
    digest = base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")
    return f"SHA256:{digest} ({key.get_name()})"


def _typed(address: HostAddress) -> str:
    return (f"-p {address.port} " if address.port != 22 else "") + address.name


def _config(name: str) -> dict[str, Any]:
    import paramiko

    path = Path("~/.ssh/config").expanduser()
    if not path.exists():
        return {}
    return dict(paramiko.SSHConfig.from_path(str(path)).lookup(name))
