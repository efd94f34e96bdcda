"""The agent against a scripted coordinator in memory, with an emulated engine and a puller process."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rlboost_runtime.agent import engine_host, notice, service, weight_children
from rlboost_runtime.agent.bootstrap import Bootstrap, write_bootstrap
from rlboost_runtime.agent.service import Agent, ExitCode, Seams
from rlboost_runtime.agent.weight_children import Puller
from rlboost_runtime.engines.base import EngineDied, EngineSettings, LoadFailed
from rlboost_runtime.engines.emulated import MAX_UNREAD_STEPS, EmulatedEngine, emulated_response
from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.protocol.messages import (
    AbortMessage,
    Ack,
    AgentHello,
    AssignMessage,
    Frame,
    Goodbye,
    HeartbeatMessage,
    InstanceReadyMessage,
    LoadVersionMessage,
    NoticeReceivedMessage,
    Refused,
    Sampling,
    SleepMessage,
    SleptMessage,
    Stop,
    VersionRefusedMessage,
    WakeMessage,
    Welcome,
    WorkItem,
    agent_message_decoder,
    encode,
)
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.run.security import create_secrets
from rlboost_runtime.seams import SystemClock
from rlboost_runtime.weights.child_pipe import PullRequest
from rlboost_runtime.weights.manifest import MANIFEST, Manifest, Probe, content_digest, encode_manifest

pytestmark = pytest.mark.integration
WAIT_S = 10.0
PROBE_PROMPT = (1, 2, 3)

PULLER = """
import json, sys, time
request = json.loads(sys.stdin.readline())
version = request["version"]
assert request["token"] == "secret" and request["url"] == "https://weights", request
if version == 66:
    print(json.dumps({"type": "PullProgress", "done_bytes": 1, "total_bytes": 2}), flush=True)
    time.sleep(60)
if version == 77:
    print(json.dumps({"type": "ChildFailure", "problem": "no such version"}), flush=True)
    sys.exit(1)
print(json.dumps({"type": "PullProgress", "done_bytes": 5, "total_bytes": 10}), flush=True)
folder = request["folder"] + "/v%06d" % version
report = {"type": "PullReport", "version": version, "folder": folder, "pulled_bytes": 10, "pull_s": 0.01}
print(json.dumps(report), flush=True)
"""


class Wire:
    """One connection in memory. `up` and `down` carry bytes; `reset` breaks both directions."""

    def __init__(self) -> None:
        self.up: asyncio.Queue[bytes] = asyncio.Queue()
        self.down: asyncio.Queue[bytes] = asyncio.Queue()
        self.broken = asyncio.Event()

    async def send(self, message: bytes) -> None:
        if self.broken.is_set():
            raise ConnectionError("reset")
        self.up.put_nowait(message)

    async def receive(self) -> bytes:
        getting, breaking = asyncio.ensure_future(self.down.get()), asyncio.ensure_future(self.broken.wait())
        try:
            await asyncio.wait({getting, breaking}, return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                return getting.result()
            raise ConnectionError("reset")
        finally:
            getting.cancel()
            breaking.cancel()

    async def close(self) -> None:
        self.broken.set()

    def reset(self) -> None:
        self.broken.set()


class Coordinator:
    """What a test says and hears on the coordinator's side. Frames are kept in `frames`, beats in `beats`."""

    def __init__(self) -> None:
        self.dialled: asyncio.Queue[Wire] = asyncio.Queue()
        self.wire: Wire | None = None
        self.frames: list[Frame] = []
        self.beats: list[HeartbeatMessage] = []
        self.acks = True

    async def dial(self) -> Wire:
        wire = Wire()
        self.dialled.put_nowait(wire)
        return wire

    async def hello(self) -> AgentHello:
        async with asyncio.timeout(WAIT_S):
            self.wire = await self.dialled.get()
            message = agent_message_decoder.decode(await self.wire.up.get())
        assert isinstance(message, AgentHello)
        return message

    def say(self, message) -> None:
        assert self.wire is not None
        self.wire.down.put_nowait(encode(message))

    async def welcome(self, epoch: int = 1, resumed: bool = False) -> AgentHello:
        hello = await self.hello()
        self.say(Welcome(epoch, resumed, 6.0, 0.05, 0.01, "https://weights"))
        return hello

    async def hear(self, kind):
        """Return the next message of `kind`; acknowledge frames on the way."""
        async with asyncio.timeout(WAIT_S):
            while True:
                message = agent_message_decoder.decode(await self.wire.up.get())
                if isinstance(message, Frame):
                    self.frames.append(message)
                    if self.acks:
                        self.say(Ack(message.seq))
                if isinstance(message, HeartbeatMessage):
                    self.beats.append(message)
                if isinstance(message, kind):
                    return message

    async def hear_endings(self, num: int) -> None:
        while len(self.endings()) < num:
            await self.hear(Frame)

    def endings(self) -> dict[int, str]:
        return {end.assignment: end.reason for frame in self.frames for end in frame.endings}

    def tokens(self, assignment: int, start: int = 0) -> list[int]:
        """Tokens of an assignment over all frames, each frame number once, offsets checked."""
        got: list[int] = []
        for frame in {frame.seq: frame for frame in self.frames}.values():
            at = 0
            rows = zip(
                np.frombuffer(frame.assignments, "<u4"),
                np.frombuffer(frame.offsets, "<u4"),
                np.frombuffer(frame.counts, "<u2"),
                strict=True,
            )
            for number, offset, count in rows:
                if number == assignment:
                    assert offset == start + len(got)
                    got += np.frombuffer(frame.token_ids, "<i4")[at : at + count].tolist()
                at += count
        return got

    async def serve_version(self, version: int) -> InstanceReadyMessage:
        self.say(LoadVersionMessage(version))
        return await self.hear(InstanceReadyMessage)


def item(assignment: int, version: int = 0, kept: int = 0, num: int = 20) -> WorkItem:
    prompt = [assignment, 5, 6]
    ids = prompt + emulated_response(prompt, kept, Sampling())[0]
    return WorkItem(assignment, struct.pack(f"<{len(ids)}i", *ids), kept, num - kept, version)


def expected(assignment: int, num: int = 20) -> list[int]:
    return emulated_response([assignment, 5, 6], num, Sampling())[0]


def write_version(folder: Path, version: int, *, wrong: bool = False) -> None:
    ids, logprobs = emulated_response(list(PROBE_PROMPT), 4, Sampling())
    if wrong:
        logprobs = [x - 1 for x in logprobs]
    probe = Probe(PROBE_PROMPT, tuple(ids), tuple(logprobs), 0.01)
    manifest = Manifest((1, 0), version, "full", None, (), (), (), probe, content_digest(()), 0.0)
    path = folder / "weights" / f"v{version:06d}"
    path.mkdir(parents=True)
    (path / MANIFEST).write_bytes(encode_manifest(manifest))


class FaultyEngine(EmulatedEngine):
    """An emulated engine that hangs, dies or fails a request when a test says so."""

    def __init__(self, spec) -> None:
        super().__init__(spec)
        self._dead = self._hung = False
        self._doomed: dict[int, str] = {}

    def hang(self) -> None:
        """Make no progress and send nothing, like a stuck kernel."""
        self._hung = True

    def die(self) -> None:
        """End like a killed process: what was queued for the reader is read, everything else is lost."""
        self._dead = self._stopped = True
        self._version = None
        self._running.clear()
        self._waiting.clear()
        self._news.set()

    def fail_request(self, request_id: int, problem: str) -> None:
        """End this request as failed at its next token."""
        self._doomed[request_id] = problem

    def submit(self, requests) -> None:
        if not self._dead:
            super().submit(requests)

    async def abort(self, request_ids) -> None:
        self._check_alive()
        await super().abort(request_ids)

    async def load(self, version, folder) -> None:
        self._check_alive()
        await super().load(version, folder)

    async def greedy(self, token_ids, max_new_tokens):
        self._check_alive()
        return await super().greedy(token_ids, max_new_tokens)

    async def sleep(self) -> None:
        self._check_alive()
        await super().sleep()

    async def wake(self) -> None:
        self._check_alive()
        await super().wake()

    async def outputs(self):
        async for output in super().outputs():
            yield output
        self._check_alive()

    def _can_step(self) -> bool:
        return super()._can_step() and not self._hung

    def _advance(self, running, output) -> None:
        request_id = running.request.request_id
        if request_id in self._doomed:
            output.end(request_id, "failed", self._doomed[request_id])
        else:
            super()._advance(running, output)

    def _check_alive(self) -> None:
        if self._dead:
            raise EngineDied("the engine died on request", "this is a test")


class Rig:
    """An agent at work."""

    def __init__(self, tmp_path: Path, rate: float | None = None) -> None:
        self.folder = tmp_path
        self.coordinator = Coordinator()
        self.engines: list[FaultyEngine] = []
        self.terminated = asyncio.Event()
        for version in (0, 1):
            write_version(tmp_path, version)
        write_version(tmp_path, 9, wrong=True)
        script = tmp_path / "puller.py"
        script.write_text(PULLER)
        template = PullRequest("", -1, str(tmp_path / "weights"), "secret", "PEM", 2)
        seams = Seams(
            self.coordinator.dial,
            self._make,
            Puller(template, tmp_path / "puller.log", (sys.executable, "-S", str(script))),
            SystemClock(),
        )
        engine = EngineSettings("emulated", Sampling(), 1024, 4, "float32", 0, tokens_per_s_per_response=rate)
        bootstrap = Bootstrap("run", "m1", "spot", ("m1-0",), "https://head", "secret", "PEM", engine)
        self.agent = Agent(bootstrap, "m1-0", tmp_path, seams)

    def _make(self, spec) -> FaultyEngine:
        self.engines.append(FaultyEngine(spec))
        return self.engines[-1]


@asynccontextmanager
async def running(tmp_path: Path, rate: float | None = None):
    rig = Rig(tmp_path, rate)
    task = asyncio.create_task(rig.agent.run(rig.terminated))
    rig.exit = task
    try:
        yield rig, rig.coordinator
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def eventually(condition) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - the engine under test has no event for it
            await asyncio.sleep(0.005)


async def exit_code(rig) -> ExitCode:
    async with asyncio.timeout(WAIT_S):
        return await rig.exit


async def test_it_pulls_proves_serves_and_sends_every_token_once(tmp_path):
    async with running(tmp_path) as (_, head):
        hello = await head.welcome()
        assert (hello.instance, hello.machine, hello.max_running, hello.kv_tokens) == ("m1-0", "m1", 4, 4096)
        assert (hello.epoch, hello.assignments) == (None, ())
        ready = await head.serve_version(0)
        assert (ready.version, ready.pulled_bytes) == (0, 10)
        head.say(AssignMessage(tuple(item(a) for a in range(6))))
        await head.hear_endings(6)
        assert head.endings() == dict.fromkeys(range(6), "length")
        assert all(head.tokens(a) == expected(a) for a in range(6))
        while not (head.beats and head.beats[-1].engine_progress > 0 and head.beats[-1].running == 0):
            await head.hear(HeartbeatMessage)


async def test_the_first_token_of_a_request_waits_for_no_flush(tmp_path):
    """Nor does the first frame after a pause; tokens of a step gather."""
    async with running(tmp_path, rate=20.0) as (_, head):
        await head.hello()
        head.say(Welcome(1, False, 6.0, 0.05, 1.0, "https://weights"))
        await head.serve_version(0)
        await asyncio.sleep(1.0)
        began = time.monotonic()
        head.say(AssignMessage((item(0),)))
        while not head.tokens(0):
            await head.hear(Frame)
        assert time.monotonic() - began < 0.5
        head.say(AssignMessage((msgspec.structs.replace(item(1), sampling=Sampling()),)))
        while not head.tokens(1):
            await head.hear(Frame)
        assert time.monotonic() - began < 0.9, "the next flush is a second after the last"
        frames = len(head.frames)
        await head.hear(Frame)
        assert time.monotonic() - began >= 0.9
        assert len(head.frames) == frames + 1


async def test_a_reset_connection_resumes_and_resends_what_was_not_acknowledged(tmp_path):
    async with running(tmp_path, rate=100) as (_, head):
        await head.welcome()
        await head.serve_version(0)
        head.acks = False
        head.say(AssignMessage((item(1), item(2, kept=5))))
        first = await head.hear(Frame)
        await head.hear(Frame)
        head.say(Ack(first.seq))
        await eventually(lambda: head.wire.down.empty())
        head.wire.reset()
        hello = await head.welcome(resumed=True)
        assert (hello.epoch, set(hello.assignments)) == (1, {1, 2})
        assert (await head.hear(Frame)).seq == first.seq + 1
        head.acks = True
        await head.hear_endings(2)
        assert head.tokens(1) == expected(1)
        assert head.tokens(2, start=5) == expected(2)[5:]
        assert [f.seq for f in head.frames] == sorted(
            [*range(first.seq + 2), *range(first.seq + 1, len(head.frames) - 1)]
        )


async def test_generation_goes_on_while_disconnected(tmp_path):
    async with running(tmp_path, rate=500) as (rig, head):
        await head.welcome()
        await head.serve_version(0)
        head.say(AssignMessage((item(1),)))
        await head.hear(Frame)
        head.wire.reset()
        await head.hello()
        await eventually(lambda: rig.engines[0].progress().tokens_generated == 20)
        head.wire.reset()
        await head.welcome(resumed=True)
        await head.hear_endings(1)
        assert head.tokens(1) == expected(1)


async def test_a_void_registration_drops_everything_and_proves_anew(tmp_path):
    async with running(tmp_path, rate=50) as (rig, head):
        await head.welcome()
        await head.serve_version(0)
        head.acks = False
        head.say(AssignMessage((item(1, num=500), item(2, num=500))))
        await head.hear(Frame)
        head.wire.reset()
        head.frames.clear()
        hello = await head.welcome(epoch=2, resumed=False)
        assert set(hello.assignments) == {1, 2}
        await head.serve_version(0)
        assert rig.engines[0].progress().running == 0
        assert head.frames == []  # nothing of the former life
        head.acks = True
        head.say(AssignMessage((item(3),)))
        await head.hear_endings(1)
        assert head.tokens(3) == expected(3)
        assert head.frames[0].seq > 0  # numbering goes on


async def test_work_of_a_version_that_is_not_served_is_handed_back(tmp_path):
    async with running(tmp_path) as (_, head):
        await head.welcome()
        head.say(AssignMessage((item(1),)))
        await head.serve_version(0)
        head.say(AssignMessage((item(2, version=1),)))
        await head.hear_endings(2)
        assert head.endings() == {1: "engine_failed", 2: "engine_failed"}


async def test_an_abort_hands_over_the_last_tokens(tmp_path):
    async with running(tmp_path, rate=200) as (rig, head):
        await head.welcome()
        await head.serve_version(0)
        head.say(AssignMessage((item(1, num=500), item(2, num=500))))
        await head.hear(Frame)
        head.say(AbortMessage((1, 99)))
        await head.hear_endings(1)
        assert head.endings() == {1: "aborted"}
        got = head.tokens(1)
        assert got == expected(1, 500)[: len(got)]
        await head.hear(Frame)
        assert rig.engines[0].progress().running == 1  # the other one goes on
        assert len(head.tokens(1)) == len(got)


async def test_a_probe_that_does_not_match_is_not_served(tmp_path):
    async with running(tmp_path) as (_, head):
        await head.welcome()
        await head.serve_version(0)
        head.say(LoadVersionMessage(9))
        failed = await head.hear(VersionRefusedMessage)
        assert failed.version == 9
        assert "probe" in failed.problem
        head.say(AssignMessage((item(1, version=9), item(2, version=0))))
        await head.hear_endings(2)
        assert set(head.endings().values()) == {"engine_failed"}
        assert (await head.serve_version(1)).version == 1


async def test_a_load_waits_for_work_and_the_newest_wins(tmp_path):
    async with running(tmp_path, rate=200) as (rig, head):
        await head.welcome()
        await head.serve_version(0)
        head.say(AssignMessage((item(1, num=60),)))
        head.say(LoadVersionMessage(66))  # its puller hangs
        head.say(LoadVersionMessage(1))
        ready = await head.hear(InstanceReadyMessage)
        assert ready.version == 1
        assert head.endings() == {1: "length"}  # served to its end first
        assert head.frames[-1].policy_version == 0
        assert rig.engines[0].version == 1


async def test_a_repeated_load_is_answered_without_a_pause(tmp_path):
    async with running(tmp_path, rate=100) as (_, head):
        await head.welcome()
        await head.serve_version(0)
        head.say(AssignMessage((item(1, num=100),)))
        await head.hear(Frame)
        await head.serve_version(0)
        assert head.endings() == {}


async def test_a_pull_that_fails_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_children, "FIRST_PAUSE_S", 0.001)
    async with running(tmp_path) as (_, head):
        await head.welcome()
        head.say(LoadVersionMessage(77))
        failed = await head.hear(VersionRefusedMessage)
        assert "no such version" in failed.problem
        assert (await head.serve_version(0)).version == 0


async def test_a_pull_without_progress_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_children, "PROGRESS_TIMEOUT_S", 0.3)
    monkeypatch.setattr(weight_children, "ATTEMPTS", 1)
    async with running(tmp_path) as (_, head):
        await head.welcome()
        head.say(LoadVersionMessage(66))
        assert "no progress" in (await head.hear(VersionRefusedMessage)).problem


async def test_sleep_and_wake(tmp_path):
    async with running(tmp_path, rate=200) as (rig, head):
        await head.welcome()
        await head.serve_version(0)
        head.say(AssignMessage((item(1),)))
        head.say(SleepMessage())
        await head.hear(SleptMessage)
        assert head.endings() == {1: "length"}  # not before it was empty
        assert rig.engines[0].version is None
        head.say(LoadVersionMessage(1))
        await asyncio.sleep(0.2)
        assert rig.engines[0].version is None  # pulled, not applied
        head.wire.reset()
        await head.welcome(resumed=True)
        await head.hear(SleptMessage)  # it may have been missed
        head.say(WakeMessage())
        assert (await head.hear(InstanceReadyMessage)).version == 1


async def test_a_woken_engine_takes_its_memory_while_the_version_is_fetched(tmp_path):
    async with running(tmp_path) as (rig, head):
        await head.welcome()
        await head.serve_version(0)
        head.say(SleepMessage())
        await head.hear(SleptMessage)
        head.say(LoadVersionMessage(66))  # its pull hangs
        head.say(WakeMessage())
        await eventually(lambda: not rig.engines[0]._asleep)
        assert rig.engines[0].version is None, "it serves nothing before it has the version"


async def test_a_dead_engine_hands_back_its_work_and_proves_itself_anew(tmp_path):
    async with running(tmp_path, rate=100) as (rig, head):
        await head.welcome()
        await head.serve_version(0)
        head.say(AssignMessage((item(1, num=500), item(2, num=500))))
        await head.hear(Frame)
        rig.engines[0].die()
        assert (await head.hear(VersionRefusedMessage)).version == 0
        await head.hear_endings(2)
        assert head.endings() == {1: "engine_failed", 2: "engine_failed"}
        assert head.tokens(1) == expected(1, 500)[: len(head.tokens(1))] != []
        assert (await head.hear(InstanceReadyMessage)).version == 0
        head.say(AssignMessage((item(3),)))
        await head.hear_endings(3)
        assert head.tokens(3) == expected(3)
        assert len(rig.engines) == 2
        assert rig.engines[0]._spec.seed != rig.engines[1]._spec.seed


async def test_an_engine_that_dies_asleep_stays_down_until_it_is_woken(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_host, "FIRST_PAUSE_S", 0.001)
    async with running(tmp_path) as (rig, head):
        await head.welcome()
        await head.serve_version(0)
        head.say(SleepMessage())
        await head.hear(SleptMessage)
        rig.engines[0].die()
        await asyncio.sleep(0.1)
        head.say(SleepMessage())
        await head.hear(SleptMessage)
        head.wire.reset()
        await head.welcome(resumed=True)
        await head.hear(SleptMessage)
        head.say(LoadVersionMessage(1))
        await asyncio.sleep(0.2)
        assert len(rig.engines) == 1
        head.say(WakeMessage())
        assert (await head.hear(InstanceReadyMessage)).version == 1
        assert len(rig.engines) == 2


async def test_an_engine_that_died_asleep_is_not_started_by_a_new_registration_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_host, "FIRST_PAUSE_S", 0.001)
    async with running(tmp_path) as (rig, head):
        await head.welcome()
        await head.serve_version(0)
        head.say(SleepMessage())
        await head.hear(SleptMessage)
        rig.engines[0].die()
        head.wire.reset()
        await head.welcome(epoch=2)
        head.say(SleepMessage())
        head.say(LoadVersionMessage(0))
        await head.hear(SleptMessage)
        await asyncio.sleep(0.2)
        assert len(rig.engines) == 1
        head.wire.reset()
        await head.welcome(epoch=3)
        head.say(LoadVersionMessage(0))
        assert (await head.hear(InstanceReadyMessage)).version == 0


async def test_an_engine_that_dies_on_its_way_to_sleep_frees_its_memory_by_that(tmp_path):
    async with running(tmp_path, rate=100) as (rig, head):
        await head.welcome()
        await head.serve_version(0)
        head.say(AssignMessage((item(1, num=500),)))
        await head.hear(Frame)
        head.say(SleepMessage())
        rig.engines[0].die()
        await head.hear(SleptMessage)
        assert head.endings() == {1: "engine_failed"}
        await asyncio.sleep(0.3)
        assert len(rig.engines) == 1


async def test_an_engine_told_to_sleep_while_it_starts_answers_and_loads_nothing(tmp_path, monkeypatch):
    may_start = asyncio.Event()
    start = EmulatedEngine.start

    async def slowly(self, timeout_s) -> None:
        await may_start.wait()
        await start(self, timeout_s)

    monkeypatch.setattr(EmulatedEngine, "start", slowly)
    async with running(tmp_path) as (rig, head):
        await head.welcome()
        head.say(SleepMessage())
        head.say(LoadVersionMessage(0))
        await head.hear(SleptMessage)
        may_start.set()
        await asyncio.sleep(0.2)
        assert rig.engines[0].version is None
        assert rig.engines[0]._asleep
        head.say(WakeMessage())
        assert (await head.hear(InstanceReadyMessage)).version == 0
        assert len(rig.engines) == 1


@pytest.mark.parametrize("fault", [LoadFailed, RuntimeFault])
async def test_an_engine_that_cannot_wake_refuses_the_version_and_the_agent_goes_on(
    tmp_path, monkeypatch, fault
):
    async with running(tmp_path) as (rig, head):
        await head.welcome()
        await head.serve_version(0)
        head.say(SleepMessage())
        await head.hear(SleptMessage)

        async def no_memory() -> None:
            raise fault("no memory is left", "wait")

        monkeypatch.setattr(rig.engines[0], "wake", no_memory)
        head.say(WakeMessage())
        refused = await head.hear(VersionRefusedMessage)
        assert (refused.version, refused.problem) == (0, "no memory is left")
        monkeypatch.undo()
        head.say(LoadVersionMessage(0))
        assert (await head.hear(InstanceReadyMessage)).version == 0


async def test_an_engine_that_cannot_sleep_is_stopped_which_frees_its_memory(tmp_path, monkeypatch):
    async with running(tmp_path) as (rig, head):
        await head.welcome()
        await head.serve_version(0)

        async def sleepless() -> None:
            raise LoadFailed("it holds on to it", "stop it")

        monkeypatch.setattr(rig.engines[0], "sleep", sleepless)
        head.say(SleepMessage())
        await head.hear(SleptMessage)
        assert rig.engines[0]._stopped
        head.say(WakeMessage())
        assert (await head.hear(InstanceReadyMessage)).version == 0
        assert len(rig.engines) == 2


async def test_any_fault_of_a_pull_is_said(tmp_path, monkeypatch):
    async with running(tmp_path) as (rig, head):
        await head.welcome()

        async def broken(version: int) -> None:
            raise RuntimeFault(f"version {version} is odd", "see its log")

        monkeypatch.setattr(rig.agent._host, "_pull", broken)
        head.say(LoadVersionMessage(0))
        assert (await head.hear(VersionRefusedMessage)).problem == "version 0 is odd"


async def test_an_engine_that_keeps_dying_ends_the_agent(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_host, "FIRST_PAUSE_S", 0.001)
    async with running(tmp_path) as (rig, head):
        await head.welcome()
        for number in range(5):
            await eventually(lambda number=number: len(rig.engines) > number)
            rig.engines[number].die()
        assert await exit_code(rig) == ExitCode.FAILED


async def test_one_failing_response_says_nothing_about_the_others(tmp_path):
    async with running(tmp_path, rate=200) as (rig, head):
        await head.welcome()
        await head.serve_version(0)
        rig.engines[0].fail_request(1, "poison")
        head.say(AssignMessage((item(1), item(2))))
        await head.hear_endings(2)
        assert head.endings() == {1: "response_failed", 2: "length"}


async def test_a_hung_engine_shows_in_the_heartbeat(tmp_path):
    async with running(tmp_path, rate=200) as (rig, head):
        await head.welcome()
        await head.serve_version(0)
        head.say(AssignMessage((item(1, num=500),)))
        await head.hear(Frame)
        moving = [(await head.hear(HeartbeatMessage)).engine_progress for _ in range(3)]
        rig.engines[0].hang()
        await head.hear(HeartbeatMessage)
        stuck = [(await head.hear(HeartbeatMessage)) for _ in range(3)]
        assert moving[-1] > moving[0]
        assert len({beat.engine_progress for beat in stuck}) == 1
        assert stuck[-1].running == 1


@pytest.mark.parametrize("source", ["file", "SIGTERM"])
async def test_a_notice_drains_and_says_goodbye(tmp_path, monkeypatch, source):
    monkeypatch.setattr(service, "QUIET_BEFORE_GOODBYE_S", 0.1)
    async with running(tmp_path, rate=100) as (rig, head):
        await head.welcome()
        await head.serve_version(0)
        head.say(AssignMessage((item(1, num=500),)))
        await head.hear(Frame)
        if source == "file":
            (tmp_path / notice.NOTICE_FILE).write_text(json.dumps({"seconds": 20}))
        else:
            rig.terminated.set()
        said = await head.hear(NoticeReceivedMessage)
        assert said.seconds == (20 if source == "file" else notice.TERM_SECONDS)
        head.say(AbortMessage((1,)))
        goodbye = await head.hear(Goodbye)
        assert goodbye.reason == "noticed"
        assert head.endings() == {1: "aborted"}
        assert await exit_code(rig) == ExitCode.DONE


async def test_a_notice_that_runs_out_ends_with_what_there_is(tmp_path):
    async with running(tmp_path, rate=100) as (rig, head):
        await head.welcome()
        await head.serve_version(0)
        head.say(AssignMessage((item(1, num=5000 // 10),)))
        await head.hear(Frame)
        (tmp_path / notice.NOTICE_FILE).write_text(json.dumps({"seconds": 1.3}))
        await head.hear(Goodbye)
        assert head.endings() == {}
        assert await exit_code(rig) == ExitCode.DONE


async def test_it_is_held_when_nobody_acknowledges(tmp_path):
    async with running(tmp_path, rate=1000) as (rig, head):
        rig.agent._outbox._max_tokens = 40
        await head.welcome()
        await head.serve_version(0)
        head.acks = False
        head.say(AssignMessage((item(1, num=900),)))
        await eventually(lambda: len(rig.engines[0]._outputs) > MAX_UNREAD_STEPS)
        generated = rig.engines[0].progress().tokens_generated
        await asyncio.sleep(0.1)
        assert generated == rig.engines[0].progress().tokens_generated < 900
        head.acks = True
        head.say(Ack(rig.agent._outbox._next_seq))
        await head.hear_endings(1)
        assert head.tokens(1) == expected(1, 900)


async def test_stop_ends_it_and_its_engine(tmp_path):
    async with running(tmp_path) as (rig, head):
        await head.welcome()
        await head.serve_version(0)
        head.say(Stop("run is over"))
        assert await exit_code(rig) == ExitCode.DONE
        assert rig.engines[0]._loop_task.done()


async def test_a_refusal_for_good_ends_it_and_one_for_now_does_not(tmp_path):
    async with running(tmp_path) as (rig, head):
        await head.hello()
        head.say(Refused("wait", retry=True))
        await head.hello()
        head.say(Refused("not yours"))
        assert await exit_code(rig) == ExitCode.REFUSED


async def test_silence_makes_it_dial_anew_and_at_last_end(tmp_path, monkeypatch):
    monkeypatch.setattr(service, "QUIET_S", 0.2)
    monkeypatch.setattr(service, "SELF_DESTRUCT_S", 1.5)
    async with running(tmp_path) as (rig, head):
        await head.welcome()
        again = await head.welcome(resumed=True)  # nothing was said for a while
        assert again.epoch == 1
        assert await exit_code(rig) == ExitCode.FAILED  # and then nobody answered any more


async def test_a_coordinator_that_answers_beats_is_not_dialled_anew(tmp_path, monkeypatch):
    assert 10 * service.DEFAULT_BEAT_S <= service.QUIET_S <= 15  # some answers may be late
    monkeypatch.setattr(service, "QUIET_S", 0.4)
    monkeypatch.setattr(service, "DEFAULT_BEAT_S", 0.05)
    async with running(tmp_path) as (_rig, head):
        await head.welcome()
        began = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() - began < 1.2:
            await head.hear(HeartbeatMessage)
            head.say(Ack(-1))
        assert head.dialled.empty()
        assert (await head.welcome(resumed=True)).epoch == 1  # the answers ended


@pytest.fixture
def bootstrap_file(tmp_path):
    run = RunFolder(tmp_path / "run")
    create_secrets(run)
    engine = EngineSettings("emulated", Sampling(), 1024, 4, "float32", 0)
    certificate = run.certificate.read_text()
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"https://127.0.0.1:{unused.getsockname()[1]}"
    path = tmp_path / "bootstrap.json"
    write_bootstrap(path, Bootstrap("run", "m1", "spot", ("m1-0",), url, "secret", certificate, engine))
    return path


def test_the_process_keeps_dialling_and_ends_on_sigterm(bootstrap_file):
    command = [sys.executable, "-m", "rlboost_runtime.agent", str(bootstrap_file), "m1-0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as agent:
        try:
            lost = 0
            while lost < 2:
                lost += json.loads(agent.stderr.readline())["event"] == "coordinator.lost"
            agent.terminate()
            rest = agent.stderr.read()
            assert agent.wait(WAIT_S) == 0
        finally:
            agent.kill()
    assert "agent.noticed" in rest
    assert "secret" not in rest


def test_the_agent_imports_no_torch():
    code = (
        "import sys, rlboost_runtime.agent.__main__, rlboost_runtime.protocol.transport\n"
        "import rlboost_runtime.engines.transformers.engine\n"
        "print([m for m in sys.modules if m in ('torch', 'transformers')])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert out.stdout.strip() == "[]"
