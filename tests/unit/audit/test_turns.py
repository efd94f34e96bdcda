"""The audit of episodes: what was trained is what was sampled, token by token."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from rlboost_runtime.audit.turns import SampledTurns
from rlboost_runtime.coordinator.driver.requests import request_record, tokens_record
from rlboost_runtime.coordinator.storage.journal import Journal
from rlboost_runtime.coordinator.storage.request_tokens import RequestRecord
from rlboost_runtime.inference.episodes import EpisodeRecord, RecordedSample
from rlboost_runtime.protocol.messages import GenerateMessage, Sampling
from rlboost_runtime.seams import SystemDisk
from rlboost_runtime.trainer.episodes.outcome import EpisodeResult

PROMPT, FIRST, TOLD, SECOND = [1, 2, 3], [10, 11], [20, 21], [12, 13, 14]
EPISODE, VERSION = 5, 2


def i32(ids: list[int]) -> bytes:
    return np.array(ids, "<i4").tobytes()


def f32(ids: list[int]) -> bytes:
    """Logprobs of made-up tokens: each has its own."""
    return (-np.array(ids, "<f4") / 7).tobytes()


def sample(
    *, told: list[int] = TOLD, second: list[int] = SECOND, logprobs: bytes | None = None
) -> RecordedSample:
    """Two turns with what the environment wrote between them."""
    flags = bytes([1] * len(FIRST) + [0] * len(told) + [1] * len(second))
    own = f32(FIRST) + bytes(4 * len(told)) + f32(second)
    return RecordedSample(i32(PROMPT), i32([*FIRST, *told, *second]), logprobs or own, flags)


def episode(*samples: RecordedSample) -> EpisodeResult:
    return EpisodeResult(EpisodeRecord(samples, 2, (VERSION,), "", False, "", ""), 1.0)


async def turns(
    folder: Path, *asked: tuple[list[int], list[int]], version: int = VERSION, number: int = EPISODE
) -> SampledTurns:
    """Write a journal of requests as the coordinator does, each a prompt and what was sampled; read it."""
    journal = Journal(folder / "requests", SystemDisk(), lambda problem: None)
    journal.start(asyncio.get_running_loop())
    journal.open_step(1, fresh=True)
    for at, (prompt, sampled) in enumerate(asked):
        response = 2**31 + at
        request = GenerateMessage(f"r{at}", i32(prompt), 9, Sampling(), episode=number)
        journal.append(request_record(response, request))
        cut = len(sampled) // 2  # it moved to another machine
        journal.append(
            tokens_record(
                [
                    RequestRecord(response, 0, "a", version, i32(sampled[:cut]), f32(sampled[:cut])),
                    RequestRecord(
                        response, cut, "b", version, i32(sampled[cut:]), f32(sampled[cut:]), "stop"
                    ),
                ]
            )
        )
    await journal.close()
    return SampledTurns.read(folder / "requests")


BOTH = (PROMPT, FIRST), ([*PROMPT, *FIRST, *TOLD], SECOND)


async def test_an_episode_trained_as_it_was_sampled_is_found_whole(tmp_path: Path) -> None:
    found = await turns(tmp_path, *BOTH)
    made, problems = found.of_episode([EPISODE], episode(sample()), VERSION)
    assert problems == found.problems == []
    assert [list(turn.ids) for turn in made] == [FIRST, SECOND]
    assert found.num_trained == 2
    found.check_lengths(Counter({2**31: 2, 2**31 + 1: 3}))
    assert found.problems == []


async def test_turns_that_follow_each_other_without_a_word_between_them(tmp_path: Path) -> None:
    found = await turns(tmp_path, (PROMPT, FIRST), ([*PROMPT, *FIRST], SECOND))
    made, problems = found.of_episode([EPISODE], episode(sample(told=[])), VERSION)
    assert problems == []
    assert len(made) == 2


async def test_a_response_that_was_cut_at_a_stop_string_is_trained_up_to_it(tmp_path: Path) -> None:
    found = await turns(tmp_path, (PROMPT, FIRST), ([*PROMPT, *FIRST, *TOLD], [*SECOND, 15]))
    assert found.of_episode([EPISODE], episode(sample()), VERSION)[1] == []


async def test_a_step_that_was_opened_again_has_turns_under_its_former_numbers(tmp_path: Path) -> None:
    found = await turns(tmp_path, *BOTH)
    assert found.of_episode([EPISODE + 40], episode(sample()), VERSION)[1] != []
    assert found.of_episode([EPISODE + 40, EPISODE], episode(sample()), VERSION)[1] == []


LOGPROBS = f32(FIRST) + bytes(8) + f32([12, 13, 15])


@pytest.mark.parametrize(
    ("trained", "at"),
    [
        (sample(second=[12, 13, 15]), 4),
        (sample(logprobs=LOGPROBS), 4),
        (sample(told=[20, 22]), 4),
        (sample(second=[*SECOND, 15]), 7),
    ],
    ids=["another token", "another logprob", "after something else", "a token too many"],
)
async def test_what_was_never_sampled_so_is_named(tmp_path: Path, trained: RecordedSample, at: int) -> None:
    found = await turns(tmp_path, *BOTH)
    _, problems = found.of_episode([EPISODE], episode(trained), VERSION)
    assert problems == [f"token {at} of sample 0 was trained, but never sampled there"]


async def test_a_turn_is_trained_once(tmp_path: Path) -> None:
    found = await turns(tmp_path, *BOTH)
    _, problems = found.of_episode([EPISODE], episode(sample(), sample()), VERSION)
    assert problems == ["token 0 of sample 1 was trained, but never sampled there"]


async def test_two_answers_to_one_prompt_are_two_turns(tmp_path: Path) -> None:
    found = await turns(tmp_path, (PROMPT, FIRST), (PROMPT, FIRST[:1]))
    short = RecordedSample(i32(PROMPT), i32(FIRST[:1]), f32(FIRST[:1]), b"\1")
    whole = RecordedSample(i32(PROMPT), i32(FIRST), f32(FIRST), b"\1\1")
    assert found.of_episode([EPISODE], episode(whole, short), VERSION)[1] == []


async def test_a_turn_of_another_version_is_named(tmp_path: Path) -> None:
    found = await turns(tmp_path, *BOTH)
    _, problems = found.of_episode([EPISODE], episode(sample()), VERSION + 1)
    assert problems[0] == "token 0 of sample 0 is of a turn with versions [2]"


async def test_lengths_that_differ_from_the_event_logs_and_requests_that_are_gone_are_named(
    tmp_path: Path,
) -> None:
    found = await turns(tmp_path, *BOTH)
    found.check_lengths(Counter({2**31: 3, 2**31 + 7: 1}))
    assert found.problems == [
        f"request {2**31}: 3 tokens said, 2 in the journal",
        f"request {2**31 + 7} finished, but the journal has nothing of it",
    ]


async def test_a_damaged_segment_is_named(tmp_path: Path) -> None:
    await turns(tmp_path, *BOTH)
    segment = tmp_path / "requests" / "step-000001.seg"
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    found = SampledTurns.read(tmp_path / "requests")
    assert segment.name in found.problems[0]
