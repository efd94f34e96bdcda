"""The address of the page that a run's own head serves (`dashboard` in the job file)."""

from __future__ import annotations

from urllib.parse import urlsplit

from rlboost_runtime.errors import NotFound
from rlboost_runtime.run.credentials import make_viewer_key
from rlboost_runtime.run.folder import RunFolder, read_json
from rlboost_runtime.run.security import read_token

_KEEP = "whoever has this address can see the run, and change nothing: keep it to yourself"


def head_page(run: RunFolder) -> tuple[str, str]:
    """Return the address with its key, and what to know about it. Raises `NotFound`."""
    if not run.head.exists():
        known = read_json(run.dashboard)
        if known is None:
            raise NotFound(
                f"the head of {run.name} serves no page",
                f"write dashboard: {{}} into the job file before the launch; without it, rlboost dashboard"
                f" {run.name} serves the page from here",
            )
        return f"{known['url']}/runs/{run.name}/?key={make_viewer_key(read_token(run))}", _KEEP
    from rlboost_cli.head.connection import Head

    with Head(run) as head:
        address = head.rlboost("dashboard", run.name, "--link").out.strip()
    url = urlsplit(address)
    if url.scheme == "https":
        return address, _KEEP
    tunnel = f"ssh -N -L {url.port}:127.0.0.1:{url.port} {head.place.host}"
    return address, f"open it through a tunnel: {tunnel}; {_KEEP}"
