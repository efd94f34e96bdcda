"""The core under a virtual clock: what a job would do on a fleet that comes and goes, before money is spent.

`simulate` replays a trace under one policy; `presets` are the paper's set-ups. Everything here is simulated.
"""

from __future__ import annotations

from rlboost_runtime.sim.policies import POLICIES, WITHOUT_TURNS, Switches
from rlboost_runtime.sim.presets import Preset, agent_preset, presets
from rlboost_runtime.sim.result import Activity, Interval, Kill, SimResult, StepRow
from rlboost_runtime.sim.world import simulate

__all__ = [
    "POLICIES",
    "WITHOUT_TURNS",
    "Activity",
    "Interval",
    "Kill",
    "Preset",
    "SimResult",
    "StepRow",
    "Switches",
    "agent_preset",
    "presets",
    "simulate",
]
