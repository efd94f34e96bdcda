"""Public traces from their origin onto the disk, and from there into a simulation.

Guarantees of `fetch_trace`: the file that it returns has the length and the digest of the known trace; a
file under its final name is whole; connecting, and each wait for bytes, ends after 15 s of silence, and no
piece is taken after the deadline; what had arrived before a failure is kept, and the next call goes on from
there. Two callers with one cache may spoil each other's unfinished file; its digest tells, and one has to
fetch again.
"""

from __future__ import annotations

import hashlib
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from rlboost_runtime.errors import ConfigError, ProviderError
from rlboost_runtime.traces.known import KnownTrace

DEADLINE_S = 60.0
"""Longest time of one fetch: the largest known trace is 16 KB."""

_SILENCE_S = 15.0  # longest wait for the next bytes
_PIECE_BYTES = 64 * 1024

Progress = Callable[[int, int], None]
"""Called with the bytes received so far and in all."""


def cached(trace: KnownTrace, cache: Path) -> Path | None:
    """Return the file of `trace` in `cache` where it is there and unharmed."""
    path = cache / _file_name(trace)
    return path if path.is_file() and _digest(path) == trace.sha256 else None


def fetch_trace(
    trace: KnownTrace,
    cache: Path,
    *,
    url: str | None = None,
    deadline_s: float = DEADLINE_S,
    progress: Progress | None = None,
) -> Path:
    """Return the file of `trace` in `cache`, fetched from its origin, or `url`, where it is not there.

    Raises `ConfigError` for an unusable `url`, and `ProviderError` where the origin cannot be reached, is too
    slow or gives something else than what is known.
    """
    if found := cached(trace, cache):
        return found
    cache.mkdir(parents=True, exist_ok=True)
    part = cache / f"{_file_name(trace)}.part"
    origin = _checked(url or trace.url)
    try:
        _download(trace, origin, part, time.monotonic() + deadline_s, progress or (lambda _got, _all: None))
    except (OSError, HTTPException) as exc:  # urllib's own errors are OSErrors
        raise ProviderError(f"{trace.name} cannot be fetched from {origin}: {_words(exc)}", _REMEDY) from exc
    _verify(trace, origin, part)
    return part.replace(cache / _file_name(trace))


_REMEDY = (
    "try again when the network is back (what has arrived is kept), give another place with --from URL,"
    " or use a generated trace: rlboost traces list"
)


def _download(trace: KnownTrace, origin: str, part: Path, until: float, progress: Progress) -> None:
    have = part.stat().st_size if part.exists() else 0
    if have >= trace.size_bytes:  # whole, or of another file: the digest will tell
        return
    request = urllib.request.Request(origin, headers={"Range": f"bytes={have}-"} if have else {})  # noqa: S310
    with _opened(request, until) as response, part.open("r+b" if have else "wb") as file:
        have = _start_of(response, have)
        file.truncate(have)
        file.seek(have)
        while piece := response.read1(_PIECE_BYTES):
            have += len(piece)
            if have > trace.size_bytes:
                break
            file.write(piece)
            progress(have, trace.size_bytes)
            if time.monotonic() > until:
                raise TimeoutError("not finished within its deadline")
        file.flush()
        os.fsync(file.fileno())
    if have != trace.size_bytes:
        more = "more than " if have > trace.size_bytes else ""
        if more:
            part.unlink()
        raise OSError(f"it sent {more}{min(have, trace.size_bytes):,} bytes of {trace.size_bytes:,}")


def _opened(request: urllib.request.Request, until: float) -> HTTPResponse:
    silence_s = min(_SILENCE_S, max(0.1, until - time.monotonic()))
    # http and https only (`_checked`), so the answer is an HTTPResponse
    return cast("HTTPResponse", urllib.request.urlopen(request, timeout=silence_s))  # noqa: S310


def _start_of(response: HTTPResponse, asked: int) -> int:
    """Return the offset of the answer's first byte: as asked, or 0 where ranges are not understood."""
    return asked if response.status == 206 and _range_begins_at(response, asked) else 0


def _range_begins_at(response: HTTPResponse, offset: int) -> bool:
    if (response.headers.get("Content-Range") or "").startswith(f"bytes {offset}-"):
        return True
    raise OSError(f"it answered a request from byte {offset} with {response.headers.get('Content-Range')!r}")


def _verify(trace: KnownTrace, origin: str, part: Path) -> None:
    if (digest := _digest(part)) != trace.sha256:
        part.unlink()
        raise ProviderError(
            f"{trace.name}: {origin} has other bytes than are known"
            f" (sha256 {digest[:12]}..., expected {trace.sha256[:12]}...)",
            "fetch again; where it stays so, the origin has changed: fetch the file yourself and check it",
        )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"`{url}` is no web address", "write https://HOST/PATH")
    return url


def _file_name(trace: KnownTrace) -> str:
    return f"{trace.name}-{trace.sha256[:12]}{Path(trace.path).suffix}"


def _words(exc: Exception) -> str:
    if isinstance(exc, urllib.error.HTTPError):
        exc.close()
        return f"it answered {exc.code} {exc.reason}"
    if isinstance(exc, urllib.error.URLError):
        return str(exc.reason)
    return str(exc) or type(exc).__name__
