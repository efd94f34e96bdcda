from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import pytest

from rlboost_runtime.sim.engine_model import EngineModel, EngineSpeed, Sequence, engine_speed
from rlboost_runtime.sim.presets import (
    H100,
    PAPER_CALIBRATION,
    QWEN3_8B,
    QWEN3_14B,
    QWEN3_32B,
    RESERVED_8_H100,
    SPOT_2_H100,
    Assumptions,
)

SPEED = EngineSpeed(
    weights_s=0.010,
    sequence_s=0.002,
    kv_token_s=1e-5,
    fixed_s=0.001,
    prefill_token_s=1e-4,
    prefill_square_s=1e-8,
    kv_tokens=2_000,
    headroom_tokens=50,
    max_running=1_024,
)


def sequence(key: int, prompt: int, goal: int, tokens: int = 0) -> Sequence:
    return Sequence(key, response=key, prompt=prompt, tokens=tokens, goal=goal)


def run(engine: EngineModel, until: float) -> list[tuple[float, int]]:
    """Look at the engine at each of its changes; return when each response was done."""
    engine.advance(0.0)
    done = []
    while True:
        change = engine.next_change()
        now = until if change is None else min(change, until)
        done += [(round(now, 6), s.response) for s in engine.advance(now)]
        if change is None or now >= until:
            return done


@dataclass
class Naive:
    """The same rules, decode step by decode step and token by token."""

    speed: EngineSpeed
    time: float = 0.0

    def finish_times(self, jobs: list[tuple[int, int, int]]) -> dict[int, float]:
        """Jobs are (key, prompt, goal), all queued at time 0 in that order."""
        speed = self.speed
        waiting = [[key, prompt, 0, goal] for key, prompt, goal in jobs]
        running: list[list[int]] = []
        done: dict[int, float] = {}
        while waiting or running:
            while waiting:  # a prefill follows another before the next decode step
                _, prompt, tokens, _ = waiting[0]
                used = sum(p + t for _, p, t, _ in running)
                need = used + prompt + tokens + speed.headroom_tokens * (len(running) + 1)
                if running and need > speed.kv_tokens:
                    break
                running.append(waiting.pop(0))
                self.time += speed.prefill_s(prompt + tokens)
            contexts = sum(p + t for _, p, t, _ in running)
            if len(running) > 1 and contexts + len(running) > speed.kv_tokens:
                waiting.insert(0, running.pop())
                continue
            self.time += speed.base_s(len(running)) + speed.kv_token_s * contexts
            for job in running:
                job[2] += 1
            for job in [j for j in running if j[2] == j[3]]:
                running.remove(job)
                done[job[0]] = self.time
        return done


@pytest.mark.parametrize("seed", range(12))
def test_events_give_what_decoding_token_by_token_gives(seed: int) -> None:
    random = Random(seed)
    jobs = [(key, random.randint(1, 60), random.randint(1, 300)) for key in range(random.randint(1, 40))]
    engine = EngineModel(SPEED)
    for job in jobs:
        engine.submit(sequence(*job))
    found = {response: at for at, response in run(engine, 1e6)}
    expected = Naive(SPEED).finish_times(jobs)
    assert found == pytest.approx(expected, abs=1e-5)
    assert engine.kv_used == engine.num_running == 0


def test_looking_often_changes_nothing() -> None:
    jobs = [(key, 10 + key, 40 + 7 * key) for key in range(8)]
    seldom, often = EngineModel(SPEED), EngineModel(SPEED)
    for job in jobs:
        seldom.submit(sequence(*job))
        often.submit(sequence(*job))
    expected = {r: at for at, r in run(seldom, 1e6)}
    found: dict[int, float] = {}
    now = 0.0
    while len(found) < len(jobs):
        now += 0.0137
        found.update({s.response: now for s in often.advance(now)})
    assert all(expected[r] <= found[r] + 1e-6 <= expected[r] + 0.0137 + 2e-6 for r in expected)
    assert often.generated == seldom.generated == sum(goal for _, _, goal in jobs)


def test_one_response_by_hand() -> None:
    engine = EngineModel(SPEED)
    engine.submit(sequence(1, prompt=100, goal=3))
    prefill = 100 * 1e-4 + 100**2 * 1e-8
    decode = 3 * 0.011 + 1e-5 * (100 + 101 + 102)
    engine.advance(0.0)
    assert engine.next_change() == pytest.approx(prefill + decode)


def test_a_large_batch_is_bound_by_its_matrix_products() -> None:
    assert SPEED.base_s(1) == pytest.approx(0.011)
    assert SPEED.base_s(10) == pytest.approx(0.021)


DRAFTING = replace(SPEED, draft_tokens=4, accepted_length=1.7)


def test_drafts_make_a_small_batch_as_much_faster_as_they_are_accepted() -> None:
    def decoding_s(speed: EngineSpeed) -> float:
        engine = EngineModel(speed)
        engine.submit(sequence(1, prompt=100, goal=300))
        return run(engine, 1e6)[0][0] - speed.prefill_s(100)

    assert decoding_s(DRAFTING) == pytest.approx(decoding_s(SPEED) / 1.7, abs=1e-5)


def test_drafts_are_off_where_a_batch_is_bound_by_its_matrix_products() -> None:
    assert DRAFTING.pace(10, 500) == SPEED.pace(10, 500) == (SPEED.base_s(10), SPEED.kv_token_s)
    jobs = [(key, 10, 40) for key in range(10)]  # all end at once
    found = []
    for speed in (SPEED, DRAFTING):
        engine = EngineModel(speed)
        for job in jobs:
            engine.submit(sequence(*job))
        found.append(run(engine, 1e6))
    assert found[0] == found[1]


def test_long_contexts_make_drafts_pay_in_a_larger_batch() -> None:
    assert DRAFTING.pace(10, 500) == SPEED.pace(10, 500)
    assert DRAFTING.pace(10, 50_000) != SPEED.pace(10, 50_000)
    assert DRAFTING.work_rate == pytest.approx(1.7 * SPEED.work_rate)


def test_an_aborted_response_keeps_its_tokens_and_pays_a_prefill_elsewhere() -> None:
    one, other = EngineModel(SPEED), EngineModel(SPEED)
    one.submit(sequence(1, prompt=10, goal=1_000))
    one.advance(2.0)
    tokens = one.abort(1)
    assert 0 < tokens < 1_000
    assert (one.kv_used, one.num_running, one.sequences) == (0, 0, {})
    other.submit(sequence(2, prompt=10, goal=1_000, tokens=tokens))
    other.advance(0.0)
    assert other.repeated_prefill_s == pytest.approx(SPEED.prefill_s(10 + tokens))
    with pytest.raises(KeyError):
        one.abort(1)


def test_a_full_cache_sends_the_youngest_back_and_an_empty_engine_takes_anything() -> None:
    tight = replace(SPEED, kv_tokens=300, headroom_tokens=0)
    engine = EngineModel(tight)
    for key in range(2):
        engine.submit(sequence(key, prompt=100, goal=80))
    engine.advance(0.0)
    assert engine.num_running == 2
    times = {response: at for at, response in run(engine, 1e6)}
    assert times[0] < times[1], "the older one went on"
    assert engine.repeated_prefill_s > 0
    huge = EngineModel(tight)
    huge.submit(sequence(9, prompt=5_000, goal=2))
    assert [r for _, r in run(huge, 1e6)] == [9]


def test_work_rate_is_never_exceeded() -> None:
    speed = replace(SPEED, headroom_tokens=0, prefill_token_s=0.0, prefill_square_s=0.0)
    engine = EngineModel(speed)
    jobs = [(key, 50, 200) for key in range(50)]
    for job in jobs:
        engine.submit(sequence(*job))
    done = run(engine, 1e6)
    work = sum(goal * prompt + goal * (goal - 1) / 2 for _, prompt, goal in jobs)
    assert work / done[-1][0] <= speed.work_rate * (1 + 1e-9)
    assert work / done[-1][0] > 0.3 * speed.work_rate


def test_published_shapes_give_the_known_capacities() -> None:
    kv = {
        model.name: engine_speed(model, RESERVED_8_H100, 0.6, PAPER_CALIBRATION, Assumptions()).kv_tokens
        for model in (QWEN3_8B, QWEN3_14B, QWEN3_32B)
    }
    # (0.6 x 2 x 80 GB - weights) / (4 bytes x layers x 8 heads x 128)
    assert kv == {"Qwen3-8B": 539_957, "Qwen3-14B": 405_639, "Qwen3-32B": 116_271}
    assert H100.flops == 989e12


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="raise tensor_parallel"):
        engine_speed(QWEN3_32B, SPOT_2_H100, 0.3, PAPER_CALIBRATION, Assumptions())
