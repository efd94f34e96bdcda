"""Spot traces: reading, cutting, sampling, describing, generating, fetching. The standard library only."""

from __future__ import annotations

from rlboost_runtime.traces.events import Trace, TraceEvent, TraceStatistics, sample_nodes, trace_statistics
from rlboost_runtime.traces.generate import PROFILES, MarketProfile, generate_trace
from rlboost_runtime.traces.reading import load_trace, trace_rows

__all__ = [
    "PROFILES",
    "MarketProfile",
    "Trace",
    "TraceEvent",
    "TraceStatistics",
    "generate_trace",
    "load_trace",
    "sample_nodes",
    "trace_rows",
    "trace_statistics",
]
