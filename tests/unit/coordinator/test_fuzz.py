"""A short round of `make soak-fuzz`, and what it has found."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks.fuzz.files import Files
from benchmarks.fuzz.messages import Agent, Fuzz, turn
from benchmarks.fuzz.targets import STOP_TOKEN, Targets, store
from rlboost_runtime.coordinator.driver import ingest
from rlboost_runtime.coordinator.storage.columns import JournalRecord
from rlboost_runtime.coordinator.storage.journal import decode_event
from rlboost_runtime.core.base.messages import LossCause
from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.protocol import messages as wire


async def test_mutated_messages_and_files_break_nothing(tmp_path: Path) -> None:
    fuzz = Fuzz(tmp_path / "run", seed=1)
    await fuzz.run(300)
    assert fuzz.counts["messages"] == 300
    assert fuzz.counts["connections_ended"] > 50
    files = Files(fuzz.made.driver.run, tmp_path / "files", seed=1)
    files.run(60)
    assert files.counts["ignored"] == 20
    assert files.counts["records_refused"] > 300


@pytest.mark.parametrize(
    "message",
    [
        wire.encode(wire.Goodbye("XX")).replace(b"XX", b"\xff\xfe"),
        wire.encode(wire.Frame(0, 0, b"", b"", b"", b"", b"")) + b" " * wire.MAX_AGENT_MESSAGE_BYTES,
        b"",
    ],
    ids=["text that is no UTF-8", "too long", "empty"],
)
async def test_what_is_no_message_ends_the_life_of_its_sender(tmp_path: Path, message: bytes) -> None:
    made = Fuzz(tmp_path / "run", seed=0).made
    made.driver.journal.start(asyncio.get_running_loop())
    await made.begin(8, 10)
    agent = Agent(made, "spot-0")
    assert await agent.join()
    agent.say(message)
    for _ in range(5):
        await turn()
    assert agent.task.done()
    assert agent.task.exception() is None
    assert made.driver.core.counters.losses == {LossCause.HUNG: 1}, "it may not come back in the same life"
    assert made.driver.core.step.num_running == 0
    await made.driver.journal.close()


async def test_a_machine_registers_no_more_instances_than_it_can_have(tmp_path: Path) -> None:
    made = Fuzz(tmp_path / "run", seed=0).made
    made.driver.journal.start(asyncio.get_running_loop())
    await made.begin(8, 10)
    for name in ("spot-0/64", "spot-0/0/0", "spot-0/x", "spot-0/"):
        agent = Agent(made, "spot-0")
        agent.instance = name
        assert not await agent.join()
        assert wire.agent_command_decoder.decode(agent.pipe.sent[0]) == wire.Refused(
            f"this token is not for instance {name} of spot-0"
        )
    await made.driver.journal.close()


async def test_a_sender_that_does_not_wait_is_left_unread(
    tmp_path: Path,
) -> None:
    fuzz = Fuzz(tmp_path / "run", seed=0)
    made = fuzz.made
    made.driver.journal.start(asyncio.get_running_loop())
    await made.begin(8, 10)
    agent = Agent(made, "spot-0")
    assert await agent.join()
    made.agents.ingest._due_at = asyncio.get_running_loop().time() + 600.0
    for _ in range(2_000):
        agent.say(wire.encode(agent.frame(lambda _: 0)))
    for _ in range(2_000):
        await asyncio.sleep(0)
    assert agent.pipe.inbox.qsize() >= 2_000 - ingest.MAX_QUEUED - 1
    assert not agent.task.done()
    agent.task.cancel()
    await turn()
    await made.driver.journal.close()


@pytest.mark.parametrize("name", ["wire", "records", "segment", "events"])
def test_what_the_guided_fuzzer_begins_with_is_read_whole(tmp_path: Path, name: str) -> None:
    targets = Targets(tmp_path)
    seeds = targets.seeds(name)
    assert seeds
    for data in seeds:
        targets.all[name](data)
    if name == "records":
        for record in seeds:
            store().restore(record)


def record(*, openings: tuple[tuple[int, int, str], ...], endings: tuple[tuple[int, str], ...]) -> bytes:
    """Return a record of two tokens of response 0."""
    tokens, logprobs = np.array([1, STOP_TOKEN], "<i4").tobytes(), np.array([-1.0, -1.0], "<f4").tobytes()
    columns = (np.array([0], "<u4").tobytes(), np.array([0], "<u4").tobytes(), np.array([2], "<u2").tobytes())
    return msgspec.msgpack.encode(JournalRecord(0, 0, *columns, tokens, logprobs, openings, endings))


@pytest.mark.parametrize(
    ("openings", "endings", "words"),
    [
        (((0, 0, "spot-0/0"),), ((0, "suop"),), "ends a response with the reason 'suop'"),
        (((0, 0, "spot-0/0"),), ((0, "quarantined"),), "ends a response with the reason 'quarantined'"),
        (((0, 58, "spot-0/0"),), (), "a segment of response 0 begins at 58, where no token is"),
        (
            ((1, 0, "spot-0/0"), (0, 0, "spot-0/0")),
            (),
            "a segment of response 1 begins at 0, where no token is",
        ),
        ((), (), "no instance is named for the tokens of response 0"),
    ],
)
def test_a_record_that_contradicts_itself_changes_nothing(
    openings: tuple[tuple[int, int, str], ...], endings: tuple[tuple[int, str], ...], words: str
) -> None:
    held = store()
    with pytest.raises(ProtocolError, match=words):
        held.restore(record(openings=openings, endings=endings))
    assert held.length(0) == 0
    held.check()
    held.restore(record(openings=((0, 0, "spot-0/0"),), endings=((0, "stop"),)))
    assert held.length(0) == 2


@pytest.mark.parametrize(
    "line",
    [b'{"event":{"":"Finished"}}', b'{"event":["Tick"]}', b"[" * 100_000, b'{"event":' + b"[" * 100_000],
    ids=["an object", "a list", "nested too deeply", "nested in an event"],
)
def test_a_line_that_is_no_event_is_said_to_be_none(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"not an event|nested too deeply"):
        decode_event(line)
