"""A coordinator, an honest agent, and one that was taken over and sends mutated messages.

What holds after each round: the honest agent keeps its connection, its assignments and exactly the tokens
that it sent, and the core's and the store's invariants hold; no message raises anything that the coordinator
does not expect. Connections are in memory; everything behind them is the coordinator's own
(`benchmarks.ingest.server`), with journal and event log on disk.
"""

from __future__ import annotations

import asyncio
import faulthandler
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import psutil

from benchmarks.fuzz.mutations import mutated, respelled
from benchmarks.ingest.server import BenchedCoordinator
from rlboost_runtime.core.base.messages import RLBOOST, MachineGone
from rlboost_runtime.protocol import messages as wire
from rlboost_runtime.run.folder import RunFolder

ROUND = 500
"""Messages between two checks of everything."""
BEAT_EVERY = 50
"""Messages between two heartbeats of the honest agent: a fraction of a second."""
HANG_S = 20.0
"""`BEAT_EVERY` messages that take so long end the process with a traceback."""
MAX_TOKENS, SLOTS, RESPONSES = 200, 8, 24_000


class Pipe:
    """A connection in memory, as the coordinator sees it."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.sent: deque[bytes] = deque(maxlen=1_000)

    async def send(self, message: bytes) -> None:
        """Keep what the coordinator says."""
        self.sent.append(message)

    async def receive(self) -> bytes:
        """Return what the agent says."""
        message = await self.inbox.get()
        if message is None:
            raise ConnectionError("closed")
        return message

    async def close(self) -> None:
        """Nothing to close."""


class Agent:
    """One agent of a machine."""

    def __init__(self, made: BenchedCoordinator, machine: str) -> None:
        self.machine = machine
        self.instance = f"{machine}/0"
        self.tokens: dict[int, list[int]] = {}
        """By response, what it sent."""
        self.response_of: dict[int, int] = {}
        """By assignment that it holds."""
        self.seq = self.progress = 0
        self._made = made
        self.pipe = Pipe()
        self.task = asyncio.create_task(made.agents.serve(self.pipe, machine))

    async def join(self) -> bool:
        """Register and prove the version; False if that did not lead to work."""
        self.say(wire.encode(self.hello()))
        self.say(wire.encode(wire.InstanceReadyMessage(0)))
        for _ in range(20):
            await turn()
            held = self._made.driver.core.instances.get(self.instance)
            if held is not None and held.assignments:
                self.response_of = {number: each.response for number, each in held.assignments.items()}
                return True
        return False

    def hello(self) -> wire.AgentHello:
        """Return its first message."""
        return wire.AgentHello(
            wire.SCHEMA, self._made.driver.run.name, self.instance, self.machine, "spot", SLOTS, 10**6, "fuzz"
        )

    def say(self, message: bytes) -> None:
        """Send."""
        self.pipe.inbox.put_nowait(message)

    def beat(self) -> wire.HeartbeatMessage:
        """Return a heartbeat."""
        self.progress += 1
        return wire.HeartbeatMessage(self.progress, len(self.response_of), 0, 10.0)

    def frame(self, offset_of: Any, endings: tuple[wire.AssignmentEnd, ...] = ()) -> wire.Frame:
        """Return a frame of a token for each assignment; `offset_of`: by response, how many there are."""
        numbers = sorted(self.response_of)
        offsets = [offset_of(self.response_of[number]) for number in numbers]
        count = len(numbers)
        self.seq += 1
        return wire.Frame(
            self.seq, 0, np.array(numbers, "<u4").tobytes(), np.array(offsets, "<u4").tobytes(),
            np.ones(count, "<u2").tobytes(), np.arange(count, dtype="<i4").tobytes(),
            np.full(count, -1.0, "<f4").tobytes(), endings,
        )  # fmt: skip

    def work(self) -> None:
        """Send one more token of everything that it holds, as an honest agent does."""
        self.say(wire.encode(self.frame(lambda response: len(self.tokens.get(response, ())))))
        for index, number in enumerate(sorted(self.response_of)):
            self.tokens.setdefault(self.response_of[number], []).append(index)


async def turn() -> None:
    """Let the coordinator's tasks run."""
    for _ in range(4):
        await asyncio.sleep(0)


class Fuzz:
    """One run: `messages` mutated messages."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = Random(seed)
        self.counts: Counter[str] = Counter()
        run = RunFolder(folder)
        run.path.mkdir(parents=True)
        self.made = BenchedCoordinator(run, 3)
        still = replace(RLBOOST, balances=False)  # nothing is moved away from the honest agent
        lease_s = 36_000.0  # a busy machine is no fault of the coordinator's
        self.made.config = replace(self.made.config, policy=still, lease_s=lease_s, hang_after_s=lease_s)
        self.rss_mb = 0.0
        """After the first tenth."""

    async def run(self, messages: int) -> None:
        """Send them. Raises `AssertionError` where something of the honest agent's is touched."""
        made = self.made
        made.driver.journal.start(asyncio.get_running_loop())
        try:
            await self._run(messages)
        finally:
            faulthandler.cancel_dump_traceback_later()
            await made.driver.journal.close()

    async def _run(self, messages: int) -> None:
        made = self.made
        await made.begin(RESPONSES, MAX_TOKENS)
        ticking = asyncio.create_task(made.tick())
        honest = Agent(made, next(iter(made.driver.core.machines)))
        assert await honest.join()
        attacker, last = await self.attacker(honest), b""
        for number in range(messages):
            if number == messages // 10:
                self.rss_mb = float(psutil.Process().memory_info().rss) / 1e6
            if number % BEAT_EVERY == 0:
                faulthandler.dump_traceback_later(HANG_S, exit=True)
            if attacker.task.done():
                self.counts["connections_ended"] += 1
                crash = attacker.task.exception()
                assert crash is None, f"{crash!r} after {last!r}"
                self.replace(attacker.machine)
                attacker = await self.attacker(honest)
            attacker.say(last := self.message(attacker))
            await turn()
            made.agents.ingest.settle()
            if number % BEAT_EVERY == 0:
                honest.say(wire.encode(honest.beat()))
            if number % ROUND == ROUND - 1:
                await self.check(honest)
        await self.check(honest)
        ticking.cancel()

    async def attacker(self, honest: Agent) -> Agent:
        """Return a machine that was taken over, with work; a former one is gone if it gets none."""
        while True:
            known = list(self.made.driver.core.machines)
            name = next(n for n in reversed(known) if n != honest.machine and self.made.agents.is_live(n))
            agent = Agent(self.made, name)
            if await agent.join():
                return agent
            self.replace(name)

    def replace(self, machine: str) -> None:
        """Have a machine that gets no work any more taken away, and another launched."""
        self.counts["machines_replaced"] += 1
        self.made.driver.apply(MachineGone(self.made.driver.now(), machine))

    def message(self, agent: Agent) -> bytes:
        """Return the next message, mutated nine times of ten."""
        driver, random = self.made.driver, self.random
        held = driver.core.instances.get(agent.instance)
        if held is not None:
            agent.response_of = {number: each.response for number, each in held.assignments.items()}
        reason = random.choice(("stop", "length", "aborted", "engine_failed", "response_failed"))
        some = sorted(agent.response_of)[:1]
        endings = tuple(wire.AssignmentEnd(number, reason) for number in some if random.random() < 0.3)
        kinds: tuple[Any, ...] = (
            *[lambda: agent.frame(driver.store.length, endings)] * 6,
            *[agent.beat] * 3,
            lambda: wire.InstanceReadyMessage(0, start_s={"load": 1.0}, sources={"head": 5}),
            lambda: wire.VersionRefusedMessage(0, "why"),
            lambda: wire.NoticeReceivedMessage(5.0, "cloud"),
            lambda: wire.PeerListening("https://10.0.0.1:1", "PEM", "t"),
            wire.SleptMessage,
            lambda: wire.Goodbye("noticed"),
            agent.hello,
        )
        data = wire.encode(random.choice(kinds)())
        how = random.random()
        self.counts["messages"] += 1
        if how < 0.1:
            return data
        return mutated(data, random) if how < 0.5 else respelled(data, random)

    async def check(self, honest: Agent) -> None:
        """Assert that the honest agent lost nothing, and all invariants; let it work and beat."""
        driver = self.made.driver
        driver.core.check()
        driver.store.check()
        losses = dict(driver.core.counters.losses)
        assert honest.instance in driver.core.instances, f"the honest agent was lost: {losses}"
        held = driver.core.instances[honest.instance].assignments
        assert honest.response_of.items() <= {n: r.response for n, r in held.items()}.items(), (
            "work was taken"
        )
        for response, tokens in honest.tokens.items():
            found = np.frombuffer(driver.store.token_ids(response), "<i4").tolist()
            assert found == tokens, f"response {response}: {found} instead of {tokens}"
        assert not honest.task.done(), "its connection was closed"
        if all(len(tokens) < MAX_TOKENS - 2 for tokens in honest.tokens.values()):
            honest.work()
        await turn()
        self.made.agents.ingest.settle()
        self.counts["checks"] += 1
