"""Which instance generates which response: join the emptiest, and wait rather than overfill (paper,
Algorithm 2).

- The trainer takes whole groups, so a response of the group with the fewest unfinished ones goes first, and
  a running one of a group that lacks many more gives way to it (`Assignments`). Among equals the response
  with the fewest tokens goes first (`SchedulingPolicy.least_first`): it has most to come. The paper's and the
  baselines' rule is the contrary, continuations before fresh ones and the longest first.
- An instance is filled up to `SchedulingPolicy.fill_limit`: a full one generates the most, but each of its
  responses, and so its groups, end later. In a run without spot instances it is filled whole: the trainer
  has the GPUs once all responses are finished, whichever group ends first. Where a cache holds only a few
  responses at their limit, all of their growth is booked: with few of them it does not even out, and an
  engine that preempts computes twice.
- The emptiest instance by booked KV share gets the next response, unless one that has a sibling's prompt in
  its cache is at most `affinity_slack` fuller. At a step's begin no instance is filled more than all will be
  once those that still load its version are there.
- A response that no instance can admit waits (delayed dispatch) and holds back those behind it, so that a
  large one is never overtaken for ever.

This departs from the paper: load is booked KV tokens rather than the number of pending requests, because it
is known here without asking engines and does not confuse short responses with long ones. The paper's own rule
and other baselines are subclasses in `rlboost_runtime.sim.baselines`.

Cost: each assignment O(log instances), whatever else happened O(1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from rlboost_runtime.core.base.messages import FIRST_REQUEST, Pool
from rlboost_runtime.core.base.timers import Context, Timer
from rlboost_runtime.core.state.eligible import LoadIndex, Rank
from rlboost_runtime.core.state.instances import Instance, InstanceTable
from rlboost_runtime.core.state.rates import RequestLengths
from rlboost_runtime.core.state.responses import (
    OpenSteps,
    Response,
    ResponseState,
    StepResponses,
    WaitingQueue,
)

COMING_S = {Pool.SPOT: 20.0, Pool.RESERVED: 60.0}
"""An instance that loads a step's version, or wakes for it, is waited for so long after the step's begin.
Reserved engines wake for nothing if they are not waited for: what runs on spot instances does not move to
them. With 30 s of waking a step of 8B on four machines takes a tenth longer if they are waited for 20 s. One
that has never served is waited for since it joined: what starts its engine takes minutes to come."""
FAIR_S = 1.0
"""Seconds for which a fair share is kept: computing it looks at every instance, and it hardly changes."""
OVERDUE_GROWTH_SHARE = 0.25
"""Remaining growth, as a share of its present length, expected of a response longer than the expected
length."""
FIRST_LENGTH_SHARE = 0.5
"""Expected length, as a share of the token limit, while no step has been finished."""

STEP_BEHIND = 1 << 20
"""What a response of a later one of several open steps lacks more: the earlier step always goes first."""

MAX_SESSIONS = 65_536
"""Sessions of requests of which it is remembered where they ran; all are forgotten when a step opens."""

Place = Callable[[Response, Instance, int], None]
"""Carries out one placement: response, instance, KV tokens to book."""


class Dispatcher:
    """The queue of waiting responses of the open steps, where siblings ran, and how full instances are.

    `eligible` are the instances that may be given work: read, never changed. Another rule overrides `rank`
    and `choose`, or `place` as a whole.
    """

    may_stall = False
    """True for a rule that leaves empty instances without work although responses wait."""

    def __init__(
        self, context: Context, instance_table: InstanceTable, eligible: Mapping[str, Instance]
    ) -> None:
        config = context.config
        self.load_index = LoadIndex(eligible, self.rank)
        self._booked_growth_share = config.policy.booked_growth_share
        self._affinity_slack = config.affinity_slack
        self.eligible = eligible
        self._expected_tokens: float | None = None
        self._steps = OpenSteps()
        self._by_group = config.policy.nearest_group_first
        self._fill_limit = config.policy.fill_limit if config.max_spot_instances else 1.0
        self._fits_small_caches = config.policy.fits_small_caches
        self.queue = WaitingQueue(least_first=config.policy.least_first)
        self.fills_fairly = config.policy.fills_fairly
        self._fair_share = math.inf
        self._fair_at = 0.0
        self._context = context
        self._instance_table = instance_table
        self._ran_on: dict[tuple[int, int], dict[str, None]] = {}
        """Instances that had a prompt, or a session's last turn, by the step's rank and the group."""
        self.request_lengths = RequestLengths()

    def open_step(self, steps: OpenSteps, closed: StepResponses | None) -> None:
        """Begin with another newest step. All is forgotten of one that is `closed`, except the lengths of its
        responses; whatever waits is queued again by the caller."""
        self._steps = steps
        if closed is not None:
            self.learn(closed)
        self.queue.clear()
        ranks = {book.rank for book in steps.earlier.values()}
        self._ran_on = {prefix: ran_on for prefix, ran_on in self._ran_on.items() if prefix[0] in ranks}
        self._fair_at = 0.0

    def learn(self, closed: StepResponses) -> None:
        """Expect lengths like those of a step that is over."""
        learned = closed.mean_finished_tokens()
        self._expected_tokens = self._expected_tokens if learned is None else learned

    def _owner(self, response: Response) -> tuple[StepResponses | None, int]:
        """Return the step and the group that a response counts for, of a turn its episode's; (None, 0): of a
        request of its own."""
        number = response.response if response.response < FIRST_REQUEST else response.request.episode
        book = None if number is None else self._steps.holding(number)
        return (None, 0) if book is None or number is None else (book, book.responses[number].group)

    def _prefix(self, response: Response) -> tuple[int, int]:
        is_request = response.response >= FIRST_REQUEST
        book = None if is_request else self._steps.holding(response.response)
        return (0 if book is None else book.rank), response.group

    def lacks(self, response: Response) -> int:
        """Return how many responses of its group are unfinished, of a turn those of its episode's group; 0
        for a request of its own. Of several open steps a later one's lack `STEP_BEHIND` more."""
        book, group = self._owner(response)
        return 0 if book is None else book.rank * STEP_BEHIND + book.unfinished_of(group)

    def may_run(self, response: Response, instance: Instance) -> bool:
        """Return True if the instance serves no version that is older than what the response was asked for
        under: of several open steps an earlier one may have such tokens."""
        if not self._steps.earlier:
            return True
        book, _ = self._owner(response)
        return book is None or book.takes(instance.version)

    def enqueue(self, response: Response) -> None:
        """Queue a waiting response by the tokens that it keeps."""
        lacks = self.lacks(response)
        self.queue.add(response, lacks if self._by_group else lacks - lacks % STEP_BEHIND)

    def ended_request(self, response: Response) -> None:
        """Forget where a request ran, unless it was one of a session, whose next one has its prefix."""
        prefix = self._prefix(response)
        ran_on = self._ran_on.pop(prefix, None)
        if ran_on is not None and response.group != response.response:
            self._ran_on[prefix] = ran_on
            while len(self._ran_on) > MAX_SESSIONS:
                del self._ran_on[next(iter(self._ran_on))]

    def finished(self, response: Response) -> None:
        """A response is over: those of its group that wait come earlier."""
        book = self._steps.holding(response.response) if self._by_group else None
        if book is None:
            return
        for sibling in book.members_of(response.group):
            if sibling.state is ResponseState.WAITING:
                self.enqueue(sibling)

    def queued(self) -> list[Response]:
        """Return what is queued, in no order. Looks at all of it: for checks."""
        return self.queue.all()

    def least_lacking(self) -> int:
        """Return what the group lacks that lacks the least of those of waiting responses, 0 if that is not
        known. Does not look at all of them."""
        first = self.queue.peek() if self._by_group else None
        return 0 if first is None else self.lacks(first)

    def touch(self, name: str) -> None:
        """Note that an instance's load or eligibility may have changed."""
        self.load_index.touch(name)

    def has_waiting(self) -> bool:
        """Return True if a response waits."""
        return self.queue.peek() is not None

    def kv_estimate(self, response: Response) -> int:
        """Return the KV tokens to book: prompt, tokens so far, and a part of the expected growth."""
        request, so_far = response.request, response.num_tokens
        if response.response < FIRST_REQUEST:
            expected = self._expected_tokens
        else:
            known = self.request_lengths
            expected = known.expected(so_far) if known.is_known else None
        if expected is None:
            expected = FIRST_LENGTH_SHARE * request.max_tokens
        growth = max(expected - so_far, OVERDUE_GROWTH_SHARE * so_far)
        growth = min(growth, max(0, request.max_tokens - so_far))
        return request.prompt_tokens + so_far + int(self._booked_growth_share * growth)

    def place(self, place: Place) -> None:
        """Place waiting responses on eligible instances until none waits or nothing fits.

        `place` must book the assignment on the instance before it returns, and touch it.
        """
        self._fair_share = self._fair_share_now()
        stuck: list[Response] = []
        while self.eligible and (response := self.queue.peek()) is not None:
            estimate = self.kv_estimate(response)
            choice = self._chosen(response, estimate)
            if choice is None and not response.failed_on:
                break
            self.queue.pop()
            if choice is None:  # waits for an instance that it has not made fail; others need not
                stuck.append(response)
                continue
            ran_on = self._ran_on.setdefault(self._prefix(response), {})
            ran_on.pop(choice.instance, None)
            ran_on[choice.instance] = None
            place(response, choice, estimate)
        for response in stuck:
            self.enqueue(response)

    @staticmethod
    def rank(instance: Instance) -> Rank | None:
        """Return where the instance stands among those that may get the next response; None: nowhere."""
        return _rank(instance) if instance.num_assigned < max(1, instance.max_running) else None

    def choose(self, response: Response, estimate: int, avoid: Collection[str]) -> Instance | None:
        """Return the instance for the next response, none of `avoid`; None if it fits nowhere."""
        emptiest = self.load_index.best(
            lambda i: (
                self._admits(i, response, estimate)
                and i.share <= self._fair_share
                and self.may_run(response, i)
            ),
            avoid,
        )
        if emptiest is None:
            return None
        limit = min(emptiest.share + self._affinity_slack, self._fair_share)
        near = (self.eligible.get(i) for i in self._ran_on.get(self._prefix(response), ()) if i not in avoid)
        siblings = [
            i
            for i in near
            if i is not None
            and i.share <= limit
            and self._admits(i, response, estimate)
            and self.may_run(response, i)
        ]
        if response.response >= FIRST_REQUEST and siblings:
            return siblings[-1]  # a session's newest turn, which has the longest prefix
        return min(siblings, key=_rank) if siblings else emptiest

    def _admits(
        self, instance: Instance, response: Response, estimate: int, fill_limit: float | None = None
    ) -> bool:
        if self._fits_small_caches and instance.is_small_for(response):
            return instance.can_hold(response)
        return instance.can_admit(estimate, self._fill_limit if fill_limit is None else fill_limit)

    def _chosen(self, response: Response, estimate: int) -> Instance | None:
        avoid: set[str] = set()
        if response.failed_on:
            avoid = response.failed_on.keys() & self.eligible.keys()
            if len(avoid) == len(self.eligible):
                avoid = set()  # better to try again where it failed than not at all
        meant = None if response.meant_for is None else self.eligible.get(response.meant_for)
        fits = meant is not None and self._admits(meant, response, estimate, 1.0)
        if meant is not None and fits and meant.instance not in avoid and self.may_run(response, meant):
            return meant
        return self.choose(response, estimate, avoid)

    def _fair_share_now(self) -> float:
        """Return how full an instance may get while others are about to serve: as full as all will be. Turns
        of episodes are too few at a time for that.

        Without that the first one ready at a step's begin draws all there is, and the last one, a second
        later, nothing. What an engine that has never served says of its cache is a guess, often several
        times too large: it counts as no larger than the largest that serves.
        """
        book, now = self._steps.newest, self._context.now
        if not self.fills_fairly or book is None or book.are_episodes or not self.eligible:
            return math.inf
        if now >= book.started_at + max(COMING_S.values()):
            return math.inf
        if now >= self._fair_at:
            self._fair_at = now + FAIR_S
            self._fair_share = self._fair_share_of(book)
        if self._fair_share < math.inf:
            self._context.timers.set(Timer.PACE, "", self._fair_at)
        return self._fair_share

    def _fair_share_of(self, book: StepResponses) -> float:
        coming = [i for i in self._instance_table.instances.values() if self._is_coming(i, book)]
        num_waiting = sum(each.num_unfinished - each.num_running for each in self._steps)
        first = self.queue.peek()
        if not coming or first is None or num_waiting <= len(self.eligible) + len(coming):
            return math.inf
        measured = [i.kv_tokens for i in self.eligible.values()]
        largest = max(measured)
        demand = sum(i.kv_load for i in self.eligible.values()) + num_waiting * self.kv_estimate(first)
        room = sum(measured) + sum(i.kv_tokens if i.has_served else min(i.kv_tokens, largest) for i in coming)
        return demand / max(1, room)

    def _is_coming(self, instance: Instance, book: StepResponses) -> bool:
        since = book.started_at if instance.has_served else min(book.started_at, instance.joined_at)
        return (
            self._context.now < since + COMING_S[instance.pool]
            and instance.is_awake
            and instance.is_connected
            and not instance.is_draining
            and book.takes(instance.ordered_version)
            and not book.takes(instance.version)
        )


def _rank(instance: Instance) -> Rank:
    return instance.share, instance.fill, instance.instance
