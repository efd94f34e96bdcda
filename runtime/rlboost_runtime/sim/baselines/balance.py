"""The paper's rule for running responses: the second part of CONTINUOUSLB (Algorithm 2).

An instance that executes nothing takes max(e - B, 0) running responses of the one that executes most (e of
them). B is the batch at which that kind of instance's throughput levels off, as heartbeats of the former step
showed. Those with the fewest tokens move, whose prefill is cheapest.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlboost_runtime.core.dispatch.balance import Balancer, Rebalance, kind_of
from rlboost_runtime.core.state.eligible import LoadIndex, Rank
from rlboost_runtime.core.state.instances import Instance
from rlboost_runtime.core.state.rates import Kind, Lengths

PLATEAU_SHARE = 0.9
"""Throughput counts as levelled off from the smallest batch that reaches this share of the best seen."""
BUCKETS_PER_DOUBLING = 4
"""Resolution of the profile; finer and each bucket would see too few heartbeats."""


class RateProfile:
    """The table P: tokens per second by batch size and kind of instance, from the former step's
    heartbeats."""

    def __init__(self) -> None:
        self._sums: dict[Kind, dict[int, tuple[float, float]]] = {}
        self._plateaus: dict[Kind, int] = {}

    def learn(self, instance: Instance, batch: int, num_tokens: int, seconds: float) -> None:
        """Take in `num_tokens` generated within `seconds` by `batch` responses together."""
        table = self._sums.setdefault(kind_of(instance), {})
        bucket = _bucket(batch)
        tokens, time = table.get(bucket, (0.0, 0.0))
        table[bucket] = tokens + num_tokens, time + seconds

    def close_step(self) -> None:
        """The step is over: its measurements are used in the next one."""
        for kind, table in self._sums.items():
            rates = {bucket: tokens / time for bucket, (tokens, time) in table.items() if time > 0}
            if rates:
                enough = PLATEAU_SHARE * max(rates.values())
                self._plateaus[kind] = _batch(min(b for b, rate in rates.items() if rate >= enough))
        self._sums.clear()

    def plateau(self, instance: Instance) -> int | None:
        """Return B of that kind of instance, None while no step has shown it."""
        return self._plateaus.get(kind_of(instance))


class IdleBalancer(Balancer):
    """Running responses move to idle instances only."""

    def __init__(self, eligible: Mapping[str, Instance], load_index: LoadIndex, lengths: Lengths) -> None:
        super().__init__(eligible, load_index, lengths)
        self._profile = RateProfile()
        self._busiest = LoadIndex(eligible, _most_executing)

    def touch(self, name: str) -> None:
        """Note that an instance's load or eligibility may have changed."""
        self._busiest.touch(name)
        self.longest_queue.touch(name)

    def learn(self, instance: Instance, batch: int, num_tokens: int, seconds: float) -> None:
        """Take in `num_tokens` generated within `seconds` by `batch` responses together."""
        self._profile.learn(instance, batch, num_tokens, seconds)

    def close_step(self) -> None:
        """The step is over: its measurements are used in the next one."""
        super().close_step()
        self._profile.close_step()

    def move_running(self, now: float) -> Rebalance | None:
        """Return what an idle instance takes from the busiest beyond where its throughput levels off."""
        target = self.load_index.best(lambda i: not i.assignments)
        source = None if target is None else self._busiest.best(lambda _: True)
        if target is None or source is None or source is target or source.aborting:
            return None
        plateau = self._profile.plateau(source)
        if plateau is None or source.num_executing <= plateau:
            return None
        held = sorted(source.assignments.items(), key=lambda item: (item[1].num_tokens, item[1].order))
        moved = [assignment for assignment, _ in held[: source.num_executing - plateau]]
        return Rebalance(source, target, moved)


def _most_executing(instance: Instance) -> Rank | None:
    return (-instance.num_executing, 0.0, instance.instance) if instance.assignments else None


def _bucket(batch: int) -> int:
    exponent = batch.bit_length() - 1
    return BUCKETS_PER_DOUBLING * exponent + (batch * BUCKETS_PER_DOUBLING >> exponent) - BUCKETS_PER_DOUBLING


def _batch(bucket: int) -> int:
    """Return the smallest batch in a bucket."""
    exponent, part = divmod(bucket, BUCKETS_PER_DOUBLING)
    return -(-((BUCKETS_PER_DOUBLING + part) << exponent) // BUCKETS_PER_DOUBLING)
