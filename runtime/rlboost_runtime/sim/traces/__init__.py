"""Spot traces: reading, cutting, sampling, describing, generating, fetching. The standard library only."""

from __future__ import annotations

from rlboost_runtime.sim.traces.choose import open_trace
from rlboost_runtime.sim.traces.events import Trace, TraceEvent, sample_nodes
from rlboost_runtime.sim.traces.generate import PROFILES, Profile, generate_trace
from rlboost_runtime.sim.traces.reading import load_trace, trace_rows
from rlboost_runtime.sim.traces.statistics import TraceStatistics, trace_statistics

__all__ = [
    "PROFILES",
    "Profile",
    "Trace",
    "TraceEvent",
    "TraceStatistics",
    "generate_trace",
    "load_trace",
    "open_trace",
    "sample_nodes",
    "trace_rows",
    "trace_statistics",
]
