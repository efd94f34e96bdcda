"""The live rank of offers takes what its core has measured; a simulated world sends the core its events."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlboost_providers.base.provider import Offer
from rlboost_providers.registry import cheapest_offer
from rlboost_runtime.coordinator.fleet.offer_choice import OfferChoice
from rlboost_runtime.coordinator.fleet.offer_rank import OfferRank
from rlboost_runtime.core.base.token_cost import MachineKind
from rlboost_runtime.core.core import Core
from rlboost_runtime.job import CloudOffer, Job, ReasoningGym, Rollout, Spot
from rlboost_runtime.job.run import Weights
from rlboost_runtime.sim.engine_model import engine_speed
from rlboost_runtime.sim.policies import Switches, policy_setup
from rlboost_runtime.sim.presets import presets
from rlboost_runtime.sim.world import World
from rlboost_runtime.traces import Trace, TraceEvent

NAMED = (("aws/us-east-2", "H100:8", 14.0), ("gcp/us-central1", "H100:2", 7.0))


def job(peers: bool = False) -> Job:
    return Job(
        name="j",
        model="Qwen/Qwen3-8B",
        data=ReasoningGym(reasoning_gym=["spell_backward"]),
        rollout=Rollout(
            engine="vllm",
            tensor_parallel=2,
            spot=Spot(
                any_of=[
                    CloudOffer(infra=infra, accelerators=gpus, max_price_usd_per_hour=usd)
                    for infra, gpus, usd in NAMED
                ]
            ),
        ),
        weights=Weights(peers=peers),
    )


def offer(accelerator: str, usd: float, egress_usd: float = 0.0, zone: str = "zone-a") -> Offer:
    return Offer(
        "aws", zone, accelerator, round(usd * 1e6), True, "test",
        egress_micro_usd_per_gb=round(egress_usd * 1e6),
    )  # fmt: skip


@pytest.fixture(scope="module")
def lived() -> World:
    """Four machines, of which one is taken, that have trained a few steps of a small workload."""
    paper = presets()["paper-8b"]
    small = replace(paper, workload=replace(paper.workload, prompts=24, max_response_tokens=2_000))
    known = replace(paper.assumptions, length_median=800.0, wire_share=0.005)
    events = [TraceEvent(0.0, f"n{k}", "add") for k in range(4)] + [TraceEvent(150.0, "n3", "remove")]
    preset = replace(small, assumptions=known)
    trace = Trace("t", "test", tuple(events), 3_600.0)
    world = World(preset, trace, policy_setup("rlboost", preset, Switches()), seed=0)
    world.run(3_600.0, max_steps=8)
    return world


def ranked(core: Core, offers: list[Offer], made: Job | None = None) -> list[str]:
    rank = OfferRank(job() if made is None else made, lambda: core, lambda machine: f"aws/{machine}")
    return [each.accelerator for each in sorted(offers, key=rank.usd_per_token)]


def test_a_core_measures_engines_places_steps_and_versions(lived: World) -> None:
    seen, preset = lived.core.measured(), lived._preset
    speed = engine_speed(preset.model, preset.spot[0], 0.6, preset.calibration, preset.assumptions)
    rate, bandwidth = seen.engine_tokens_per_s["H100"]
    lengths = lived.core._work.lengths
    step_s = speed.base_s(speed.max_running) + speed.kv_token_s * speed.max_running * lengths.mean_context
    assert rate == pytest.approx(speed.max_running / step_s, rel=0.15), "as its roofline, full"
    assert bandwidth == preset.kind_of(preset.spot[0]).engine_bandwidth
    place = seen.places["offer 0"]
    assert place.preemptions == 1
    assert 600.0 < place.machine_s < 4 * lived.agenda.now, "three stayed, one lived for 150 s"
    assert place.boots == 4
    assert 60.0 < seen.boot_s("offer 0") < 70.0, "60 s, and the version"
    rows = lived.recorder.rows
    assert min(r.seconds for r in rows) < (seen.step_s or 0.0) < max(r.seconds for r in rows) * 1.1
    assert seen.version_bytes == pytest.approx(0.005 * preset.model.weight_bytes, rel=1e-6)


def test_the_live_choice_follows_what_the_core_has_measured(lived: World) -> None:
    h100, a100 = offer("H100:2", 7.0), offer("A100:2", 4.0)
    assert ranked(Core(), [a100, h100]) == ["H100:2", "A100:2"], "by bandwidth: 7 / 6.7, 4 / 3.1"
    assert ranked(lived.core, [a100, h100]) == ["H100:2", "A100:2"]
    lived.core._rates["A100"] = lived.core.measured().engine_tokens_per_s["H100"]
    try:
        assert ranked(lived.core, [a100, h100]) == ["A100:2", "H100:2"], "as fast, and cheaper"
        rank = OfferRank(job(), lambda: lived.core, lambda machine: "")
        assert OfferChoice(rank.usd_per_token).cheapest([h100, a100], 0.0) is a100
    finally:
        del lived.core._rates["A100"]


def test_the_live_choice_counts_the_versions_as_they_are_sent(lived: World) -> None:
    near, far = offer("H100:2", 7.0, 0.01), offer("H100:8", 14.0, 0.9, "far")
    assert ranked(Core(), [near, far]) == ["H100:2", "H100:8"], "whole versions of the job's model"
    assert ranked(lived.core, [near, far]) == ["H100:8", "H100:2"], "one in 200 bytes was sent"


def test_a_machine_beside_a_peer_brings_no_egress(lived: World) -> None:
    machine = next(m for m in lived.core.machines.values() if m.counts and m.has_joined)
    near, far = offer("H100:2", 7.0), offer("H100:8", 27.0, 9.0, machine.machine)
    assert ranked(lived.core, [near, far], job(peers=False)) == ["H100:2", "H100:8"]
    assert ranked(lived.core, [near, far], job(peers=True)) == ["H100:8", "H100:2"]


def test_engines_of_a_machine_are_those_of_the_job() -> None:
    rank = OfferRank(job(), Core, lambda machine: "")
    assert rank.kind_of(offer("H100:8", 1.0)) == MachineKind("H100", 4, 2 * 3.35e12, "aws/zone-a")


def test_a_plan_is_for_the_offer_whose_tokens_cost_least() -> None:
    assert cheapest_offer(job()).accelerators == "H100:8"
