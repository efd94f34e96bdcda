"""How many spot instances a fleet wants that only serves requests: by its queue and its latency.

Every `LOOK_S` seconds the load is looked at. The target is the number of instances on which the open requests
take `fill` of the slots; the reserved engines' slots come first, as they are paid for anyway. A request that
has waited for an engine longer than `max_wait_s` raises the target by one instance, once everything that was
asked for is there: whatever the arithmetic says, that fleet is too small.

What is wanted is the highest target of the last `idle_s` seconds (as Kubernetes' autoscaler stabilises what
it scales down), from `min_instances` to `max_instances`: up at once, down only after the load has been low
for that long. A machine takes minutes to come back, and a spot one may not come back at all.

An engine's slots are what it decodes at once: as many as it is configured for, as its KV cache holds at the
present mean length, and, with `min_tokens_per_s`, as many as it still decodes that fast, by the measured time
of a decode step.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

LOOK_S = 1.0
"""Pause between two looks: short against the boot of a machine."""
DEFAULT_SLOTS = 32
"""Responses that an engine decodes at once, while none has shown how many."""
ROUNDING = 1e-9
"""Slack that keeps a whole number of instances from being rounded up to the next."""


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """The tunables. Instances are spot ones; durations in seconds."""

    min_instances: int = 0
    max_instances: int = 1
    fill: float = 0.75
    """Share of the slots that the open requests should take."""
    max_wait_s: float = 5.0
    """Longest time that a request should wait for an engine. The load is averaged over as long."""
    idle_s: float = 300.0
    """An instance goes once the load would have fitted without it for so long."""
    min_tokens_per_s: float | None = None
    """Slowest decoding that a response should get; None: as slow as full engines are."""


@dataclass(frozen=True, slots=True)
class ServingLoad:
    """What is looked at, at one moment."""

    at: float
    """Seconds of the run."""
    num_open: int
    """Requests that wait or are generated."""
    longest_wait_s: float
    """Of those that wait for an engine; 0 if none does."""
    reserved_slots: int
    """Of reserved engines that serve."""
    spot_slots: int | None
    """Of one spot engine; None: none serves."""
    num_wanted_missing: int
    """Spot instances that are wanted and do not serve yet."""


class Autoscaler:
    """The number of spot instances wanted, and what it follows from."""

    def __init__(self, rule: Autoscaling) -> None:
        self._rule = rule
        self.wanted = rule.min_instances
        """Spot instances to have."""
        self._mean_open = 0.0
        self._looked_at: float | None = None
        self._spot_slots: int | None = None
        self._targets: deque[tuple[float, int]] = deque()
        """When each target was set that may still be the highest one; targets fall from left to right."""

    def look(self, load: ServingLoad) -> int:
        """Take in the load; return how many spot instances are wanted."""
        rule = self._rule
        self._average(load)
        if load.spot_slots is not None:
            self._spot_slots = max(1, load.spot_slots)
        slots = self._spot_slots or load.reserved_slots or DEFAULT_SLOTS
        beyond = self._mean_open / rule.fill - load.reserved_slots
        target = math.ceil(max(0.0, beyond) / slots - ROUNDING)
        if load.longest_wait_s > rule.max_wait_s and not load.num_wanted_missing:
            target = max(target, self.wanted + 1)
        self._remember(load.at, min(max(target, rule.min_instances), rule.max_instances))
        self.wanted = self._targets[0][1]
        return self.wanted

    def _average(self, load: ServingLoad) -> None:
        """Average the open requests over `max_wait_s`, so that a moment's burst brings no machine."""
        if self._looked_at is None or self._rule.max_wait_s <= 0:
            self._mean_open = float(load.num_open)
        else:
            kept = math.exp(-max(0.0, load.at - self._looked_at) / self._rule.max_wait_s)
            self._mean_open = kept * self._mean_open + (1.0 - kept) * load.num_open
        self._looked_at = load.at

    def _remember(self, at: float, target: int) -> None:
        """Keep the targets of the last `idle_s` that are higher than all after them."""
        while self._targets and self._targets[-1][1] <= target:
            self._targets.pop()
        self._targets.append((at, target))
        while at - self._targets[0][0] > self._rule.idle_s:
            self._targets.popleft()


def slots_of(
    max_running: int,
    kv_tokens: float,
    mean_context: float | None,
    line: tuple[float, float] | None = None,
    min_tokens_per_s: float | None = None,
) -> int:
    """Return how many responses an engine should decode at once, at least 1.

    `kv_tokens`: what of its cache is used; `mean_context`: KV tokens of a response, None: not known; `line`:
    seconds of a decode step per KV token, and without any.
    """
    slots = float(max_running)
    if mean_context is not None and mean_context > 0:
        slots = min(slots, kv_tokens / mean_context)
        if line is not None and min_tokens_per_s is not None:
            per_token_s, empty_s = line
            slots = min(slots, (1.0 / min_tokens_per_s - empty_s) / (per_token_s * mean_context))
    return max(1, math.floor(slots + ROUNDING))
