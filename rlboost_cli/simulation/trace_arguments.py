"""What a person says about a trace on the command line: which one, which hours, which share of its nodes."""

from __future__ import annotations

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.run.folder import home
from rlboost_runtime.traces import Trace
from rlboost_runtime.traces.catalogue import open_trace


def trace_of(named: str, window: str | None, seed: int) -> Trace:
    """Return the trace `named`, cut to the hours in `window`. Raises `ConfigError`."""
    trace = open_trace(named, home() / "traces", seed=seed)
    return trace if window is None else cut(trace, window)


def cut(trace: Trace, window: str) -> Trace:
    """Return the hours `A:B` of `trace`; either may be left out. Raises `ConfigError`."""
    length_h = trace.duration_s / 3600
    start, separator, end = window.partition(":")
    try:
        start_h, end_h = float(start or 0), float(end or length_h)
        if not separator:
            raise ValueError
        return trace.window(start_h * 3600, min(end_h * 3600, trace.duration_s) if not end else end_h * 3600)
    except ValueError:
        raise ConfigError(
            f"--window {window} is no part of {trace.name}, which lasts {length_h:.2f} h",
            f"write hours from its start as A:B, such as 0:{min(2.0, length_h):.4g}",
        ) from None
