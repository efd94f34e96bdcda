"""`rlboost audit` on what a coordinator wrote: clean, cut short, tampered with, and with nothing kept."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from rlboost_cli.main import app
from rlboost_runtime.coordinator.storage.journal import EventLog, EventReader
from rlboost_runtime.core.base.messages import EventsLost, StepStarted, VersionPublished
from rlboost_runtime.protocol.messages import (
    AbortMessage,
    AssignmentEnd,
    AssignMessage,
    DeliverGroupMessage,
    InstanceReadyMessage,
    LoadVersionMessage,
    SleepMessage,
    SleptMessage,
    StepTrainedMessage,
    VersionFetchedMessage,
    VersionPublishedMessage,
    WakeMessage,
)
from rlboost_runtime.run.folder import RunFolder, write_json
from rlboost_runtime.seams import SystemDisk
from tests.integration.coordinator.test_coordinator_shell import begin_step, frame, join, request, shell

pytestmark = pytest.mark.integration


def audit(*arguments: str, code: int = 0) -> Result:
    done = CliRunner().invoke(app, ["audit", "job", *arguments])
    assert done.exit_code == code, done.output
    return done


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path))
    run = RunFolder.named("job")
    run.path.mkdir(parents=True)
    write_json(run.job_json, {"name": "job", "evidence": {"keep_journal": True}})
    write_json(run.outcome, {"state": "done"})
    return run


async def train_one_step(run: RunFolder, *, is_whole: bool = True) -> tuple[int, int]:
    async with shell(run.path) as made:
        trainer = made.trainers()
        agent = await join(made, trainer)
        a, b = await begin_step(agent, trainer)
        ends = [AssignmentEnd(a, "stop"), *([AssignmentEnd(b, "stop")] if is_whole else [])]
        await agent.say(frame(0, [(a, 0, [4, 9]), (b, 0, [9] if is_whole else [5])], *ends))
        if is_whole:
            await agent.hear(SleepMessage)
            await agent.say(SleptMessage())
            await trainer.say(StepTrainedMessage(0, 0.0, 0.1, 3, 0.5, {}))
        await asyncio.sleep(0.1)
    return a, b


def test_a_clean_run(run: RunFolder) -> None:
    asyncio.run(train_one_step(run))
    found = json.loads(audit("--json").stdout)
    assert found["clean"]
    assert found["problems"] == []
    assert found["responses"] == {"requested": 2, "finished": 2, "cancelled": 0, "unfinished": 0}
    assert found["tokens"] == {"accepted": 3, "generated": None, "lost": None}
    assert found["steps"] == [{"step": 0, "policy_version": 0, "responses": 2, "tokens": 3, "migrated": 0}]
    said = audit().stdout
    assert "2 requested, 2 finished" in said
    assert "clean: every response ended once" in said


def test_tokens_that_the_engines_counted_are_compared(run: RunFolder) -> None:
    a, b = asyncio.run(train_one_step(run))
    counts = run.logs / "machines" / "m" / "engine-0.tokens"
    counts.parent.mkdir(parents=True)
    counts.write_text(f"{a} 5 0\n{b} 1 0\n")
    assert json.loads(audit("--json").stdout)["tokens"] == {"accepted": 3, "generated": 6, "lost": 3}
    counts.write_text(f"{a} 1 0\n{b} 1 0\n")
    assert "2 accepted, only 1 generated" in audit(code=1).stdout


def test_a_run_that_was_ended_within_a_step_is_clean_unless_it_claims_to_be_done(run: RunFolder) -> None:
    asyncio.run(train_one_step(run, is_whole=False))
    found = json.loads(audit("--json", code=1).stdout)
    assert not found["clean"]
    assert found["problems"][0] == "2 responses requested, 1 finished, 0 cancelled"
    write_json(run.outcome, {"state": "stopped"})
    assert json.loads(audit("--json").stdout)["responses"]["unfinished"] == 1


def test_an_event_that_was_dropped_from_the_log_is_found(run: RunFolder) -> None:
    asyncio.run(train_one_step(run))
    lines = run.events.read_bytes().splitlines(keepends=True)
    at = max(number for number, line in enumerate(lines) if b"Finished" in line)
    run.events.write_bytes(b"".join(lines[:at]))
    assert "never finished" in audit(code=1).stdout


async def train_under_two_versions(run: RunFolder) -> None:
    """Publish version 1 within a step with in-flight updates: one response has tokens of both."""
    async with shell(run.path) as made:
        trainer = made.trainers()
        agent = await join(made, trainer)
        await trainer.say(msgspec.structs.replace(request(), in_flight_updates=True))
        await agent.hear(WakeMessage)
        await agent.say(InstanceReadyMessage(0))
        a, b = [item.assignment for item in (await agent.hear(AssignMessage)).items]
        await agent.say(frame(0, [(a, 0, [4, 9]), (b, 0, [5])], AssignmentEnd(a, "stop")))
        await trainer.say(VersionPublishedMessage(1, "digest 1", 1, 0.0))
        while (await agent.hear(LoadVersionMessage)).version != 1:
            pass
        await agent.say(VersionFetchedMessage(1))
        await agent.hear(AbortMessage)
        await agent.say(frame(1, [], AssignmentEnd(b, "aborted")))
        await agent.say(InstanceReadyMessage(1))
        (rest,) = (await agent.hear(AssignMessage)).items
        end = AssignmentEnd(rest.assignment, "stop")
        await agent.say(frame(2, [(rest.assignment, 1, [9])], end, version=1))
        await trainer.hear(DeliverGroupMessage)
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("in_log_until", [VersionPublished, StepStarted])
def test_a_power_cut_that_took_the_end_of_the_log_is_no_problem(run: RunFolder, in_log_until: type) -> None:
    asyncio.run(train_under_two_versions(run))
    assert json.loads(audit("--json").stdout)["problems"] == []
    events = list(EventReader(run.events))
    if in_log_until is VersionPublished:  # of version 1: the cut took it and all behind it
        kept = max(number for number, event in enumerate(events) if isinstance(event, VersionPublished))
    else:
        kept = next(number for number, event in enumerate(events) if isinstance(event, StepStarted))
    run.events.unlink()
    log = EventLog(run.events, SystemDisk())
    for event in events[: kept + 1 if in_log_until is StepStarted else kept]:
        log.append(event)
    assert audit(code=1).exit_code == 1  # nothing says that events are missing
    log.append(EventsLost(events[-1].at, 100, 100, 100))
    assert json.loads(audit("--json").stdout)["problems"] == []


def test_it_needs_the_journal_and_says_which_field_keeps_it(run: RunFolder) -> None:
    write_json(run.job_json, {"name": "job", "evidence": {"keep_journal": False}})
    said = audit(code=2).stderr
    assert "evidence.keep_journal was not set" in said
    assert "keep_journal: true" in said


def test_it_needs_the_end_of_the_run(run: RunFolder) -> None:
    run.outcome.unlink()
    assert "job is still running" in audit(code=2).stderr
