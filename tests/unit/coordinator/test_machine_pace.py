"""Offers of unlike GPUs are taken by dollars per token, as measured or as memory bandwidth promises."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from rlboost_providers.base.provider import Offer
from rlboost_providers.registry import cheapest_offer
from rlboost_runtime.coordinator.fleet.machine_pace import MachinePace
from rlboost_runtime.coordinator.fleet.offer_choice import OfferChoice
from rlboost_runtime.core.base.messages import Pool
from rlboost_runtime.core.state.rates import Kind, StepTimes
from rlboost_runtime.job import CloudOffer, Job, ReasoningGym, Rollout, Spot, TinyModel


def offer(accelerator: str, usd: float, storage_usd: float = 0.0) -> Offer:
    return Offer(
        "aws", accelerator, accelerator, round(usd * 1e6), True, "test",
        storage_micro_usd_per_hour=round(storage_usd * 1e6),
    )  # fmt: skip


@dataclass
class Engine:
    machine: str
    kind: Kind
    pool: Pool = Pool.SPOT


@dataclass
class Shown:
    """What a core knows of its engines."""

    instances: dict[str, Engine] = field(default_factory=dict)
    rates: dict[Kind, float] = field(default_factory=dict)

    def full_tokens_per_s(self, kind: Kind) -> float | None:
        return self.rates.get(kind)


def choose(shown: Shown, offers: list[Offer], bought: dict[str, Offer]) -> str:
    pace = MachinePace(lambda: shown, bought.get)  # type: ignore[arg-type, return-value]
    return OfferChoice(pace.usd_per_token).cheapest(offers, 0.0).accelerator


H100, A100, L4 = offer("H100:8", 20.0), offer("A100:8", 12.0), offer("L4:1", 1.0)


def test_a_machine_that_is_dearer_and_faster_is_taken_before_anything_is_measured() -> None:
    assert choose(Shown(), [A100, H100, L4], {}) == "H100:8", "20 / 26.8 is less than 12 / 12.4 and 1 / 0.3"
    assert choose(Shown(), [offer("A100:8", 9.0), H100], {}) == "A100:8"
    assert choose(Shown(), [offer("A100:4", 5.9), offer("A100:8", 12.0)], {}) == "A100:4"
    assert choose(Shown(), [offer("A100:8", 9.0, storage_usd=1.0), offer("A100:8", 9.5)], {}) == "A100:8"


def test_a_device_of_unknown_bandwidth_counts_as_the_slowest() -> None:
    assert choose(Shown(), [offer("X900:8", 2.0), H100], {}) == "H100:8"
    assert choose(Shown(), [offer("X900:8", 1.0), H100], {}) == "X900:8"
    assert choose(Shown(), [offer("cpu", 1.0), offer("cpu", 0.5)], {}) == "cpu"


def test_what_engines_have_shown_counts_instead_of_bandwidth() -> None:
    slow, fast = (1000, 16), (5000, 64)
    shown = Shown(
        {"a/0": Engine("a", slow), "b/0": Engine("b", fast), "b/1": Engine("b", fast)},
        {slow: 2000.0, fast: 1100.0},
    )
    bought = {"a": H100, "b": A100}
    assert choose(shown, [A100, H100], bought) == "A100:8", "12 for 2 x 1,100, 20 for 2,000"
    shown.rates[slow] = 4000.0
    assert choose(shown, [A100, H100], bought) == "H100:8"


def test_one_measurement_scales_what_was_never_rented() -> None:
    kind = (1000, 16)
    shown = Shown({"a/0": Engine("a", kind)}, {kind: 100.0})
    assert choose(shown, [A100, H100], {"a": A100}) == "H100:8", "as the bandwidths say"


def test_engines_of_the_reserved_node_show_nothing_of_spot_machines() -> None:
    kind = (1000, 16)
    shown = Shown({"r/0": Engine("a", kind, Pool.RESERVED)}, {kind: 1e9})
    assert choose(shown, [A100, H100], {"a": A100}) == "H100:8"


def test_a_full_engine_decodes_as_its_line_says() -> None:
    times, kind = StepTimes(), (10_000, 64)
    for load in (1000, 2000, 4000, 8000):
        times.learn(kind, load, 0.01 + 1e-6 * load)
    assert times.full_tokens_per_s((1, 1), 500.0) is None
    assert times.full_tokens_per_s(kind, 500.0) == pytest.approx(20 / (0.01 + 1e-6 * 10_000)), "20 fit"
    assert times.full_tokens_per_s(kind, 50.0) == pytest.approx(64 / (0.01 + 1e-6 * 3_200)), "64 slots"


def test_a_plan_is_for_the_offer_whose_tokens_cost_least() -> None:
    offers = [
        CloudOffer(infra="aws/us-east-2", accelerators=gpus, max_price_usd_per_hour=usd)
        for gpus, usd in (("L4:1", 5.0), ("X900:1", 9.0), ("H100:8", 98.0))
    ]
    job = Job(
        name="j",
        model=TinyModel(init="tiny"),
        data=ReasoningGym(reasoning_gym=["spell_backward"]),
        rollout=Rollout(spot=Spot(any_of=offers)),
    )
    assert cheapest_offer(job).accelerators == "H100:8"
