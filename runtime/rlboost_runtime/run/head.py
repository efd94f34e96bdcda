"""Where a run's head is, if it is another machine: from the job, kept in the run's `head.json` here.

That file is part of the run's folder from the beginning, so that no head is ever asked for unnoted.

At which address other machines reach this head's two ports.

`address.json` in the run's folder says it: {"host", "control_port", "bytes_port"}, ports 0 for any. Without
it the servers listen on loopback only. Whoever is on the head itself always uses loopback: a public address
may not lead back in.
"""

from __future__ import annotations

import socket
from dataclasses import asdict, dataclass

import msgspec

from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.job import NODE_PORT, Job, Trainer
from rlboost_runtime.run.folder import RunFolder, read_json, write_atomically, write_json
from rlboost_runtime.run.reserved import RESERVED_MACHINE, node_of


@dataclass(frozen=True, slots=True)
class HeadPlace:
    """A machine that is reached by SSH, and where everything is kept on it."""

    host: str
    """Empty: the machine is not rented yet."""
    jump_host: str | None = None
    identity_file: str | None = None
    python: str | None = None
    """None: the one that is installed there."""
    folder: str = "~/.rlboost"
    host_key: str | None = None
    """Its public key, by which alone it is known; None: what `ssh` knows of it."""


def keep_place(run: RunFolder, job: Job) -> None:
    """Note where the run's head is to be, where that is another machine."""
    trainer = job.trainer
    if trainer.is_elsewhere:
        host = "" if trainer.is_bought else trainer.hosts[0]
        change_place(
            run,
            HeadPlace(host, trainer.jump_host, trainer.identity_file, trainer.python, trainer.folder),
        )


def change_place(run: RunFolder, place: HeadPlace) -> None:
    """Note where the run's head is."""
    write_json(run.head, asdict(place))


def kept_place(run: RunFolder) -> HeadPlace:
    """Return where the head of a run is that has one elsewhere. Raises `RuntimeFault`."""
    try:
        return HeadPlace(**(read_json(run.head) or {}))
    except TypeError as error:
        raise RuntimeFault(
            f"{run.head} does not say where the head of {run.name} is",
            "use the RLBoost version that the run was started with",
        ) from error


LOOPBACK = "127.0.0.1"


class HeadAddress(msgspec.Struct, frozen=True):
    """The head as its spot machines see it."""

    host: str
    control_port: int = 0
    bytes_port: int = 0


def address_of_head(trainer: Trainer) -> HeadAddress | None:
    """Return where other machines reach this head: at `trainer.address`, or in its own network where only its
    trainer's further nodes are to come; None: none are."""
    host = trainer.address or (None if trainer.node_offer is None else private_address())
    return None if host is None else HeadAddress(host, *trainer.head_ports)


def read_address(run: RunFolder) -> HeadAddress | None:
    """Return where other machines reach the run's head; None: nowhere."""
    try:
        return msgspec.json.decode((run.path / "address.json").read_bytes(), type=HeadAddress)
    except FileNotFoundError:
        return None


def write_address(run: RunFolder, address: HeadAddress) -> None:
    """Say where other machines reach the head; before its servers start."""
    write_atomically(run.path / "address.json", msgspec.json.encode(address))


def listen_host(address: HeadAddress | None) -> str:
    """Return what the servers bind: everything where others are to come, else loopback."""
    return LOOPBACK if address is None else "0.0.0.0"  # noqa: S104 TLS and a token guard both ports


def endpoint(port: int, address: HeadAddress | None) -> dict[str, str]:
    """Return an endpoint file: `url` for processes of the head, `public_url` for other machines."""
    urls = {"url": f"https://{LOOPBACK}:{port}"}
    return urls if address is None else {**urls, "public_url": f"https://{address.host}:{port}"}


def private_address() -> str:
    """Return this machine's address in its own network: the one from which it dials out. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1: asks the kernel for the route
        except OSError:  # there is none
            return LOOPBACK
        return str(probe.getsockname()[0])


def node_address(trainer: Trainer) -> str:
    """Return HOST:PORT of this head, where the trainer's nodes meet."""
    return trainer.node_address or f"{private_address()}:{NODE_PORT}"


def url_beside(endpoint: dict[str, str]) -> str:
    """Return the address for machines in the head's own network: its public one would cost egress."""
    return f"https://{private_address()}:{endpoint['url'].rpartition(':')[2]}"


def url_seen_by(machine: str, endpoint: dict[str, str]) -> str:
    """Return the address at which a machine of the run reaches the head."""
    if node_of(machine) is not None:
        return url_beside(endpoint)
    return url_for(endpoint, on_head=machine == RESERVED_MACHINE)


def url_for(endpoint: dict[str, str], *, on_head: bool) -> str:
    """Return the address that is right for who is to dial it."""
    return endpoint["url"] if on_head else endpoint.get("public_url", endpoint["url"])
