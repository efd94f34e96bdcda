"""Which instance generates which response: join the emptiest, and wait rather than overfill (paper,
Algorithm 2).

- Continuations go before fresh responses, the longest first: they are the ones a step waits for.
- The emptiest instance by booked KV share gets the next response, unless one that has a sibling's prompt in
  its cache is at most `affinity_slack` fuller.
- A response that no instance can admit waits (delayed dispatch) and holds back those behind it, so that a
  large one is never overtaken for ever.

Departure from the paper: load is booked KV tokens rather than the number of pending requests, because it is
known here without asking engines and does not confuse short responses with long ones.

Cost: a batch looks at every instance once, each assignment costs O(log instances).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

from rlboost_runtime.core.instances import Instance
from rlboost_runtime.core.responses import Response, ResponseState, StepBook

HEADROOM_SHARE = 0.5
"""Share of a response's expected remaining growth that is booked ahead. Responses on an instance are at
different points of their growth, so half of it is what they need together at any time; the engine itself
handles the rest."""
OVERDUE_GROWTH_SHARE = 0.25
"""Remaining growth, as a share of its present length, expected of a response longer than the expected
length."""
FIRST_LENGTH_SHARE = 0.5
"""Expected length, as a share of the token limit, while no step has been finished."""

Place = Callable[[Response, Instance, int], None]
"""Carries out one placement: response, instance, KV tokens to book."""


class Dispatcher:
    """The queue of waiting responses of the open step, and where siblings ran."""

    def __init__(self, affinity_slack: float) -> None:
        self._affinity_slack = affinity_slack
        self._expected_tokens: float | None = None
        self._queue: list[tuple[int, int, Response]] = []
        self._ran_on: dict[int, dict[str, None]] = {}

    def open_step(self, former: StepBook | None) -> None:
        """Forget the former step but for how long its responses became."""
        learned = None if former is None else former.mean_finished_tokens()
        self._expected_tokens = self._expected_tokens if learned is None else learned
        self._queue.clear()
        self._ran_on.clear()

    def enqueue(self, response: Response) -> None:
        """Queue a waiting response by the tokens that it keeps."""
        heapq.heappush(self._queue, (-response.num_tokens, response.order, response))

    def queued(self) -> list[Response]:
        """Return what is queued, in no order. Looks at all of it: for checks."""
        return [response for _, _, response in self._queue if _is_waiting(response)]

    def has_waiting(self) -> bool:
        """Return whether somebody waits."""
        return self._peek() is not None

    def kv_estimate(self, response: Response) -> int:
        """Return the KV tokens to book: prompt, tokens so far, and a part of the expected growth."""
        request, so_far = response.request, response.num_tokens
        expected = self._expected_tokens
        if expected is None:
            expected = FIRST_LENGTH_SHARE * request.max_tokens
        growth = max(expected - so_far, OVERDUE_GROWTH_SHARE * so_far)
        growth = min(growth, max(0, request.max_tokens - so_far))
        return request.prompt_tokens + so_far + int(HEADROOM_SHARE * growth)

    def place(self, able: Mapping[str, Instance], place: Place) -> None:
        """Place waiting responses on `able` instances until nobody waits or nothing fits.

        `place` must book the assignment on the instance before it returns.
        """
        crowd = _Crowd(able)
        stuck: list[Response] = []
        while able and (response := self._peek()) is not None:
            estimate = self.kv_estimate(response)
            choice = self._choose(response, estimate, crowd)
            if choice is None and not response.failed_on:
                break
            heapq.heappop(self._queue)
            if choice is None:  # waits for an instance that it has not made fail; others need not
                stuck.append(response)
                continue
            self._ran_on.setdefault(response.group, {})[choice.instance] = None
            place(response, choice, estimate)
            crowd.put_back(choice)
        for response in stuck:
            self.enqueue(response)

    def _choose(self, response: Response, estimate: int, crowd: _Crowd) -> Instance | None:
        avoid = response.failed_on.keys() & crowd.able.keys()
        if len(avoid) == len(crowd.able):
            avoid = set()  # better to try again where it failed than not at all
        emptiest = crowd.emptiest(estimate, avoid)
        if emptiest is None:
            return None
        limit = emptiest.share + self._affinity_slack
        near = (crowd.able.get(i) for i in self._ran_on.get(response.group, ()) if i not in avoid)
        siblings = [i for i in near if i is not None and i.share <= limit and i.can_admit(estimate)]
        return min(siblings, key=_rank) if siblings else emptiest

    def _peek(self) -> Response | None:
        while self._queue and not _is_waiting(self._queue[0][2]):
            heapq.heappop(self._queue)  # it ended while it waited
        return self._queue[0][2] if self._queue else None


class _Crowd:
    """Able instances, emptiest first; an entry whose instance has changed since is void."""

    def __init__(self, able: Mapping[str, Instance]) -> None:
        self.able = able
        self._heap = [_rank(i) for i in able.values() if i.num_assigned < max(1, i.max_running)]
        heapq.heapify(self._heap)

    def emptiest(self, estimate: int, avoid: set[str]) -> Instance | None:
        """Return the emptiest instance that admits the estimate; it stays in the crowd.

        One that does not admit it leaves the crowd until the next batch, so that a batch costs little.
        """
        avoided = []
        found = None
        while self._heap and found is None:
            rank = self._heap[0]
            instance = self.able[rank[2]]
            if _rank(instance) != rank or not instance.can_admit(estimate):
                heapq.heappop(self._heap)
            elif instance.instance in avoid:
                avoided.append(heapq.heappop(self._heap))
            else:
                found = instance
        for rank in avoided:
            heapq.heappush(self._heap, rank)
        return found

    def put_back(self, instance: Instance) -> None:
        """Take notice of an instance whose load changed."""
        if instance.num_assigned < instance.max_running:
            heapq.heappush(self._heap, _rank(instance))


def _rank(instance: Instance) -> tuple[float, float, str]:
    return instance.share, instance.fill, instance.instance


def _is_waiting(response: Response) -> bool:
    return response.state is ResponseState.WAITING
