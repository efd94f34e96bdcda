"""Which rule sets the seeding window under which policy."""

from __future__ import annotations

from rlboost_runtime.core.base.messages import CoreConfig
from rlboost_runtime.core.base.scheduling_policy import WindowRule
from rlboost_runtime.core.state.rates import GenerationRate, Lengths, StepTimes
from rlboost_runtime.core.window.algorithm_1 import SeedingWindow
from rlboost_runtime.core.window.predicted import PredictedWindow
from rlboost_runtime.core.window.published import PublishedWindow


def seeding_for(
    config: CoreConfig, lengths: Lengths, pace: GenerationRate, step_times: StepTimes
) -> SeedingWindow:
    """Return the window's rule of a run's policy."""
    policy = config.policy
    initial_s = 0.0 if policy.window is WindowRule.CLOSED else config.seeding_initial_s
    if policy.window is WindowRule.PREDICTED:
        return PredictedWindow(
            initial_s,
            config.seeding_eta,
            config.reserved_instances,
            lengths=lengths,
            pace=pace,
            step_times=step_times,
            has_gate=policy.has_gate,
        )
    kind = PublishedWindow if policy.window is WindowRule.PUBLISHED_CODE else SeedingWindow
    return kind(
        initial_s,
        config.seeding_eta,
        config.reserved_instances,
        memory=dict(policy.remembered_windows),
        has_memory=policy.has_memory,
        is_fixed=policy.window is WindowRule.CLOSED,
    )
