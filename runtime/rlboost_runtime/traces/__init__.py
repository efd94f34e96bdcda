"""Spot traces: reading, cutting, sampling, describing, generating, fetching. The standard library only."""

from __future__ import annotations

from rlboost_runtime.traces.events import Trace, TraceEvent, sample_nodes
from rlboost_runtime.traces.generate import PROFILES, Profile, generate_trace
from rlboost_runtime.traces.reading import load_trace, trace_rows
from rlboost_runtime.traces.statistics import TraceStatistics, trace_statistics

__all__ = [
    "PROFILES",
    "Profile",
    "Trace",
    "TraceEvent",
    "TraceStatistics",
    "generate_trace",
    "load_trace",
    "sample_nodes",
    "trace_rows",
    "trace_statistics",
]
