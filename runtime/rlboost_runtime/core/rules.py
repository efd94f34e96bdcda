"""The implementations of the rules that a `SchedulingPolicy` names.

Live runs have `LIVE_RULES`. The simulator passes `Core` rules of its own, which add the published baselines
(`rlboost_runtime.sim.baselines`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from rlboost_runtime.core.base.messages import BOOKED, EVEN, PREDICTED, CoreConfig
from rlboost_runtime.core.base.timers import Context
from rlboost_runtime.core.dispatch.balance import Balancer
from rlboost_runtime.core.dispatch.dispatcher import Dispatcher
from rlboost_runtime.core.state.eligible import LoadIndex
from rlboost_runtime.core.state.instances import Instance, InstanceTable
from rlboost_runtime.core.state.rates import GenerationRate, Lengths, RequestLengths, StepTimes
from rlboost_runtime.core.window.predicted import PredictedWindow
from rlboost_runtime.core.window.seeding_window import SeedingWindow

DispatchFactory = Callable[[Context, InstanceTable, Mapping[str, Instance]], Dispatcher]
BalanceFactory = Callable[[Mapping[str, Instance], LoadIndex, Lengths, RequestLengths], Balancer]
WindowFactory = Callable[[CoreConfig, Lengths, GenerationRate, StepTimes], SeedingWindow]
Factory = TypeVar("Factory")


@dataclass(frozen=True, slots=True)
class Rules:
    """Factories by the name that a policy has for them."""

    dispatch: Mapping[str, DispatchFactory]
    balance: Mapping[str, BalanceFactory]
    windows: Mapping[str, WindowFactory]


def named(kind: str, factories: Mapping[str, Factory], name: str) -> Factory:
    """Return the factory of a rule. Raises `ValueError` for an unknown one."""
    if name not in factories:
        raise ValueError(f"unknown {kind} rule {name!r}; there are {', '.join(factories)}")
    return factories[name]


def _predicted(
    config: CoreConfig, lengths: Lengths, pace: GenerationRate, step_times: StepTimes
) -> SeedingWindow:
    return PredictedWindow(
        config.seeding_initial_s,
        config.reserved_instances,
        lengths=lengths,
        pace=pace,
        step_times=step_times,
        has_gate=config.policy.has_gate,
    )


LIVE_RULES = Rules({BOOKED: Dispatcher}, {EVEN: Balancer}, {PREDICTED: _predicted})
