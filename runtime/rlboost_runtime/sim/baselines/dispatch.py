"""Dispatch and balance of the paper and of plain baselines.

- `PendingDispatcher`, the paper's Algorithm 2: the instance with the fewest responses that it does not
  execute yet, and fewer than Theta of them; among equals the one that executes fewest.
- `DealtDispatcher`: what a co-located trainer does (veRL): the step's groups are cut into as many equal runs
  as there are reserved engines, once, when all of them serve; the engines queue what does not fit.
- `PacedDispatcher`: what the published code of the paper does (PolyRL, balance.rs and handlers.rs): up to
  four groups a second for the whole fleet, in turn to instances that report an empty queue. A group moves as
  a whole: its unfinished responses continue from the shortest one's length, and what the others had beyond is
  generated again.

The last two deal out whole groups without regard to how full an engine is, and give a lost instance's
responses to any that serves. An event costs O(log instances): free instances are known by name (`_Ring`), and
groups of which a part still runs are looked at once a second.

`IdleBalancer` is the second part of CONTINUOUSLB (Algorithm 2): an instance that executes nothing takes max(e
- B, 0) running responses of the one that executes most (e of them). B is the batch at which that kind of
instance's throughput levels off, as heartbeats of the former step showed. Those with the fewest tokens move,
whose prefill is cheapest.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Mapping

from rlboost_runtime.core.base.timers import Context, Timer
from rlboost_runtime.core.dispatch.balance import Balancer, Rebalance
from rlboost_runtime.core.dispatch.dispatcher import Dispatcher, Place
from rlboost_runtime.core.state.eligible import LoadIndex, Rank
from rlboost_runtime.core.state.instances import Instance, InstanceTable
from rlboost_runtime.core.state.rates import Kind, Lengths, RequestLengths
from rlboost_runtime.core.state.responses import OpenSteps, Response, StepResponses, is_current

PACE_S = 1.0
"""Seconds between two looks at the instances' queues."""
GROUPS_PER_LOOK = 4
"""`max_assigned_batches_per_stats_check` of the published code, for the whole fleet."""


class PendingDispatcher(Dispatcher):
    """By the number of pending responses."""

    def __init__(
        self, context: Context, instance_table: InstanceTable, eligible: Mapping[str, Instance]
    ) -> None:
        super().__init__(context, instance_table, eligible)
        self.fills_fairly = False
        self._max_pending = context.config.policy.max_pending

    @staticmethod
    def rank(instance: Instance) -> Rank | None:
        """Return where the instance stands: the fewest pending responses first."""
        if instance.num_assigned >= max(1, instance.max_running):
            return None
        return instance.num_queued, instance.num_assigned - instance.num_queued, instance.instance

    def choose(self, response: Response, estimate: int, avoid: Collection[str]) -> Instance | None:
        """Return the instance for the next response; None if all have Theta pending ones."""
        return self.load_index.best(
            lambda i: i.num_queued < self._max_pending and self.may_run(response, i), avoid
        )


class DealtDispatcher(Dispatcher):
    """Equal runs of groups to all reserved engines at once."""

    may_stall = True

    def place(self, place: Place) -> None:
        """Place everything, or nothing while a reserved engine is still to come."""
        names = sorted(self.eligible)
        if not names or not self.eligible.keys() >= self._instance_table.reserved.keys():
            return
        waiting = sorted(self.queue.all(), key=lambda r: r.order)
        if not all(self.may_run(each, instance) for each in waiting for instance in self.eligible.values()):
            return
        self.queue.clear()
        groups = {group: rank for rank, group in enumerate(dict.fromkeys(r.group for r in waiting))}
        for response in waiting:
            name = names[groups[response.group] * len(names) // len(groups)]
            place(response, self.eligible[name], self.kv_estimate(response))


class PacedDispatcher(Dispatcher):
    """A few groups a second, in turn."""

    may_stall = True

    def __init__(
        self, context: Context, instance_table: InstanceTable, eligible: Mapping[str, Instance]
    ) -> None:
        super().__init__(context, instance_table, eligible)
        self._look_at = 0.0
        self._left = 0
        self._free = _Ring(eligible)
        self._parked: list[tuple[int, Response]] = []
        """Out of the queue until the next look, with their assignments so far: siblings still run."""

    def open_step(self, steps: OpenSteps, closed: StepResponses | None) -> None:
        """Forget the former step, except the lengths of its responses."""
        super().open_step(steps, closed)
        self._parked.clear()

    def queued(self) -> list[Response]:
        """Return what is queued or parked, in no order."""
        return super().queued() + self._waiting_aside()

    def has_waiting(self) -> bool:
        """Return True if a response waits."""
        return super().has_waiting() or bool(self._waiting_aside())

    def touch(self, name: str) -> None:
        """Note that an instance's load or eligibility may have changed."""
        super().touch(name)
        self._free.touch(name)

    def place(self, place: Place) -> None:
        """Place as many groups as may go in this second; the rest waits for the next look."""
        now = self._context.now
        if self._steps.newest is None:
            return
        if now >= self._look_at:
            self._look_at = now + PACE_S
            self._left = GROUPS_PER_LOOK
            for each in self._waiting_aside():
                self.queue.add(each)
            self._parked.clear()
        while self._left and (response := self.queue.peek()) is not None:
            book = self._steps.holding(response.response)
            assert book is not None
            members = [r for r in book.members_of(response.group) if r.finish_reason is None]
            if any(r.assignment is not None for r in members):
                parked = self.queue.pop()
                self._parked.append((parked.num_assignments, parked))
                continue
            choice = self._free.next()
            if choice is None or not self.may_run(response, choice):
                break
            self._left -= 1
            kept = min(r.num_tokens for r in members)
            for member in members:
                if member.num_tokens > kept:
                    member.drop_tokens_beyond(kept)
                place(member, choice, self.kv_estimate(member))
        if self._parked or self.queue.peek() is not None:
            self._context.timers.set(Timer.PACE, "", self._look_at)

    def _waiting_aside(self) -> list[Response]:
        return [entry[1] for entry in self._parked if is_current(*entry)]


class _Ring:
    """The instances that report an empty queue, in turn by name."""

    def __init__(self, eligible: Mapping[str, Instance]) -> None:
        self._eligible = eligible
        self._names: list[str] = []
        self._touched: dict[str, None] = {}
        self._last = ""

    def touch(self, name: str) -> None:
        """Note that an instance may have become free, or not free."""
        self._touched[name] = None

    def next(self) -> Instance | None:
        """Return the free instance whose turn it is, None if none is free."""
        for name in self._touched:
            self._update(name)
        self._touched.clear()
        if not self._names:
            return None
        self._last = self._names[bisect_right(self._names, self._last) % len(self._names)]
        return self._eligible[self._last]

    def _update(self, name: str) -> None:
        instance = self._eligible.get(name)
        is_free = (
            instance is not None
            and not instance.num_queued
            and instance.num_assigned < max(1, instance.max_running)
        )
        place = bisect_left(self._names, name)
        is_filed = place < len(self._names) and self._names[place] == name
        if is_free and not is_filed:
            insort(self._names, name)
        elif is_filed and not is_free:
            del self._names[place]


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
        table = self._sums.setdefault(instance.kind, {})
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
        return self._plateaus.get(instance.kind)


class IdleBalancer(Balancer):
    """Running responses move to idle instances only, pending ones one by one."""

    moves_one = True

    def __init__(
        self,
        eligible: Mapping[str, Instance],
        load_index: LoadIndex,
        lengths: Lengths,
        request_lengths: RequestLengths,
    ) -> None:
        super().__init__(eligible, load_index, lengths, request_lengths)
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
