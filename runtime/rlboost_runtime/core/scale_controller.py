"""The size of a fleet that only serves: looks at its load, and asks for and ends spot machines accordingly.

`base.autoscaling` decides; here is what it looks at. Nothing happens in a run that trains.

Guarantees: a run that serves is looked at at least every `LOOK_S`; the machines that go are those with the
least work, which they hand over with all their tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlboost_runtime.core.base.autoscaling import LOOK_S, Autoscaler, ServingLoad, slots_of
from rlboost_runtime.core.base.messages import Pool
from rlboost_runtime.core.base.timers import Context, Timer
from rlboost_runtime.core.dispatch.assignments import Assignments
from rlboost_runtime.core.state.instances import Instance
from rlboost_runtime.core.state.machines import MachineTable
from rlboost_runtime.core.state.responses import ResponseState


class ScaleController:
    """Looks at the load of the instances that serve."""

    def __init__(
        self, context: Context, eligible: Mapping[str, Instance], work: Assignments, fleet: MachineTable
    ) -> None:
        self._context = context
        self._eligible = eligible
        self._work = work
        self._fleet = fleet
        rule = context.config.autoscaling
        self._scaler = None if rule is None else Autoscaler(rule)

    @property
    def wanted(self) -> int | None:
        """Spot instances wanted; None in a run that trains."""
        return None if self._scaler is None else self._scaler.wanted

    def look(self) -> bool:
        """Look at the load if that is due; return True if fewer instances may be wanted."""
        timers, now = self._context.timers, self._context.now
        if self._scaler is None or timers.due(Timer.SCALE, "") is not None or self._context.is_ending:
            return False
        timers.set(Timer.SCALE, "", now + LOOK_S)
        self._scaler.look(self._load())
        return self._fleet.num_instances > self._scaler.wanted

    def _load(self) -> ServingLoad:
        now, requests = self._context.now, self._work.requests.responses
        waits = [now - r.lifecycle.since for r in requests.values() if r.state is ResponseState.WAITING]
        serving = list(self._eligible.values())
        num_held = sum(instance.num_assigned for instance in serving)
        mean = sum(instance.kv_load for instance in serving) / num_held if num_held else None
        reserved = [self._slots(i, mean) for i in serving if i.pool is Pool.RESERVED]
        spot = [self._slots(i, mean) for i in serving if i.pool is Pool.SPOT]
        assert self._scaler is not None
        return ServingLoad(
            at=now,
            num_open=len(requests),
            longest_wait_s=max(waits, default=0.0),
            reserved_slots=sum(reserved),
            spot_slots=sum(spot) // len(spot) if spot else None,
            num_wanted_missing=max(0, self._scaler.wanted - len(spot)),
        )

    def _slots(self, instance: Instance, mean_context: float | None) -> int:
        config = self._context.config
        assert config.autoscaling is not None
        return slots_of(
            instance.max_running,
            config.policy.fill_limit * instance.kv_tokens,
            mean_context,
            self._work.balancer.step_times.line(instance.kind),
            config.autoscaling.min_tokens_per_s,
        )
