"""At which address other machines reach this head's two ports.

`address.json` in the run's folder says it: {"host", "control_port", "bytes_port"}, ports 0 for any. Without
it the servers listen on loopback only. Whoever is on the head itself always uses loopback: a public address
may not lead back in.
"""

from __future__ import annotations

import msgspec

from rlboost_runtime.run_folder import RunFolder, write_atomically

LOOPBACK = "127.0.0.1"


class HeadAddress(msgspec.Struct, frozen=True):
    """The head as its spot machines see it."""

    host: str
    control_port: int = 0
    bytes_port: int = 0


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


def url_for(endpoint: dict[str, str], *, on_head: bool) -> str:
    """Return the address that is right for who is to dial it."""
    return endpoint["url"] if on_head else endpoint.get("public_url", endpoint["url"])
