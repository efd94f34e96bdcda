"""What is measured of each step: the reserved engines' share of the rollout, and warnings from its metrics.

What the run would have cost on demand alone is derived from the former (`billing.report`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rlboost_runtime.billing.counterfactual import ALONE_RATE
from rlboost_runtime.coordinator.driver.core_driver import OpenStep
from rlboost_runtime.coordinator.observers.timeline import Line
from rlboost_runtime.coordinator.storage.token_store import TokenStore
from rlboost_runtime.core.base.cost_model import rollout_s
from rlboost_runtime.core.base.messages import Command, CoordinatorRestarted, Event, Pool, StepStarted
from rlboost_runtime.core.core import Core
from rlboost_runtime.core.lease_controller import LeaseState
from rlboost_runtime.protocol.reward_failures import FailureCount, RewardFailure, count_failures


class ReservedMeter:
    """Measures how long, and how much, the reserved engines roll out, one step at a time.

    The rate that follows from it is that of the engines while the window is open: without a tail. `alone` has
    the one with it.
    """

    def __init__(self) -> None:
        self._step: tuple[int, int] | None = None
        self._seconds = 0.0
        self._since: float | None = None
        self._partial = False

    def observe(self, event: Event, commands: Sequence[Command], core: Core) -> None:
        """Take in one event after the core handled it."""
        if isinstance(event, CoordinatorRestarted):
            self._partial = True  # how long it took before the restart is no longer known
        is_newest = isinstance(event, StepStarted) and (core.step is None or core.step.step <= event.step)
        if isinstance(event, StepStarted) and is_newest and self._step != (event.step, event.policy_version):
            self._partial = self._partial and core.step is not None and core.step.started_at < event.at
            self._step = (event.step, event.policy_version)
            self._seconds, self._since = 0.0, None
        holds = any(i.num_assigned for i in core.instances.values() if i.pool is Pool.RESERVED)
        rolls_out = core.lease is LeaseState.ENGINES and holds
        if rolls_out and self._since is None:
            self._since = event.at
        elif not rolls_out and self._since is not None:
            self._seconds += max(0.0, event.at - self._since)
            self._since = None

    def measured(self, step: OpenStep, store: TokenStore, core: Core) -> dict[str, float]:
        """Return seconds and tokens of the open step so far; {} if a part of it was not observed, and for
        episodes, whose turns it does not see."""
        if self._partial or step.request.are_episodes:
            return {}
        reserved = {i.instance for i in core.instances.values() if i.pool is Pool.RESERVED}
        tokens = sum(
            segment.num_tokens
            for response in step.all_responses()
            for segment in store.segments(response)
            if segment.instance in reserved
        )
        seconds = self._seconds + (0.0 if self._since is None else core.now - self._since)
        return {"reserved_tokens": float(tokens), "reserved_rollout_s": seconds} | alone(core)


def alone(core: Core) -> dict[str, float]:
    """Return the reserved engines' tokens per second over a whole rollout of their own, its tail included, by
    the step times and lengths that the core has measured; {} while it has not."""
    rates = core.seeding.rates()
    if rates is None or rates.reserved_engines <= 0:
        return {}
    return {ALONE_RATE: rates.tokens / (rates.wake_s + rollout_s(rates, rates.reserved_engines))}


class StepWarnings:
    """Failed rewards and skipped prompts over the run's steps.

    Few lines on purpose: failures are reported when they first occur and each time their number has doubled;
    the totals of the run are in the status and in the cost report.
    """

    def __init__(self, before: Iterable[Mapping[str, float]]) -> None:
        """`before`: metrics of the steps that a former coordinator has reported."""
        known = list(before)
        self._count = count_failures(known)
        self._num_reported = self._count.failed
        self._skips_reported = bool(known)

    @property
    def rewards(self) -> FailureCount:
        """Failed rewards of the run so far."""
        return self._count

    def trained(self, step: int, metrics: Mapping[str, float]) -> list[Line]:
        """Take in a step's metrics; return the lines to report. `step` counts from 0."""
        lines: list[Line] = []
        skipped = int(metrics.get("prompts_skipped", 0))
        if skipped and not self._skips_reported:
            what = "1 prompt is" if skipped == 1 else f"{skipped:,} prompts are"
            lines.append(("data", f"{what} longer than algorithm.max_prompt_tokens and left out"))
        self._skips_reported = True
        now = count_failures([metrics])
        self._count = FailureCount(
            self._count.scored + now.scored,
            {kind: self._count.by_kind[kind] + now.by_kind[kind] for kind in RewardFailure},
        )
        if now.failed and self._count.failed >= 2 * self._num_reported:
            self._num_reported = self._count.failed
            lines.append(("reward", f"step {step + 1}: {now.in_words()}"))
        return lines
