"""Which instance generates which response: join the emptiest, and wait rather than overfill (paper,
Algorithm 2).

- The response that got least far goes first (`SchedulingPolicy.least_first`): it has most to come, and a step
  ends with those that began last. The paper's and the baselines' rule is the contrary, continuations before
  fresh ones and the longest first.
- `DispatchRule.BOOKED`: the emptiest instance by booked KV share gets the next response, unless one that
  has a sibling's prompt in its cache is at most `affinity_slack` fuller. At a step's begin nobody is filled
  more than all will be once those that still load its version are there.
- `DispatchRule.PENDING`, the paper's own: the instance with the fewest responses that it does not execute
  yet, and fewer than Theta of them; among equals the one that executes fewest.
- A response that no instance can admit waits (delayed dispatch) and holds back those behind it, so that a
  large one is never overtaken for ever.
- The baselines' rules are in `dealing`.

BOOKED departs from the paper: load is booked KV tokens rather than the number of pending requests, because
it is known here without asking engines and does not confuse short responses with long ones.

Cost: each assignment O(log instances), whatever else happened O(1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from rlboost_runtime.core.base.messages import Pool
from rlboost_runtime.core.base.scheduling_policy import DispatchRule
from rlboost_runtime.core.base.timers import Context, Timer
from rlboost_runtime.core.dispatch.dealing import EvenDeal, PacedDeal
from rlboost_runtime.core.state.eligible import LoadIndex, Rank
from rlboost_runtime.core.state.instances import Instance, InstanceTable
from rlboost_runtime.core.state.responses import Response, StepResponses, WaitingQueue

COMING_S = {Pool.SPOT: 20.0, Pool.RESERVED: 60.0}
"""An instance that loads a step's version, or wakes for it, is waited for so long after the step's begin.
Reserved engines wake for nothing if nobody waits for them: what runs on spot instances does not move to
them. With 30 s of waking a step of 8B on four machines takes a tenth longer if they are waited for 20 s."""
FAIR_S = 1.0
"""The fair share is worked out anew so often: it looks at every instance, and hardly changes meanwhile."""
OVERDUE_GROWTH_SHARE = 0.25
"""Remaining growth, as a share of its present length, expected of a response longer than the expected
length."""
FIRST_LENGTH_SHARE = 0.5
"""Expected length, as a share of the token limit, while no step has been finished."""

Place = Callable[[Response, Instance, int], None]
"""Carries out one placement: response, instance, KV tokens to book."""


class Dispatcher:
    """The queue of waiting responses of the open step, where siblings ran, and how full instances are.

    `eligible` are the instances that may be given work: read, never changed.
    """

    def __init__(
        self, context: Context, instance_table: InstanceTable, eligible: Mapping[str, Instance]
    ) -> None:
        config = context.config
        self.load_index = LoadIndex(eligible, _RANKS.get(config.policy.dispatch, _by_booking))
        self._rule = config.policy.dispatch
        self._max_pending = config.policy.max_pending
        self._booked_growth_share = config.policy.booked_growth_share
        self._affinity_slack = config.affinity_slack
        self._eligible = eligible
        self._expected_tokens: float | None = None
        self._book: StepResponses | None = None
        self._queue = WaitingQueue(least_first=config.policy.least_first)
        self._fills_fairly = config.policy.fills_fairly and self._rule is DispatchRule.BOOKED
        self._fair_share = math.inf
        self._fair_at = 0.0
        self._context = context
        self._instance_table = instance_table
        self._ran_on: dict[int, dict[str, None]] = {}
        self._even = EvenDeal(instance_table)
        self._paced = PacedDeal(context, eligible)

    def open_step(self, former: StepResponses | None, book: StepResponses) -> None:
        """Forget the former step but for how long its responses became."""
        self._book = book
        learned = None if former is None else former.mean_finished_tokens()
        self._expected_tokens = self._expected_tokens if learned is None else learned
        self._queue.clear()
        self._paced.forget()
        self._ran_on.clear()
        self._fair_at = 0.0

    def enqueue(self, response: Response) -> None:
        """Queue a waiting response by the tokens that it keeps."""
        self._queue.add(response)

    def queued(self) -> list[Response]:
        """Return what is queued, in no order. Looks at all of it: for checks."""
        return self._queue.all() + self._paced.parked()

    def touch(self, name: str) -> None:
        """Take notice that an instance's load or ability may have changed."""
        self.load_index.touch(name)
        if self._rule is DispatchRule.PACED:
            self._paced.touch(name)

    def has_waiting(self) -> bool:
        """Return whether somebody waits."""
        return self._queue.peek() is not None or bool(self._paced.parked())

    def kv_estimate(self, response: Response) -> int:
        """Return the KV tokens to book: prompt, tokens so far, and a part of the expected growth."""
        request, so_far = response.request, response.num_tokens
        expected = self._expected_tokens
        if expected is None:
            expected = FIRST_LENGTH_SHARE * request.max_tokens
        growth = max(expected - so_far, OVERDUE_GROWTH_SHARE * so_far)
        growth = min(growth, max(0, request.max_tokens - so_far))
        return request.prompt_tokens + so_far + int(self._booked_growth_share * growth)

    def place(self, book: StepResponses, place: Place) -> None:
        """Place waiting responses on able instances until nobody waits or nothing fits.

        `place` must book the assignment on the instance before it returns, and touch it.
        """
        match self._rule:
            case DispatchRule.DEALT:
                for response, choice in self._even.deal(self._queue, self._eligible):
                    place(response, choice, self.kv_estimate(response))
            case DispatchRule.PACED:
                for response, choice in self._paced.deal(self._queue, book):
                    place(response, choice, self.kv_estimate(response))
            case _:
                self._place_singly(place)

    def _place_singly(self, place: Place) -> None:
        self._fair_share = self._share_until_all_are_here()
        stuck: list[Response] = []
        while self._eligible and (response := self._queue.peek()) is not None:
            estimate = self.kv_estimate(response)
            choice = self._choose(response, estimate)
            if choice is None and not response.failed_on:
                break
            self._queue.pop()
            if choice is None:  # waits for an instance that it has not made fail; others need not
                stuck.append(response)
                continue
            self._ran_on.setdefault(response.group, {})[choice.instance] = None
            place(response, choice, estimate)
        for response in stuck:
            self.enqueue(response)

    def _choose(self, response: Response, estimate: int) -> Instance | None:
        avoid: set[str] = set()
        if response.failed_on:
            avoid = response.failed_on.keys() & self._eligible.keys()
            if len(avoid) == len(self._eligible):
                avoid = set()  # better to try again where it failed than not at all
        meant = None if response.meant_for is None else self._eligible.get(response.meant_for)
        if meant is not None and meant.can_admit(estimate) and meant.instance not in avoid:
            return meant
        if self._rule is DispatchRule.PENDING:
            return self.load_index.best(lambda i: i.num_queued < self._max_pending, avoid)
        emptiest = self.load_index.best(
            lambda i: i.can_admit(estimate) and i.share <= self._fair_share, avoid
        )
        if emptiest is None:
            return None
        limit = emptiest.share + self._affinity_slack
        near = (self._eligible.get(i) for i in self._ran_on.get(response.group, ()) if i not in avoid)
        limit = min(limit, self._fair_share)
        siblings = [i for i in near if i is not None and i.share <= limit and i.can_admit(estimate)]
        return min(siblings, key=_rank) if siblings else emptiest

    def _share_until_all_are_here(self) -> float:
        """Return how full an instance may get while others are about to serve: as full as all will be.

        Without that the first one ready at a step's begin draws all there is, and the last one, a second
        later, nothing.
        """
        book, now = self._book, self._context.now
        if not self._fills_fairly or book is None or now >= book.started_at + max(COMING_S.values()):
            return math.inf
        if now >= self._fair_at:
            self._fair_at = now + FAIR_S
            self._fair_share = self._fair_share_of(book)
        if self._fair_share < math.inf:
            self._context.timers.set(Timer.PACE, "", self._fair_at)
        return self._fair_share

    def _fair_share_of(self, book: StepResponses) -> float:
        coming = [i for i in self._instance_table.instances.values() if self._is_coming(i, book)]
        num_waiting = len(book.responses) - book.num_finished - book.num_running
        first = self._queue.peek()
        if not coming or first is None or num_waiting <= len(self._eligible) + len(coming):
            return math.inf
        demand = sum(i.kv_load for i in self._eligible.values()) + num_waiting * self.kv_estimate(first)
        room = sum(i.kv_tokens for i in self._eligible.values()) + sum(i.kv_tokens for i in coming)
        return demand / max(1, room)

    def _is_coming(self, instance: Instance, book: StepResponses) -> bool:
        return (
            self._context.now < book.started_at + COMING_S[instance.pool]
            and instance.is_awake
            and instance.is_connected
            and not instance.is_draining
            and instance.ordered_version == book.policy_version != instance.version
        )


def _rank(instance: Instance) -> Rank:
    return instance.share, instance.fill, instance.instance


def _by_booking(instance: Instance) -> Rank | None:
    return _rank(instance) if instance.num_assigned < max(1, instance.max_running) else None


def _by_pending(instance: Instance) -> Rank | None:
    if instance.num_assigned >= max(1, instance.max_running):
        return None
    return instance.num_queued, instance.num_assigned - instance.num_queued, instance.instance


_RANKS = {DispatchRule.BOOKED: _by_booking, DispatchRule.PENDING: _by_pending}
