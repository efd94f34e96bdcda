"""How long and how much the reserved engines rolled out in a step.

What the run would have cost on demand alone is derived from it (`report`).
"""

from __future__ import annotations

from rlboost_runtime.coordinator.state import OpenStep
from rlboost_runtime.coordinator.token_store import TokenStore
from rlboost_runtime.core.core import Core
from rlboost_runtime.core.lease import LeaseState
from rlboost_runtime.core.messages import CoordinatorRestarted, Event, Pool, StepStarted


class ReservedMeter:
    """Measures one step at a time. The rate it leads to is that of the engines when the window is open."""

    def __init__(self) -> None:
        self._step: tuple[int, int] | None = None
        self._seconds = 0.0
        self._since: float | None = None
        self._partial = False

    def hear(self, event: Event, core: Core) -> None:
        """Take in one event after the core handled it."""
        if isinstance(event, CoordinatorRestarted):
            self._partial = True  # how long it was before the restart is not known any more
        if isinstance(event, StepStarted) and self._step != (event.step, event.policy_version):
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
        """Return seconds and tokens of the open step so far; nothing if a part of it was not seen."""
        if self._partial:
            return {}
        reserved = {i.instance for i in core.instances.values() if i.pool is Pool.RESERVED}
        tokens = sum(
            segment.num_tokens
            for response in step.all_responses()
            for segment in store.segments(response)
            if segment.instance in reserved
        )
        seconds = self._seconds + (0.0 if self._since is None else core.now - self._since)
        return {"reserved_tokens": float(tokens), "reserved_rollout_s": seconds}
