"""Random lives of a run against a model shell: agents obey, die, hang, return; every promise is asserted.

The model keeps its own truth (who holds what, what is proved, whose GPU it is) and does not ask the core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlboost_runtime.coordinator.storage.journal import decode_event, encode_command, encode_event
from rlboost_runtime.core.base.messages import (
    FIRST_REQUEST,
    Abort,
    Assign,
    Command,
    CoordinatorRestarted,
    CoreConfig,
    DeliverGroup,
    Disconnected,
    EndRequest,
    Event,
    Evict,
    Finished,
    FinishReason,
    GrantLease,
    Heartbeat,
    InstanceJoined,
    InstanceLeft,
    InstanceReady,
    LaunchFailed,
    LaunchMachine,
    LeaseReturned,
    LoadVersion,
    LossCause,
    MachineGone,
    MachineLaunched,
    NoticeReceived,
    Pool,
    RecallLease,
    Reconnected,
    Released,
    ReleaseReason,
    RequestArrived,
    RequestWithdrawn,
    ResponseRequest,
    RunEnding,
    RunStarted,
    Sleep,
    Slept,
    StepStarted,
    StepTrained,
    TerminateMachine,
    Tick,
    TrainerLost,
    VersionPublished,
    VersionRefused,
    Wake,
)
from rlboost_runtime.core.core import Core
from rlboost_runtime.core.lease_controller import LeaseState
from rlboost_runtime.core.state.machines import REJOIN_S

pytestmark = pytest.mark.property

MAX_TOKENS = 20
PICK = st.integers(0, 999)


@dataclass
class Agent:
    """An agent process as it is in truth."""

    instance: str
    machine: str
    pool: Pool
    epoch: int
    is_running: bool = True
    is_connected: bool = True
    is_silent: bool = False
    is_hung: bool = False
    is_void: bool = False
    """Evicted or replaced: nothing that it does under this epoch counts."""
    is_noticed: bool = False
    has_gpu: bool = True
    fetched: int | None = None
    proved: int | None = None
    progress: int = 0
    holds: dict[int, int] = field(default_factory=dict)
    inbox: list[Command] = field(default_factory=list)

    @property
    def hears(self) -> bool:
        return self.is_running and self.is_connected and not self.is_void


class CoreRun(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.core = Core()
        self.now = 0.0
        self.lines: list[bytes] = []
        self.said: list[list[bytes]] = []
        self.history: list[Event] = []
        self.agents: list[Agent] = []
        self.machines: dict[str, str] = {}
        self.next_epoch = 1
        self.next_response = 0
        self.step = -1
        self.version = -1
        self.requests: dict[int, ResponseRequest] = {}
        self.tokens: dict[int, int] = {}
        self.finished: set[int] = set()
        self.own: dict[int, int] = {}
        """Tokens of the open requests of their own, outside steps."""
        self.next_own = FIRST_REQUEST
        self.num_ended = 0
        self.failed_on: dict[int, set[str]] = {}
        self.inhabited: set[str] = set()
        self.empty_since: dict[str, float] = {}
        self.failed_launches: set[str] = set()
        self.delivered: list[int] = []
        self.is_trained = True
        self.is_ending = False
        self.trainer_has_gpu = True
        self.is_recalled = False
        self.may_repeat_launch = False
        self.has_cloud = True

    # --- the shell ----------------------------------------------------------------------------------------

    @initialize(spot=st.integers(0, 3), reserved=st.integers(0, 2), per_machine=st.integers(1, 2))
    def begin(self, spot: int, reserved: int, per_machine: int) -> None:
        if spot + reserved == 0:
            reserved = 1
        self.config = CoreConfig(
            max_spot_instances=spot,
            reserved_instances=reserved,
            instances_per_machine=per_machine,
            seeding_initial_s=2.0,
            hang_after_s=12.0,
            boot_deadline_s=30.0,
            quarantine_after=2,
        )
        self.send(RunStarted(self.now, self.config))
        self.publish()
        for _ in range(2):  # a run that works, before anything goes wrong
            self.quiet_second()
        self.open_step(0, 3, 2)
        self.quiet_second()

    def send(self, event: Event) -> None:
        self.lines.append(encode_event(event))
        self.history.append(event)
        commands = self.core.handle(event)
        self.said.append([encode_command(c) for c in commands])
        self.core.check()
        deadline = self.core.next_deadline()
        if isinstance(event, Tick):
            assert deadline is None or deadline > event.at, "a tick left its deadline where it was"
        for command in commands:
            self.obey(command)
        self.watch_empty_machines()

    def watch_empty_machines(self) -> None:
        lived_in = {i.machine for i in self.core.instances.values()}
        empty = [m for m, s in self.machines.items() if s == "launched" and m in self.inhabited - lived_in]
        self.empty_since = {m: self.empty_since.get(m, self.now) for m in empty}

    def obey(self, command: Command) -> None:
        match command:
            case Assign():
                self.check_assign(command)
                self.post(command)
            case Abort() | LoadVersion():
                if isinstance(command, LoadVersion):
                    assert command.version <= self.version, "a version that was never published"
                self.post(command)
            case Sleep() | Wake():
                agent = self.agent_of(command.instance, command.epoch)
                assert agent is None or agent.pool is Pool.RESERVED
                if isinstance(command, Wake):
                    assert not self.trainer_has_gpu, "woken on the trainer's GPU"
                self.post(command)
            case Evict():
                for agent in self.agents:
                    if (agent.instance, agent.epoch) == (command.instance, command.epoch):
                        healthy = agent.hears and not agent.is_silent
                        assert not (healthy and command.cause is LossCause.SILENT), "it beat all the time"
                        agent.is_void = True
                        agent.inbox.clear()
            case DeliverGroup(step=step, group=group):
                assert step == self.step
                members = [r for r, request in self.requests.items() if request.group == group]
                quarantined = set(self.core.counters.quarantined)
                assert all(r in self.finished or r in quarantined for r in members), "delivered too early"
                assert group not in self.delivered, "delivered twice"
                self.finished.update(members)
                self.delivered.append(group)
            case EndRequest(response=response, reason=reason):
                if reason is FinishReason.QUARANTINED:
                    del self.own[response]
                assert response not in self.own, "ended before its last token, or twice"
                self.num_ended += 1
            case GrantLease(step=step):
                assert step == self.step
                assert not self.trainer_has_gpu
                awake = [
                    a.instance
                    for a in self.agents
                    if a.pool is Pool.RESERVED and a.has_gpu and self.is_current(a)
                ]
                assert not awake, f"granted while {awake} hold the GPU"
                self.trainer_has_gpu = True
            case RecallLease():
                assert self.trainer_has_gpu
                assert self.unfinished()
                self.is_recalled = True
            case LaunchMachine(machine=machine):
                assert not self.is_ending
                again = self.may_repeat_launch and self.machines.get(machine) == "requested"
                assert again or machine not in self.machines, "a machine's name was used twice"
                self.machines[machine] = "requested"
            case TerminateMachine(machine=machine):
                assert machine in self.machines
                if self.machines[machine] != "gone":
                    self.machines[machine] += "" if "ending" in self.machines[machine] else " ending"

    def check_assign(self, command: Assign) -> None:
        assert not self.is_ending
        agent = self.agent_of(command.instance, command.epoch)
        assert agent is not None, "work for nobody"
        left = self.unfinished()
        assert command.response in left | self.own.keys(), "a finished response is resumed, or another step's"
        wanted = self.step_version if left else self.version
        assert agent.proved == wanted, "work for an instance that has not proved the version"
        assert not agent.is_noticed, "work for a machine that is going"
        if agent.pool is Pool.RESERVED:
            assert not self.trainer_has_gpu, "work on the trainer's GPU"
            assert self.core.lease is LeaseState.ENGINES
        else:
            assert "ending" not in self.machines.get(agent.machine, ""), "work for a machine being ended"
        for other in self.agents:
            if self.is_current(other):
                pending = {c.response for c in other.inbox if isinstance(c, Assign)}
                assert command.response not in pending | set(other.holds.values()), "generated twice"

    def post(self, command: Assign | Abort | LoadVersion | Sleep | Wake) -> None:
        agent = self.agent_of(command.instance, command.epoch)
        if agent is not None and agent.hears:
            agent.inbox.append(command)

    def agent_of(self, instance: str, epoch: int) -> Agent | None:
        return next((a for a in self.agents if (a.instance, a.epoch) == (instance, epoch)), None)

    def is_current(self, agent: Agent) -> bool:
        """Whether the core still counts on this life of the agent."""
        known = self.core.instances.get(agent.instance)
        return known is not None and known.epoch == agent.epoch

    def unfinished(self) -> set[int]:
        return set(self.requests) - self.finished - set(self.core.counters.quarantined)

    def talking(self) -> list[Agent]:
        return [a for a in self.agents if a.hears]

    def pick(self, pick: int, agents: list[Agent]) -> Agent | None:
        return agents[pick % len(agents)] if agents else None

    # --- time ---------------------------------------------------------------------------------------------

    @rule(dt=st.sampled_from([0.0, 0.1, 0.6, 2.0, 5.0, 13.0]))
    def time_passes(self, dt: float) -> None:
        end = self.now + dt
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            self.tick()
            for agent in self.talking():
                self.beat(agent)

    def tick(self) -> None:
        while (deadline := self.core.next_deadline()) is not None and deadline <= self.now:
            self.send(Tick(self.now))

    def beat(self, agent: Agent) -> None:
        if agent.is_silent:
            return
        if not agent.is_hung:
            agent.progress += 1
            for tokens in (self.tokens, self.own):
                for response in tokens.keys() & agent.holds.values():
                    tokens[response] = min(tokens[response] + 1, MAX_TOKENS - 1)
        counts = tuple((r, self.made(r)) for r in agent.holds.values())
        self.send(Heartbeat(self.now, agent.instance, agent.epoch, agent.progress, counts))

    def made(self, response: int) -> int:
        return self.own.get(response, self.tokens.get(response, 7))

    # --- agents -------------------------------------------------------------------------------------------

    def join(self, instance: str, machine: str, pool: Pool) -> None:
        for agent in self.agents:
            if agent.instance == instance:
                agent.is_void = True
        agent = Agent(instance, machine, pool, self.next_epoch)
        agent.is_noticed = "noticed" in self.machines.get(machine, "")
        self.next_epoch += 1
        self.agents = [a for a in self.agents if not a.is_void or self.is_current(a)]
        self.agents.append(agent)
        self.inhabited.add(machine)
        self.send(InstanceJoined(self.now, instance, machine, pool, agent.epoch, 2, 60))

    @rule(pick=PICK)
    def reserved_joins(self, pick: int) -> None:
        if self.config.reserved_instances:
            self.join(f"head-{pick % self.config.reserved_instances}", "head", Pool.RESERVED)

    @rule(pick=PICK, slot=st.integers(0, 1))
    def spot_joins(self, pick: int, slot: int) -> None:
        there = [m for m, s in self.machines.items() if s.split()[0] in ("launched", "requested")]
        if there:
            machine = there[pick % len(there)]
            slot %= self.config.instances_per_machine
            self.machines[machine] = self.machines[machine].replace("requested", "launched")
            self.join(f"{machine}-{slot}", machine, Pool.SPOT)

    @rule(pick=PICK, count=st.integers(1, 5), refuses=st.booleans())
    def obeys_some(self, pick: int, count: int, refuses: bool) -> None:
        agent = self.pick(pick, [a for a in self.talking() if a.inbox])
        if agent is not None:
            self.work_off(agent, count, refuses)

    @rule()
    def everybody_obeys(self) -> None:
        for agent in self.talking():
            self.work_off(agent, len(agent.inbox), refuses=False)

    def work_off(self, agent: Agent, count: int, refuses: bool) -> None:
        for _ in range(count):
            if not agent.inbox or not agent.hears:
                break
            self.carry_out(agent, agent.inbox.pop(0))
        self.apply_version(agent, refuses)

    def carry_out(self, agent: Agent, command: Command) -> None:
        match command:
            case Assign(assignment=assignment, response=response):
                is_of_step = response in self.requests and agent.proved == self.step_version
                if not is_of_step and response not in self.own:
                    self.release(agent, assignment, response, ReleaseReason.ABORTED)
                else:
                    agent.holds[assignment] = response
            case Abort(assignment=assignment):
                if assignment in agent.holds:
                    response = agent.holds.pop(assignment)
                    self.release(agent, assignment, response, ReleaseReason.ABORTED)
            case LoadVersion(version=version):
                agent.fetched = version
                if agent.proved == version:
                    self.send(InstanceReady(self.now, agent.instance, agent.epoch, version))
            case Sleep():
                assert not agent.holds, "put to sleep with work"
                agent.has_gpu, agent.proved = False, None
                self.send(Slept(self.now, agent.instance, agent.epoch))
            case Wake():
                agent.has_gpu = True

    def release(self, agent: Agent, assignment: int, response: int, reason: ReleaseReason) -> None:
        tokens = self.own.get(response, self.tokens.get(response, 0))
        self.send(Released(self.now, agent.instance, assignment, tokens, reason))

    def apply_version(self, agent: Agent, refuses: bool) -> None:
        fetched = agent.fetched
        can_load = agent.hears and agent.has_gpu and not agent.holds
        if fetched is None or fetched == agent.proved or not can_load:
            return
        if refuses:
            agent.proved = agent.fetched = None
            self.send(VersionRefused(self.now, agent.instance, agent.epoch, fetched, "digest"))
        else:
            agent.proved = fetched
            self.send(InstanceReady(self.now, agent.instance, agent.epoch, fetched))

    @rule(pick=PICK, tokens=st.integers(1, MAX_TOKENS))
    def response_finishes(self, pick: int, tokens: int) -> None:
        agent = self.pick(pick, [a for a in self.talking() if a.holds])
        if agent is not None:
            self.finish_one(agent, tokens)

    def finish_one(self, agent: Agent, tokens: int) -> None:
        assignment, response = next(iter(agent.holds.items()))
        del agent.holds[assignment]
        if response in self.own:
            num_tokens = max(self.own.pop(response), tokens)
            self.send(Finished(self.now, response, num_tokens, FinishReason.STOP))
        if response not in self.requests:
            return
        assert response in self.unfinished()
        self.tokens[response] = max(self.tokens[response], tokens)
        self.finished.add(response)
        self.send(Finished(self.now, response, self.tokens[response], FinishReason.STOP))

    @rule(pick=PICK)
    def journal_finishes(self, pick: int) -> None:
        """The shell finds, wherever a response is, that its tokens are complete already."""
        left = sorted(self.unfinished())
        if left and not self.is_ending:
            response = left[pick % len(left)]
            self.finished.add(response)
            self.send(Finished(self.now, response, MAX_TOKENS, FinishReason.LENGTH))
            for agent in self.agents:
                agent.holds = {a: r for a, r in agent.holds.items() if r != response}
                agent.inbox = [c for c in agent.inbox if not isinstance(c, Assign) or c.response != response]

    @rule(pick=PICK, engine=st.booleans())
    def response_fails(self, pick: int, engine: bool) -> None:
        agent = self.pick(pick, [a for a in self.talking() if a.holds])
        if agent is not None:
            assignment, response = agent.holds.popitem()
            if engine:
                self.release(agent, assignment, response, ReleaseReason.ENGINE_FAILED)
                return
            if response in self.requests or response in self.own:
                self.failed_on.setdefault(response, set()).add(agent.instance)
            self.release(agent, assignment, response, ReleaseReason.RESPONSE_FAILED)
            if len(self.failed_on.get(response, ())) >= self.config.quarantine_after:
                gone = {
                    *self.core.counters.quarantined,
                    *range(FIRST_REQUEST, self.next_own),
                } - self.own.keys()
                assert response in gone, "it goes on breaking instances"

    # --- agents' accidents --------------------------------------------------------------------------------

    @rule(pick=PICK, silently=st.booleans())
    def agent_dies(self, pick: int, silently: bool) -> None:
        agent = self.pick(pick, self.talking())
        if agent is not None:
            agent.is_running = agent.has_gpu = False
            agent.holds.clear()
            agent.inbox.clear()
            if not silently:
                self.send(Disconnected(self.now, agent.instance, agent.epoch))

    @rule(pick=PICK)
    def connection_resets(self, pick: int) -> None:
        agent = self.pick(pick, self.talking())
        if agent is not None:
            self.cut_off(agent)
            self.send(Disconnected(self.now, agent.instance, agent.epoch))

    def cut_off(self, agent: Agent) -> None:
        agent.is_connected = False
        agent.inbox.clear()

    @rule(pick=PICK)
    def comes_back(self, pick: int) -> None:
        agent = self.pick(pick, [a for a in self.agents if a.is_running and not a.is_connected])
        if agent is not None:
            self.reconnect(agent)

    def reconnect(self, agent: Agent) -> None:
        if agent.is_void or not self.is_current(agent):
            agent.is_void = True
            self.join(agent.instance, agent.machine, agent.pool)
            return
        agent.is_connected = True
        held = set(agent.holds)
        self.send(Reconnected(self.now, agent.instance, agent.epoch, tuple(agent.holds)))
        fresh = {c.assignment for c in agent.inbox if isinstance(c, Assign)}
        aborted = {c.assignment for c in agent.inbox if isinstance(c, Abort)}
        believed = {a for a, _, instance in self.core.assignments() if instance == agent.instance}
        assert believed - fresh <= held, "the core believes in work that is not there"
        assert held - believed <= aborted, "work that nobody wants goes on"

    @rule(pick=PICK, silent=st.booleans())
    def goes_silent_or_hangs(self, pick: int, silent: bool) -> None:
        agent = self.pick(pick, self.talking())
        if agent is not None:
            agent.is_silent, agent.is_hung = agent.is_silent or silent, True

    @rule(pick=PICK, seconds=st.sampled_from([0.0, 2.0, 30.0]))
    def notice_comes(self, pick: int, seconds: float) -> None:
        agent = self.pick(pick, [a for a in self.talking() if a.pool is Pool.SPOT])
        if agent is not None:
            for other in self.agents:
                other.is_noticed |= other.machine == agent.machine
            self.machines[agent.machine] += " noticed"
            self.send(NoticeReceived(self.now, agent.instance, agent.epoch, seconds))

    @rule(pick=PICK)
    def says_goodbye(self, pick: int) -> None:
        agent = self.pick(pick, [a for a in self.talking() if not a.holds])
        if agent is not None:
            agent.is_running = agent.has_gpu = False
            was_current = self.is_current(agent)
            self.send(InstanceLeft(self.now, agent.instance, agent.epoch, LossCause.STOPPED))
            assert not was_current or agent.machine not in self.empty_since, "nobody comes back to it"

    @rule(pick=PICK)
    def evicted_joins_again(self, pick: int) -> None:
        agent = self.pick(pick, [a for a in self.agents if a.is_running and a.is_void])
        if agent is not None and not any(
            other.instance == agent.instance and other is not agent for other in self.agents
        ):
            self.join(agent.instance, agent.machine, agent.pool)

    # --- machines -----------------------------------------------------------------------------------------

    @rule(pick=PICK, fails=st.booleans())
    def launch_is_answered(self, pick: int, fails: bool) -> None:
        asked = [m for m, s in self.machines.items() if s.startswith("requested")]
        if not asked:
            return
        machine = asked[pick % len(asked)]
        if fails:
            self.launch_fails(machine)
        else:
            self.machines[machine] = self.machines[machine].replace("requested", "launched")
            self.send(MachineLaunched(self.now, machine))

    def launch_fails(self, machine: str) -> None:
        self.machines[machine] = "gone"
        self.failed_launches.add(machine)
        self.send(LaunchFailed(self.now, machine, "no capacity", 2.0))

    @rule(pick=PICK)
    def machine_goes(self, pick: int) -> None:
        there = [m for m, s in self.machines.items() if s.startswith("launched")]
        if there:
            self.machine_ends(there[pick % len(there)])

    def machine_ends(self, machine: str) -> None:
        self.machines[machine] = "gone"
        for agent in self.agents:
            if agent.machine == machine:
                agent.is_running = agent.has_gpu = False
                agent.holds.clear()
                agent.inbox.clear()
        self.send(MachineGone(self.now, machine))

    @rule(pick=PICK)
    def failed_launch_was_accepted_after_all(self, pick: int) -> None:
        gone = [m for m, s in self.machines.items() if s == "gone"]
        if gone and pick % 7 == 0:
            machine = gone[pick % len(gone)]
            self.machines[machine] = "launched"
            self.send(MachineLaunched(self.now, machine))
            assert "ending" in self.machines[machine], "a machine that nobody counts goes on billing"

    # --- trainer ------------------------------------------------------------------------------------------

    def publish(self) -> None:
        self.version += 1
        self.send(VersionPublished(self.now, self.version))

    @precondition(lambda self: self.is_trained and not self.is_ending)
    @rule(groups=st.integers(0, 3), size=st.integers(1, 3))
    def step_starts(self, groups: int, size: int) -> None:
        self.open_step(self.step + 1, groups, size)

    @precondition(lambda self: not self.is_trained and not self.is_ending)
    @rule(pick=PICK, groups=st.integers(1, 3))
    def another_step_starts(self, pick: int, groups: int) -> None:
        if pick % 5 == 0:
            self.open_step(self.step + 1, groups, 2)

    @precondition(lambda self: not self.is_trained and self.trainer_has_gpu and not self.unfinished())
    @precondition(lambda self: not self.is_ending)
    @rule(groups=st.integers(1, 3))
    def next_step_is_asked_for_ahead(self, groups: int) -> None:
        """The trainer has all groups of a step, and trains it while the next one is rolled out."""
        trained, had_gpu = self.step, self.trainer_has_gpu
        self.open_step(self.step + 1, groups, 2, ahead=True)
        assert self.trainer_has_gpu == had_gpu
        assert self.core.step.step == self.step
        self.send(StepTrained(self.now, trained, 0.0, 1.0))
        assert not self.core.step.trained
        self.publish()

    def open_step(self, step: int, groups: int, size: int, *, ahead: bool = False) -> None:
        self.step, self.step_version, self.is_trained = step, self.version, False
        numbers = range(self.next_response, self.next_response + groups * size)
        self.next_response += groups * size
        self.requests = {n: ResponseRequest(n, (n - numbers.start) // size, 5, MAX_TOKENS) for n in numbers}
        self.tokens = dict.fromkeys(numbers, 0)
        self.finished, self.delivered = set(), []
        self.ask_for_step(keeps_gpu=ahead)

    def ask_for_step(self, *, keeps_gpu: bool = False) -> None:
        if not keeps_gpu:
            self.trainer_has_gpu = self.is_recalled = False
        requests = tuple(self.requests.values())
        self.send(StepStarted(self.now, self.step, self.step_version, requests, keeps_gpu))

    @precondition(lambda self: self.step >= 0 and not self.is_ending and not self.is_trained)
    @rule()
    def trainer_restarts(self) -> None:
        self.send(TrainerLost(self.now))
        before, self.delivered = sorted(self.delivered), []
        self.ask_for_step()
        assert sorted(self.delivered) == before, "what was complete is not delivered again"

    @precondition(lambda self: not self.is_trained and self.trainer_has_gpu and not self.unfinished())
    @rule(wait=st.floats(0, 20), busy=st.floats(0, 50))
    def step_is_trained(self, wait: float, busy: float) -> None:
        assert sorted({r.group for r in self.requests.values()}) == sorted(self.delivered)
        self.is_trained = True
        self.send(StepTrained(self.now, self.step, wait, busy))
        self.publish()

    @precondition(lambda self: self.is_recalled)
    @rule()
    def trainer_answers_recall(self) -> None:
        self.trainer_has_gpu = self.is_recalled = False
        self.send(LeaseReturned(self.now))

    # --- requests of their own ----------------------------------------------------------------------------

    @rule(count=st.integers(1, 3))
    def requests_arrive(self, count: int) -> None:
        for _ in range(count):
            number, self.next_own = self.next_own, self.next_own + 1
            if not self.is_ending:
                self.own[number] = 0
            session = FIRST_REQUEST + number % 2
            self.send(RequestArrived(self.now, ResponseRequest(number, session, 5, MAX_TOKENS)))

    @rule(pick=PICK)
    def client_leaves(self, pick: int) -> None:
        if self.own:
            response = sorted(self.own)[pick % len(self.own)]
            del self.own[response]
            holders = [a for a in self.agents if self.is_current(a) and response in a.holds.values()]
            self.send(RequestWithdrawn(self.now, response))
            assert response not in self.core.open_requests
            for agent in holders:
                told = {c.assignment for c in agent.inbox if isinstance(c, Abort)}
                assert not agent.hears or set(agent.holds) & told, "it is generated for nobody"

    # --- accidents of the run -----------------------------------------------------------------------------

    @rule(pick=PICK)
    def something_is_said_again(self, pick: int) -> None:
        """Late and repeated words: anything of a former epoch, and what a shell may honestly repeat."""
        event = self.history[pick % len(self.history)]
        known = self.core.instances.get(getattr(event, "instance", ""))
        former = hasattr(event, "epoch") and (known is None or known.epoch != event.epoch)
        harmless = isinstance(event, Finished | Released | InstanceJoined | StepTrained | RunStarted)
        if isinstance(event, LeaseReturned):
            harmless = not self.is_recalled
        if isinstance(event, VersionPublished):
            harmless = True
        if former and isinstance(event, InstanceJoined):
            former = False  # judged by its epoch all the same
        if isinstance(event, MachineGone | LaunchFailed):
            harmless = self.machines.get(event.machine) == "gone"
        if former or harmless:
            self.send(decode_event(encode_event(event).replace(b'"at":', b'"at":%r,"was":' % self.now)))

    @rule(pick=PICK)
    def coordinator_restarts(self, pick: int) -> None:
        if pick % 4:
            return
        for agent in self.agents:
            if agent.hears:
                self.cut_off(agent)
        self.may_repeat_launch = True
        self.empty_since.clear()  # its agents could not dial in: it is waited for anew
        self.is_ending = False  # an ended run that is started again goes on
        self.send(CoordinatorRestarted(self.now))
        self.may_repeat_launch = False

    @rule(pick=PICK)
    def run_ends(self, pick: int) -> None:
        if pick % 50 == 0:
            self.is_ending = True
            self.send(RunEnding(self.now, "done"))

    # --- promises -----------------------------------------------------------------------------------------

    @invariant()
    def every_response_is_known_once(self) -> None:
        assert self.core.open_requests.keys() == self.own.keys(), "an open request is lost or doubled"
        if self.step < 0:
            return
        view = self.core.step
        assert view is not None
        done = {r for r in self.requests if self.core.response(r).finish_reason is not None}
        assert done == set(self.requests) - self.unfinished(), "finished by one and not by the other"
        assert view.num_finished == len(done)

    @invariant()
    def machines_stay_within_the_cap(self) -> None:
        if not hasattr(self, "config"):
            return
        cap = -(-self.config.max_spot_instances // self.config.instances_per_machine)
        counted = [m for m, s in self.machines.items() if s in ("requested", "launched")]
        assert len(counted) <= cap, f"{counted} for a cap of {cap}"

    @invariant()
    def no_machine_is_kept_for_nothing(self) -> None:
        useless = [m for m, since in self.empty_since.items() if self.now - since > REJOIN_S]
        assert not useless, f"{useless} run without a single instance"

    @invariant()
    def what_never_was_is_forgotten(self) -> None:
        known = self.core.machines
        assert all(m in known for m, s in self.machines.items() if s.split()[0] in ("requested", "launched"))
        for machine in self.failed_launches & known.keys():
            assert known[machine].was_accepted, f"{machine} never was, and is kept"

    def teardown(self) -> None:
        if not hasattr(self, "config"):
            return
        self.behave()
        self.replay()

    def behave(self, has_cloud: bool | None = None) -> None:
        """From any state: once everybody behaves, the open step completes and the trainer gets the GPU.

        Every other time the cloud has nothing to give any more, and the reserved engines must do it alone.
        """
        for agent in self.agents:
            agent.is_silent = agent.is_hung = False
        if has_cloud is None:
            has_cloud = self.config.reserved_instances == 0 or len(self.lines) % 2 == 0
        self.has_cloud = has_cloud
        if not self.has_cloud:
            for machine, state in list(self.machines.items()):
                if state != "gone":
                    self.machine_ends(machine)
        if not (has_cloud and self.config.max_spot_instances):
            for _ in range(len(self.own)):  # between windows only spot instances serve them
                self.client_leaves(0)
        for _ in range(60):
            if self.is_settled():
                break
            self.behave_for_a_second()
        assert self.is_settled(), (
            f"stuck: {self.core.lease}, unfinished {self.unfinished()}, machines {self.machines}, "
            f"{[(i.instance, i.state, i.version) for i in self.core.instances.values()]}"
        )

    def is_settled(self) -> bool:
        if self.is_ending:
            return all(state == "gone" for state in self.machines.values())
        is_over = not self.unfinished() and self.core.lease is LeaseState.TRAINER
        return not self.own and (self.step < 0 or is_over)

    @rule()
    def quiet_second(self) -> None:
        """Machines, agents and trainer do what they are asked, and work goes on; nothing is repaired."""
        for machine, state in list(self.machines.items()):
            if "ending" in state:
                self.machine_ends(machine)
            elif state == "requested" and not self.has_cloud:
                self.launch_fails(machine)
            elif state == "requested":
                self.machines[machine] = "launched"
                self.send(MachineLaunched(self.now, machine))
                for slot in range(self.config.instances_per_machine):
                    self.join(f"{machine}-{slot}", machine, Pool.SPOT)
        for i in range(self.config.reserved_instances if not self.is_ending else 0):
            if not any(a.instance == f"head-{i}" and a.is_running and not a.is_void for a in self.agents):
                self.join(f"head-{i}", "head", Pool.RESERVED)
        self.everybody_obeys()
        self.time_passes(1.0)
        self.everybody_obeys()

    def behave_for_a_second(self) -> None:
        for agent in list(self.agents):
            if agent.is_running and not agent.is_connected and not agent.is_void:
                self.reconnect(agent)
        self.quiet_second()
        for agent in self.talking():
            while agent.holds:
                self.finish_one(agent, 1)
        if self.is_recalled:
            self.trainer_answers_recall()

    def replay(self) -> None:
        core = Core()
        for line, said in zip(self.lines, self.said, strict=True):
            event = decode_event(line)
            assert encode_event(event) == line
            assert [encode_command(c) for c in core.handle(event)] == said


def weighted_actions(run: CoreRun, rng: Random) -> list[tuple[int, Callable[[], None]]]:
    """Common life often, accidents now and then: lives long enough to meet accidents on top of accidents."""

    def pick() -> int:
        return rng.randrange(1000)

    def starts() -> None:
        if run.is_trained and not run.is_ending:
            run.open_step(run.step + 1, rng.randint(0, 4), rng.randint(1, 3))
        elif not run.is_ending and rng.random() < 0.05:
            run.open_step(run.step + 1, rng.randint(1, 3), 2)

    def trains() -> None:
        if run.is_trained or not run.trainer_has_gpu or run.unfinished():
            return
        if not run.is_ending and rng.random() < 0.3:
            run.next_step_is_asked_for_ahead(rng.randint(1, 3))
        else:
            run.step_is_trained(rng.uniform(0, 20), rng.uniform(0, 50))

    def restarts() -> None:
        if run.step >= 0 and not run.is_ending and not run.is_trained:
            run.trainer_restarts()

    def answers() -> None:
        if run.is_recalled:
            run.trainer_answers_recall()

    return [
        (20, lambda: run.time_passes(rng.choice([0.1, 0.6, 1.0, 2.0]))),
        (1, lambda: run.time_passes(rng.choice([5.0, 13.0]))),
        (10, run.quiet_second),
        (10, run.everybody_obeys),
        (20, lambda: run.obeys_some(pick(), rng.randint(1, 4), rng.random() < 0.4)),
        (40, lambda: run.response_finishes(pick(), rng.randint(1, MAX_TOKENS))),
        (2, lambda: run.journal_finishes(pick())),
        (10, lambda: run.response_fails(pick(), rng.random() < 0.3)),
        (4, lambda: run.agent_dies(pick(), rng.random() < 0.5)),
        (5, lambda: run.connection_resets(pick())),
        (10, lambda: run.comes_back(pick())),
        (2, lambda: run.goes_silent_or_hangs(pick(), rng.random() < 0.5)),
        (3, lambda: run.notice_comes(pick(), rng.choice([0.0, 2.0, 30.0]))),
        (2, lambda: run.says_goodbye(pick())),
        (3, lambda: run.evicted_joins_again(pick())),
        (3, lambda: run.spot_joins(pick(), rng.randrange(2))),
        (1, lambda: run.reserved_joins(pick())),
        (6, lambda: run.launch_is_answered(pick(), rng.random() < 0.3)),
        (3, lambda: run.machine_goes(pick())),
        (1, lambda: run.failed_launch_was_accepted_after_all(pick())),
        (12, starts),
        (30, trains),
        (2, restarts),
        (10, answers),
        (12, lambda: run.requests_arrive(rng.randint(1, 3))),
        (3, lambda: run.client_leaves(pick())),
        (8, lambda: run.something_is_said_again(pick())),
        (3, lambda: run.coordinator_restarts(pick())),
    ]


def lose_the_cloud_in_mid_step(run: CoreRun) -> None:
    """Every spot instance goes for good while the trainer has the GPU: it must be recalled."""
    run.has_cloud = True
    run.open_step(run.step + 1, 3, 2)
    for _ in range(2_000):  # nothing is generated: only its bound closes the predicted window
        run.quiet_second()
        if run.core.lease is LeaseState.TRAINER:
            break
    assert run.core.lease is LeaseState.TRAINER, "the window never closed"
    assert run.unfinished()
    recalls = run.core.counters.recalls
    run.behave(has_cloud=False)
    assert run.core.counters.recalls == recalls + 1


@pytest.mark.parametrize("seed", range(24))
def test_long_lives_keep_every_promise(seed: int) -> None:
    rng = Random(seed)
    run = CoreRun()
    run.begin(spot=seed % 4, reserved=(seed // 4) % 3, per_machine=1 + seed % 2)
    weights, actions = zip(*weighted_actions(run, rng), strict=True)
    for number, action in enumerate(rng.choices(actions, weights, k=500)):
        if number == 450 and seed % 6 == 5:
            run.run_ends(0)
        action()
        run.every_response_is_known_once()
        run.machines_stay_within_the_cap()
        run.no_machine_is_kept_for_nothing()
        run.what_never_was_is_forgotten()
    run.behave()
    if run.config.reserved_instances and run.config.max_spot_instances and not run.is_ending:
        lose_the_cloud_in_mid_step(run)
    run.replay()
    counters = run.core.counters
    assert counters.redispatches
    assert counters.stale_events
    if run.config.max_spot_instances > 1:
        assert counters.migrations


CoreRun.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestCoreRun = CoreRun.TestCase
