"""Public spot traces by name: where they are from, under which licence, and what is in them.

None of them is shipped. `fetch` brings one from its origin; length and digest are those of the recorded
commit, so that what was fetched is what is described here. Statistics are those of `trace_statistics` on it.

Public traces from their origin onto the disk, and from there into a simulation.

Guarantees of `fetch_trace`: the file that it returns has the length and the digest of the known trace; a
file under its final name is whole; connecting, and each wait for bytes, ends after 15 s of silence, and no
piece is taken after the deadline; what had arrived before a failure is kept, and the next call goes on from
there. Two callers with one cache may spoil each other's unfinished file; its digest shows it, and one has to
fetch again.

What `--trace` means: a file, a public trace that has been fetched, or a generated one.
"""

from __future__ import annotations

import hashlib
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from rlboost_runtime.errors import ConfigError, ProviderError
from rlboost_runtime.traces.events import Trace
from rlboost_runtime.traces.generate import PROFILES, generate_trace
from rlboost_runtime.traces.reading import load_trace


@dataclass(frozen=True, slots=True)
class KnownTrace:
    """A public trace. Capacity in nodes."""

    name: str
    what: str
    repository: str
    commit: str
    path: str
    licence: str
    size_bytes: int
    sha256: str
    hours: float
    mean_capacity: float
    max_capacity: int
    removes: int
    zone: str = ""

    @property
    def url(self) -> str:
        """Where the file is."""
        return f"https://raw.githubusercontent.com/{self.repository}/{self.commit}/{self.path}"

    @property
    def source(self) -> str:
        """Its origin in words."""
        return f"recorded, {self.repository}@{self.commit[:7]} {self.path}, licence {self.licence}"


_BAMBOO = ("uclasystem/bamboo", "80809293289419d40a870b4a9ccb8df0082ce3fb")
_SKYPILOT = ("skypilot-org/spot-traces", "221da1ab9bdfe7966da296265d7694d52dc0c5a6")
_16_NODES, _4_NODES = "availability/16-node/aws-08-27-2023", "preemption/4-node/aws-08-03-2023"
_NO_LICENCE = "none stated"
_MIT = "MIT"


def _v100(zone: str) -> str:
    return f"{zone}_v100_1.json"


# fmt: off
KNOWN: dict[str, KnownTrace] = {trace.name: trace for trace in (
    KnownTrace("bamboo-p3", "AWS p3 nodes; the trace behind the RLBoost paper", *_BAMBOO,
               "traces/p3-trace.csv", _MIT, 7_617,
               "0b7828fcd4637799590578287415d4d4bbb5e3cfef5fbaf23ca8e5b3ef6bdd68", 11.37, 24.03, 32, 167),
    KnownTrace("bamboo-g4dn", "AWS g4dn nodes", *_BAMBOO,
               "traces/g4dn-trace.csv", _MIT, 3_335,
               "6a21d2003cfa16acfb65fb87b5521dd995c72f49a37900979eea177e853592eb", 10.63, 12.76, 24, 74),
    KnownTrace("gcp-a100", "GCP A100 nodes, December 2021", *_BAMBOO,
               "traces/gcloud/a100x1-east1b.txt", _MIT, 6_700,
               "cbd874201d07901a0bd3df1c4b5981b3193b51d45620b34802b28dca4f0e01b5", 27.02, 57.30, 64, 154,
               "us-east1-b"),
    KnownTrace("skypilot-16-us-east-2b", "capacity for up to 16 AWS V100 nodes, 2023", *_SKYPILOT,
               f"{_16_NODES}/{_v100('us-east-2b')}", _NO_LICENCE, 11_519,
               "fa1f117fd25696aa36250d73f4a47954a281c04243cadbe47074b9ae4a70659f", 270.58, 8.76, 16, 910,
               "us-east-2b"),
    KnownTrace("skypilot-16-us-west-2a", "capacity for up to 16 AWS V100 nodes, 2023", *_SKYPILOT,
               f"{_16_NODES}/{_v100('us-west-2a')}", _NO_LICENCE, 16_281,
               "0aae822d720585aa435b6a04248d2bd21ec1cdaab112e6cbfb23b12f5f664078", 394.67, 6.90, 16, 1473,
               "us-west-2a"),
    KnownTrace("skypilot-16-us-west-2c", "capacity for up to 16 AWS V100 nodes, 2023", *_SKYPILOT,
               f"{_16_NODES}/{_v100('us-west-2c')}", _NO_LICENCE, 16_258,
               "0a540de491d1e1764c1e913ecef04e0475717acb328cf1a8d601948cac138c83", 394.67, 6.83, 16, 1366,
               "us-west-2c"),
    KnownTrace("skypilot-4-us-east-1f", "four held AWS V100 nodes, 2023", *_SKYPILOT,
               f"{_4_NODES}/{_v100('us-east-1f')}", _NO_LICENCE, 11_036,
               "bfd67f8b3bfb267f3145e22ff1c52a036e0151ad2c3826f08d7668c54fd60dbe", 305.33, 1.38, 4, 195,
               "us-east-1f"),
    KnownTrace("skypilot-4-us-east-2a", "four held AWS V100 nodes, 2023", *_SKYPILOT,
               f"{_4_NODES}/{_v100('us-east-2a')}", _NO_LICENCE, 15_437,
               "ce9eb00a1c6f49a77c5258e12363a5acc10a2180a793e99c10457fe47d0d7f47", 427.58, 2.92, 4, 75,
               "us-east-2a"),
    KnownTrace("skypilot-4-us-west-2c", "four held AWS V100 nodes, 2023", *_SKYPILOT,
               f"{_4_NODES}/{_v100('us-west-2c')}", _NO_LICENCE, 15_437,
               "19548cb2e5ec120fb5e12a11203e0a22ee9d9387993cfbe909d8fea4e04fa400", 427.58, 3.26, 4, 330,
               "us-west-2c"),
)}
# fmt: on


def known(name: str) -> KnownTrace:
    """Return the public trace `name`. Raises `ConfigError`."""
    if name in PROFILES:
        raise ConfigError(
            f"`{name}` is generated: there is nothing to fetch", f"rlboost traces show {name} makes it"
        )
    if name not in KNOWN:
        raise ConfigError(f"no public trace is called `{name}`", f"choose one of {', '.join(KNOWN)}")
    return KNOWN[name]


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
    if have >= trace.size_bytes:  # whole, or of another file: the digest will show
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


def open_trace(named: str, cache: Path, *, seed: int = 0) -> Trace:
    """Return the trace that a person means by `named`; `seed` is for generated ones. Raises `ConfigError`.

    Names win over files: `./NAME` is always a file.
    """
    if named in PROFILES:
        return generate_trace(PROFILES[named], seed)
    if named not in KNOWN:
        return load_trace(Path(named))
    trace = KNOWN[named]
    path = cached(trace, cache)
    if path is None:
        raise ConfigError(
            f"the public trace {named} has not been fetched yet", f"rlboost traces fetch {named}"
        )
    return load_trace(path, name=trace.name, source=trace.source, zone=trace.zone)
