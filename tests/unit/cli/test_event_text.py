from __future__ import annotations

from rlboost_cli.views.events import merged
from rlboost_runtime.protocol.status import RecentEvent


def event(text: str, at: float = 0.0, kind: str = "joined") -> RecentEvent:
    return RecentEvent(at, kind, text)


def texts(*events: RecentEvent) -> list[str]:
    return [e.text for e in merged(events)]


def test_alike_neighbours_are_one_line() -> None:
    assert texts(event("spot-0 joined"), event("spot-1 joined"), event("spot-2 joined")) == [
        "spot-0, spot-1 and spot-2 joined"
    ]
    served = [event(f"spot-{n} serves policy version 3", kind="ready") for n in range(2)]
    assert texts(*served) == ["spot-0 and spot-1 serve policy version 3"]
    many = [event(f"spot-{n} joined") for n in range(7)]
    assert texts(*many) == ["spot-0, spot-1, spot-2, spot-3 and 3 more joined"]


def test_what_differs_stays_apart() -> None:
    assert len(texts(event("spot-0 joined"), event("spot-1 joined", at=100.0))) == 2
    assert len(texts(event("spot-0 joined"), event("spot-1 joined", kind="other"))) == 2
    assert len(texts(event("spot-0 joined"), event("spot-1 serves policy version 0"))) == 2
    assert len(texts(event("step 1 trained", kind="step"), event("step 2 trained", kind="step"))) == 2
    assert texts(event("the coordinator was started again")) == ["the coordinator was started again"]


def test_a_name_is_told_once() -> None:
    assert texts(event("spot-0 joined"), event("spot-0 joined", at=1.0)) == ["spot-0 joined"]
