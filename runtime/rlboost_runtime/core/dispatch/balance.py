"""Responses move from crowded instances to idle ones while they run.

CONTINUOUSLB of the paper's Algorithm 2 (`BalanceRule.IDLE`), once no response waits:

1. an instance with nothing pending takes one pending response from the one with the most;
2. an instance that executes nothing takes max(e - B, 0) running responses of the one that executes most (e
   of them). B is the batch at which that kind of instance's throughput levels off, as heartbeats of the
   former step showed.

Moving costs a prefill on the new instance. Departures from the paper: a pending response moves only to an
instance that executes it at once by its booked KV tokens (else two full instances would pass it to and
fro); of the running ones those with the fewest tokens move, whose prefill is cheapest. One instance is
relieved at a time.

`BalanceRule.EVEN` keeps the first rule and has another second one: the fullest spot instance gives running
responses to the emptiest until both are as full, if that saves more than it costs; while no spot instance
serves, reserved ones do. A response of x tokens that will grow by r more slows each neighbour's every step by
c x, c being the seconds per KV token that heartbeats showed (`pace`). With b of them there and a on the new
instance, moving it saves about c x r (b - a) seconds of waiting and costs a + 1 of them a prefill of x
tokens.

Cost: O(log instances) an event; a move looks at the responses of the instance that gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlboost_runtime.core.base.messages import Pool
from rlboost_runtime.core.base.scheduling_policy import BalanceRule
from rlboost_runtime.core.state.eligible import LoadIndex, Rank
from rlboost_runtime.core.state.instances import Instance
from rlboost_runtime.core.state.rates import Kind, Lengths, StepTimes
from rlboost_runtime.core.state.responses import Response

PLATEAU_SHARE = 0.9
"""Throughput counts as levelled off from the smallest batch that reaches this share of the best seen."""
BUCKETS_PER_DOUBLING = 4
"""Resolution of the profile; finer and each bucket would see too few heartbeats."""

UNEVEN_SHARE = 0.05
"""Difference in load, as a share of the KV capacity, that is not worth a move."""
LOOK_AGAIN_S = 1.0
"""After a look that found nothing to even out, which goes through all responses of the fullest instance."""
PREFILL_SHARE = 1 / 100
"""Most that the prefill of one token takes, as a share of an empty engine's decode step. A decode step reads
all weights for a few tokens; a prefill computes with them for thousands at once (on H100: 1/300)."""


class RateProfile:
    """The table P: tokens per second by batch size and kind of instance, from the former step's
    heartbeats."""

    def __init__(self) -> None:
        self._sums: dict[Kind, dict[int, tuple[float, float]]] = {}
        self._plateaus: dict[Kind, int] = {}

    def learn(self, instance: Instance, batch: int, num_tokens: int, seconds: float) -> None:
        """Take in `num_tokens` generated within `seconds` by `batch` responses together."""
        table = self._sums.setdefault(_kind(instance), {})
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
        return self._plateaus.get(_kind(instance))


@dataclass(frozen=True, slots=True)
class Rebalance:
    """Assignments to take away from one instance so that another may have them."""

    source: Instance
    target: Instance
    assignments: list[int]


class Balancer:
    """Decides which running responses move to another instance."""

    def __init__(
        self, eligible: Mapping[str, Instance], load_index: LoadIndex, lengths: Lengths, rule: BalanceRule
    ) -> None:
        self.profile = RateProfile()
        self.step_times = StepTimes()
        self._uneven = [
            (LoadIndex(eligible, _fullest_of(pool)), LoadIndex(eligible, _emptiest_of(pool)))
            for pool in (Pool.SPOT, Pool.RESERVED)
        ]
        """By pool: the fullest first, the emptiest first."""
        self._lengths = lengths
        self._rule = rule
        self._even_at = 0.0
        self.busiest = LoadIndex(eligible, _most_executing)
        self.longest_queue = LoadIndex(eligible, _most_pending)
        self._load_index = load_index

    def touch(self, name: str) -> None:
        """Note that an instance's load or eligibility may have changed."""
        if self._rule is BalanceRule.EVEN:
            for fullest, emptiest in self._uneven:
                fullest.touch(name)
                emptiest.touch(name)
        else:
            self.busiest.touch(name)
        self.longest_queue.touch(name)

    def rebalance(self, now: float) -> Rebalance | None:
        """Return the next move, None if none helps. Only valid while no response waits."""
        source = self.longest_queue.best(lambda _: True)
        if source is not None:
            return self._of_pending(source)
        return self._to_even_out(now) if self._rule is BalanceRule.EVEN else self._for_the_idle()

    def learn(self, instance: Instance, batch: int, num_tokens: int, seconds: float) -> None:
        """Take in `num_tokens` generated within `seconds` by `batch` responses together."""
        self.profile.learn(instance, batch, num_tokens, seconds)

    def learn_step_time(
        self, instance: Instance, kv_tokens: int, seconds: float, gains: Sequence[int]
    ) -> None:
        """Take in what each response that was there all the time gained: a token in each decode step."""
        num_steps = sorted(gains)[len(gains) // 2]
        if num_steps > 0:
            self.step_times.learn(_kind(instance), kv_tokens, seconds / num_steps)

    def close_step(self) -> None:
        """The step is over: its measurements are used in the next one."""
        self.profile.close_step()
        self.step_times.close_step()

    def _for_the_idle(self) -> Rebalance | None:
        target = self._load_index.best(lambda i: not i.assignments)
        source = None if target is None else self.busiest.best(lambda _: True)
        if target is None or source is None or source is target or source.aborting:
            return None
        plateau = self.profile.plateau(source)
        if plateau is None or source.num_executing <= plateau:
            return None
        held = sorted(source.assignments.items(), key=lambda item: (item[1].num_tokens, item[1].order))
        moved = [assignment for assignment, _ in held[: source.num_executing - plateau]]
        return Rebalance(source, target, moved)

    def _to_even_out(self, now: float) -> Rebalance | None:
        source, target = self._most_uneven()
        if source is None or target is None or source is target or source.aborting or target.aborting:
            return None
        if not self._lengths.is_known or source.share - target.share < UNEVEN_SHARE:
            return None
        line = self.step_times.line(_kind(source))
        if line is None or now < self._even_at:
            return None
        excess = (source.share - target.share) / (
            1.0 / max(1, source.kv_tokens) + 1.0 / max(1, target.kv_tokens)
        )
        moved, load_index, guests = [], source.num_assigned, target.num_assigned
        for assignment, response in sorted(
            source.assignments.items(), key=lambda item: (item[1].num_tokens, item[1].order)
        ):
            if response.kv_estimate > excess or not self._pays(response, load_index, guests, line):
                break
            moved.append(assignment)
            excess -= response.kv_estimate
            load_index, guests = load_index - 1, guests + 1
        if not moved:
            self._even_at = now + LOOK_AGAIN_S
            return None
        return Rebalance(source, target, moved)

    def _most_uneven(self) -> tuple[Instance | None, Instance | None]:
        """Return the fullest and the emptiest spot instance; where none serves, of the reserved ones."""
        pair: tuple[Instance | None, Instance | None] = (None, None)
        for fullest, emptiest in self._uneven:
            pair = fullest.best(lambda _: True), emptiest.best(lambda _: True)
            if pair != (None, None):
                break
        return pair

    def _pays(self, response: Response, load_index: int, guests: int, line: tuple[float, float]) -> bool:
        slope_s, empty_s = line
        so_far = response.num_tokens
        expected = min(float(response.request.max_tokens), self._lengths.expected(so_far))
        saved_s = slope_s * max(0.0, expected - so_far) * (load_index - 1 - guests)
        return saved_s > PREFILL_SHARE * empty_s * (guests + 1)

    def _of_pending(self, source: Instance) -> Rebalance | None:
        if source.aborting:
            return None
        assignment, response = _newest(source)
        target = self._load_index.best(lambda i: i is not source and not i.num_queued)
        if target is None or not target.can_admit(response.kv_estimate):
            return None
        return Rebalance(source, target, [assignment])


def _newest(instance: Instance) -> tuple[int, Response]:
    assignment = next(reversed(instance.assignments))
    return assignment, instance.assignments[assignment]


def _most_executing(instance: Instance) -> Rank | None:
    return (-instance.num_executing, 0.0, instance.instance) if instance.assignments else None


def _fullest_of(pool: Pool) -> Callable[[Instance], Rank | None]:
    def rank(instance: Instance) -> Rank | None:
        if instance.pool is not pool or not instance.assignments:
            return None
        return -instance.share, 0.0, instance.instance

    return rank


def _emptiest_of(pool: Pool) -> Callable[[Instance], Rank | None]:
    def rank(instance: Instance) -> Rank | None:
        if instance.pool is not pool or instance.num_assigned >= max(1, instance.max_running):
            return None
        return instance.share, instance.fill, instance.instance

    return rank


def _most_pending(instance: Instance) -> Rank | None:
    return (-instance.num_queued, 0.0, instance.instance) if instance.num_queued else None


def _kind(instance: Instance) -> Kind:
    return instance.kv_tokens, instance.max_running


def _bucket(batch: int) -> int:
    exponent = batch.bit_length() - 1
    return BUCKETS_PER_DOUBLING * exponent + (batch * BUCKETS_PER_DOUBLING >> exponent) - BUCKETS_PER_DOUBLING


def _batch(bucket: int) -> int:
    """Return the smallest batch in a bucket."""
    exponent, part = divmod(bucket, BUCKETS_PER_DOUBLING)
    return -(-((BUCKETS_PER_DOUBLING + part) << exponent) // BUCKETS_PER_DOUBLING)
