"""Which offer is taken next, and which places are left alone for a while. Pure: the time comes with the call.

Rules: of the places that are not paused, the one whose tokens cost least. A place without capacity is paused
for `FIRST_PAUSE_S`, twice as long after each further failure in a row, at most `LONGEST_PAUSE_S`; where its
cloud says when to come back, for that long. Without quota: `QUOTA_PAUSE_S`. A cloud that throttles or rejects
our credentials is paused whole. What the job file has wrong is not asked for again. A machine that came makes
its place as new.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter

from rlboost_providers.base.provider import Offer
from rlboost_runtime.errors import (
    ConfigError,
    CredentialsRejected,
    NoCapacity,
    QuotaExceeded,
    RLBoostError,
    Throttled,
)

FIRST_PAUSE_S = 20.0
"""After a stock-out: capacity that was taken a moment ago rarely comes back sooner. Longer than a refusal
takes (SkyPilot: 2-10 s), or two cheap places without machines would be asked in turn, the third one never."""
LONGEST_PAUSE_S = 300.0
"""A place without machines is looked at so often all the same, for prices and stocks change by the minute."""
ERROR_PAUSE_S = 10.0
"""After an error that says nothing of the place."""
QUOTA_PAUSE_S = 900.0
"""After a quota: a person has to act, and may have."""
CREDENTIALS_PAUSE_S = 120.0
"""After rejected credentials: somebody may sign in again."""
NOTHING_PAUSE_S = 2.0
"""Where no cloud offers anything."""
ELSEWHERE_S = 0.1
"""Until the next launch, where another place is open."""

Place = tuple[str, ...]
"""Provider alone, or `Offer.place`."""


@dataclass(slots=True)
class _Pause:
    until: float
    seconds: float
    problem: str


class OfferChoice:
    """What is known of the places. `now`: any clock's seconds."""

    def __init__(self, cost: Callable[[Offer], float] = attrgetter("price_micro_usd_per_hour")) -> None:
        """`cost`: what offers are ranked by."""
        self._cost = cost
        self._paused: dict[Place, _Pause] = {}

    def cheapest(self, offers: Iterable[Offer], now: float) -> Offer:
        """Return the cheapest open offer.

        Raises `NoCapacity` with `retry_after_s` where there is none: nothing is offered, or all is paused.
        """
        listed = list(offers)
        for offer in sorted(listed, key=self._cost):
            if self._open_at(offer) <= now:
                return offer
        if not listed:
            refusal = NoCapacity("no offer is open", "wait, or add an entry to rollout.spot.any_of")
            refusal.retry_after_s = NOTHING_PAUSE_S
            raise refusal
        first = min(listed, key=self._open_at)
        pause = max((self._pauses(first)), key=lambda each: each.until)
        refusal = NoCapacity(
            f"no offer is left to try: {first.zone}: {pause.problem}",
            "wait, or add an entry to rollout.spot.any_of",
        )
        wait_s = self._open_at(first) - now
        refusal.retry_after_s = min(wait_s, LONGEST_PAUSE_S) if math.isfinite(wait_s) else LONGEST_PAUSE_S
        raise refusal

    def failed(self, offer: Offer, error: RLBoostError | OSError, now: float) -> None:
        """Leave the place alone, or its whole cloud, according to what it said."""
        is_of_cloud = isinstance(error, Throttled | CredentialsRejected)
        place: Place = (offer.provider,) if is_of_cloud else offer.place
        before = self._paused.get(place)
        seconds = _pause_s(error, None if before is None else before.seconds)
        self._paused[place] = _Pause(now + seconds, seconds, problem_of(error))

    def came(self, offer: Offer) -> None:
        """Forget what was held against the place of a machine that came."""
        self._paused.pop(offer.place, None)
        self._paused.pop((offer.provider,), None)

    def _open_at(self, offer: Offer) -> float:
        return max((pause.until for pause in self._pauses(offer)), default=-math.inf)

    def _pauses(self, offer: Offer) -> list[_Pause]:
        return [self._paused[key] for key in ((offer.provider,), offer.place) if key in self._paused]


def problem_of(error: RLBoostError | OSError) -> str:
    """Return what is wrong, in words."""
    return error.problem if isinstance(error, RLBoostError) else repr(error)


def _pause_s(error: RLBoostError | OSError, before_s: float | None) -> float:
    if isinstance(error, ConfigError):
        return math.inf
    told = getattr(error, "retry_after_s", None)
    if told is not None:
        return float(told)
    match error:
        case QuotaExceeded():
            return QUOTA_PAUSE_S
        case CredentialsRejected():
            return CREDENTIALS_PAUSE_S
        case NoCapacity():
            return FIRST_PAUSE_S if before_s is None else min(2 * before_s, LONGEST_PAUSE_S)
        case _:
            return ERROR_PAUSE_S
