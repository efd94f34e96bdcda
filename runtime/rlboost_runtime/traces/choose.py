"""What `--trace` means: a file, a public trace that has been fetched, or a generated one."""

from __future__ import annotations

from pathlib import Path

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.traces.events import Trace
from rlboost_runtime.traces.fetch import cached
from rlboost_runtime.traces.generate import PROFILES, generate_trace
from rlboost_runtime.traces.known import KNOWN
from rlboost_runtime.traces.reading import load_trace


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
