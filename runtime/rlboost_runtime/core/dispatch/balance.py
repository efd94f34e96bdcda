"""Responses move from crowded instances to idle ones while they run, once no response waits.

1. An instance with nothing pending takes pending responses from the one with the most (the paper's
   CONTINUOUSLB of Algorithm 2, which takes one), until both are as full, if it executes them at once by
   their booked KV tokens: else two full instances would pass them to and fro.
2. The fullest spot instance gives running responses to the emptiest until both are as full, if that saves
   more than it costs; while no spot instance serves, reserved ones do. The paper's second rule is in
   `rlboost_runtime.sim.baselines`.

Moving costs a prefill on the new instance, so those with the fewest tokens move. A response of x tokens that
will grow by r more slows each neighbour's every step by c x, c being the seconds per KV token that heartbeats
showed (`StepTimes`). With b of them there and a on the new instance, moving it saves about c x r (b - a)
seconds of waiting and costs a + 1 of them a prefill of x tokens. One instance is relieved at a time.

Cost: O(log instances) an event; a move looks at the responses of the instance that gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from rlboost_runtime.core.base.messages import FIRST_REQUEST, Pool
from rlboost_runtime.core.state.eligible import LoadIndex, Rank
from rlboost_runtime.core.state.instances import Instance
from rlboost_runtime.core.state.rates import Lengths, RequestLengths, StepTimes
from rlboost_runtime.core.state.responses import Response

UNEVEN_SHARE = 0.05
"""Difference in load, as a share of the KV capacity, that is not worth a move."""
LOOK_AGAIN_S = 1.0
"""After a look that found nothing to even out, which goes through all responses of the fullest instance."""
PREFILL_SHARE = 1 / 100
"""Most that the prefill of one token takes, as a share of an empty engine's decode step. A decode step reads
all weights for a few tokens; a prefill computes with them for thousands at once (on H100: 1/300)."""


@dataclass(frozen=True, slots=True)
class Rebalance:
    """Assignments to take away from one instance so that another may have them."""

    source: Instance
    target: Instance
    assignments: list[int]


class Balancer:
    """Decides which running responses move to another instance. Another rule overrides `move_running`."""

    moves_one = False
    """True for a rule that moves pending responses one by one."""

    def __init__(
        self,
        eligible: Mapping[str, Instance],
        load_index: LoadIndex,
        lengths: Lengths,
        request_lengths: RequestLengths,
    ) -> None:
        self.step_times = StepTimes()
        self._uneven = [
            (
                LoadIndex(eligible, partial(_fullest_first, pool)),
                LoadIndex(eligible, partial(_emptiest_first, pool)),
            )
            for pool in (Pool.SPOT, Pool.RESERVED)
        ]
        """By pool: the fullest first, the emptiest first."""
        self._lengths = lengths
        self._request_lengths = request_lengths
        self._even_at = 0.0
        self.longest_queue = LoadIndex(eligible, _most_pending)
        self.load_index = load_index

    def touch(self, name: str) -> None:
        """Note that an instance's load or eligibility may have changed."""
        for fullest, emptiest in self._uneven:
            fullest.touch(name)
            emptiest.touch(name)
        self.longest_queue.touch(name)

    def rebalance(self, now: float) -> Rebalance | None:
        """Return the next move, None if none helps. Only valid while no response waits."""
        source = self.longest_queue.best(lambda _: True)
        return self.move_running(now) if source is None else self._of_pending(source)

    def learn(self, instance: Instance, batch: int, num_tokens: int, seconds: float) -> None:
        """Take in `num_tokens` generated within `seconds` by `batch` responses together: not used here."""

    def learn_step_time(
        self, instance: Instance, kv_tokens: int, seconds: float, gains: Sequence[int]
    ) -> None:
        """Take in what each response that was there all the time gained: a token in each decode step."""
        num_steps = sorted(gains)[len(gains) // 2]
        if num_steps > 0:
            self.step_times.learn(instance.kind, kv_tokens, seconds / num_steps)

    def close_step(self) -> None:
        """The step is over: its measurements are used in the next one."""
        self.step_times.close_step()

    def move_running(self, now: float) -> Rebalance | None:
        """Return the running responses to move, None if that would not help."""
        source, target = self._most_uneven()
        if source is None or target is None or source is target or source.aborting or target.aborting:
            return None
        if source.share - target.share < UNEVEN_SHARE:
            return None
        line = self.step_times.line(source.kind)
        if line is None or now < self._even_at:
            return None
        excess = _excess(source, target)
        room = target.kv_room
        moved, load_index, guests = [], source.num_assigned, target.num_assigned
        for assignment, response in sorted(
            source.assignments.items(), key=lambda item: (item[1].num_tokens, item[1].order)
        ):
            room -= target.whole_blocks(response)
            if room < 0 and target.is_small_for(response):
                break
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
        lengths = self._lengths if response.response < FIRST_REQUEST else self._request_lengths
        if not lengths.is_known:
            return False
        expected = min(float(response.request.max_tokens), lengths.expected(so_far))
        saved_s = slope_s * max(0.0, expected - so_far) * (load_index - 1 - guests)
        return saved_s > PREFILL_SHARE * empty_s * (guests + 1)

    def _of_pending(self, source: Instance) -> Rebalance | None:
        target = self.load_index.best(lambda i: i is not source and not i.num_queued)
        if source.aborting or target is None:
            return None
        moved: list[int] = []
        booked, excess = 0, _excess(source, target)
        for assignment, response in islice(reversed(source.assignments.items()), source.num_queued):
            booked += response.kv_estimate
            if not target.can_admit(booked) or (moved and (booked > excess or self.moves_one)):
                break
            moved.append(assignment)
        return Rebalance(source, target, moved) if moved else None


def _excess(source: Instance, target: Instance) -> float:
    """Return the booked KV tokens after whose move both are as full."""
    both = 1.0 / max(1, source.kv_tokens) + 1.0 / max(1, target.kv_tokens)
    return (source.share - target.share) / both


def _fullest_first(pool: Pool, instance: Instance) -> Rank | None:
    if instance.pool is not pool or not instance.assignments:
        return None
    return -instance.share, 0.0, instance.instance


def _emptiest_first(pool: Pool, instance: Instance) -> Rank | None:
    if instance.pool is not pool or instance.num_assigned >= max(1, instance.max_running):
        return None
    return instance.share, instance.fill, instance.instance


def _most_pending(instance: Instance) -> Rank | None:
    return (-instance.num_queued, 0.0, instance.instance) if instance.num_queued else None
