"""A short round of `make soak-fuzz`, and what it has found."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.fuzz.files import Files
from benchmarks.fuzz.messages import Agent, Fuzz, turn
from rlboost_runtime.coordinator.driver import ingest
from rlboost_runtime.core.base.messages import LossCause
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
