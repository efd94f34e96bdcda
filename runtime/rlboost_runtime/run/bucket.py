"""Opening a bucket (s3, gs, az) or a folder as one, and a run's own place at its job's `output`.

Credentials are those that the machine has: the SDKs' usual environment variables, files and instance roles.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

from obstore import exceptions
from obstore.store import from_url

from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.run.folder import RunFolder

if TYPE_CHECKING:
    from obstore.store import ObjectStore

COMPLETE = "complete.json"
"""Last object of a copied folder: {name: {"size", "sha256"}} of its files. A folder that has it is whole."""
RETRIES = 2
"""Of one request, by the library; whoever asks tries again anyway."""


def open_bucket(url: str, timeout_s: float, *, what: str = "weights.bucket") -> ObjectStore:
    """Return the bucket; nothing is sent yet. `what` names the setting in errors. Raises `ProtocolError` on
    an unusable URL."""
    seconds = datetime.timedelta(seconds=timeout_s)
    options: Any = {"timeout": seconds, "connect_timeout": seconds, "allow_http": True}
    retries: Any = {"max_retries": RETRIES, "retry_timeout": seconds}
    try:
        if url.startswith("file:"):
            return from_url(url, mkdir=True)
        return from_url(url, client_options=options, retry_config=retries)
    except (exceptions.BaseError, ValueError) as exc:
        raise ProtocolError(
            f"{what} {url!r} cannot be used: {first_line(exc)}", "give a URL such as s3://BUCKET/PREFIX"
        ) from exc


def url_of(place: str) -> str:
    """Return the URL of a bucket or, for an absolute path, of a folder."""
    return f"file://{place}" if place.startswith("/") else place


def open_output(run: RunFolder, output: str, timeout_s: float) -> ObjectStore:
    """Return the run's place at a job's `output`: a bucket's URL, or the path of a folder."""
    return open_bucket(run.place_in(url_of(output)), timeout_s, what="output")


def first_line(exc: Exception) -> str:
    """Return the first line of the message, without the library's details."""
    return (str(exc).splitlines() or [type(exc).__name__])[0]
