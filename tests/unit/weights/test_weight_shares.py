"""Who goes first at a head that several receivers pull from, by a clock that the test turns."""

from __future__ import annotations

from dataclasses import dataclass

from rlboost_runtime.weights.serve.connections import SLOW_S, STREAMS, FairShare, Sending


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def can_send(shares: FairShare, answers: list[Sending]) -> int:
    return sum(shares._may_send(answer) for answer in answers)


def turn(shares: FairShare, clock: Clock, taken: dict[str, tuple[Sending, int]]) -> None:
    """Receivers take so much, and a second and a bit passes."""
    for answer, num in taken.values():
        shares.wait(answer, num)
    clock.now += 1.1
    shares.wait(next(iter(taken.values()))[0])


def test_a_newcomer_that_cannot_use_its_turn_loses_it_for_a_while() -> None:
    clock = Clock()
    shares = FairShare(_now=clock)
    old = [shares.begin("old", None) for _ in range(4)]
    slow = shares.begin("slow", 100)
    shares.wait(slow)
    assert can_send(shares, old) == 1
    for _ in range(2):
        turn(shares, clock, {"old": (old[0], 100_000_000), "slow": (slow, 64_000)})
    assert can_send(shares, old) == 4
    assert can_send(shares, [slow]) == 1
    clock.now += SLOW_S
    turn(shares, clock, {"old": (old[0], 0), "slow": (slow, 0)})
    assert can_send(shares, old) == 1


def test_a_newcomer_that_uses_its_turn_keeps_it() -> None:
    clock = Clock()
    shares = FairShare(_now=clock)
    old = [shares.begin("old", None) for _ in range(4)]
    new = [shares.begin("new", 100) for _ in range(STREAMS)]
    shares.wait(new[0])
    for _ in range(5):
        turn(shares, clock, {"old": (old[0], 50_000_000), "new": (new[0], 400_000_000)})
        assert can_send(shares, old) == 1
        assert can_send(shares, new) == STREAMS


def test_of_two_newcomers_the_slow_one_does_not_hold_up_the_other() -> None:
    clock = Clock()
    shares = FairShare(_now=clock)
    slow, quick = shares.begin("slow", 1), [shares.begin("quick", 1000) for _ in range(4)]
    shares.wait(slow)
    assert can_send(shares, quick) == 1
    for _ in range(2):
        turn(shares, clock, {"quick": (quick[0], 90_000_000), "slow": (slow, 1_000)})
    assert can_send(shares, quick) == 4
    assert can_send(shares, [slow]) == 1
