"""Everything that can happen to the core, and everything that it can ask for.

Events go in, each with `at`: seconds on the run's own clock (it starts near 0 with the run, never goes
back, and goes on through a coordinator's restart). Commands come out. Both are small frozen dataclasses of
plain values, so that a log of events can be written, read back and driven through the core again to
identical commands (tests/integration holds that promise over live runs).

Vocabulary: a *response* is one continuation; an *assignment* is one attempt of one instance at one response.
Assignment numbers are unique in a run and never reused, so a late message under an old assignment can always
be distinguished from one under a current one. An *epoch* numbers the registrations of a run: unique, and each
greater than all before it.

A `SchedulingPolicy` says what distinguishes RLBoost from the paper, the published code and plain baselines.
It is part of `CoreConfig`, so a live run and a simulated one under the same policy decide with the same code,
and a log of events records its rules. The baselines' policies are in `rlboost_runtime.sim.baselines`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from rlboost_runtime.core.base.autoscaling import Autoscaling
from rlboost_runtime.core.base.cost_model import Prices
from rlboost_runtime.core.base.prior import Prior
from rlboost_runtime.core.base.token_cost import MachineKind

BOOKED = "booked"
"""Dispatch to the emptiest instance by booked KV tokens; a response that fits nowhere waits (`dispatch`)."""
EVEN = "even"
"""Running responses move from the fullest instance to the emptiest, where that saves more than it costs."""
PREDICTED = "predicted"
"""A window until what is left to roll out takes no longer than training (`window.predicted`)."""


class SizeRule(StrEnum):
    """How many spot instances are wanted."""

    MARGINAL = "marginal"
    """What gives the most tokens per dollar, weights' egress included; N_prem while that is not known."""
    N_PREM = "n_prem"
    """N_prem of Algorithm 1, at most the job's cap; the cap until a step has taught it."""
    N_PREM_FROM_RESERVED = "n_prem_from_reserved"
    """The same, beginning with the number of reserved engines, as in the paper."""
    CAP = "cap"
    """Always the job's cap: the published code leaves it to the user."""


@dataclass(frozen=True, slots=True)
class SchedulingPolicy:
    """One set of rules. The default is what live runs follow."""

    name: str = "rlboost"
    dispatch: str = BOOKED
    """Name of the dispatch rule, which `core.rules` maps to an implementation."""
    max_pending: int = 1
    """Theta of Algorithm 2, in responses. The paper gives no value; the published code gives work only to
    instances without a queue."""
    booked_growth_share: float = 0.25
    """Share of a response's expected growth for which KV tokens are booked ahead. Responses on an instance
    are at different points of their growth and end one after the other, so they never need all of it
    together. With 0.5 a fifth of an engine's cache is left empty (up to 3 % slower in simulation), with 0 it
    overflows."""
    fits_small_caches: bool = True
    """A cache that holds few responses is booked for their whole length, so that no engine preempts."""
    least_first: bool = True
    """Of waiting responses the one with the fewest tokens is placed first; else the one with the most."""
    nearest_group_first: bool = True
    """Of waiting responses those go first whose groups have the fewest unfinished ones, because the trainer
    takes whole groups; `least_first` decides among equals."""
    yields: bool = True
    """A running response gives its place to a waiting one whose group is much nearer to its end."""
    fill_limit: float = 0.8
    """Share of its KV capacity up to which an instance is given work. A full engine generates the most, but
    the emptier one is, the sooner each of its responses, and so its groups, end."""
    fills_fairly: bool = True
    """`BOOKED`: at a step's begin no instance is filled more than all will be once all are there."""
    window: str = PREDICTED
    """Name of the rule for the seeding window."""
    has_gate: bool = True
    """`PREDICTED`: no window where waking the reserved engines costs more than they help."""
    sizing: SizeRule = SizeRule.MARGINAL
    balances: bool = True
    """Move responses between instances while these run (CONTINUOUSLB of Algorithm 2)."""
    balance: str = EVEN
    """Name of the rule by which they move."""
    keeps_tokens: bool = True
    """What a lost instance generated is kept; else its responses begin anew, by `Assign.keep_tokens`, which
    only simulated agents obey."""
    loads_any_time: bool = True
    """An instance that comes in the middle of a step loads the weights at once; else with the next
    version."""


RLBOOST = SchedulingPolicy()


class Pool(StrEnum):
    """Where an instance's GPUs come from."""

    RESERVED = "reserved"
    """The trainer's own GPUs, lent during the seeding window."""
    SPOT = "spot"
    """Preemptible machines."""


class FinishReason(StrEnum):
    """Why a response is complete."""

    STOP = "stop"
    """The model ended it."""
    LENGTH = "length"
    """It reached its token limit."""
    QUARANTINED = "quarantined"
    """It made several distinct engines fail; what there was of it is handed over, masked out of training."""


class ReleaseReason(StrEnum):
    """Why an instance let go of an assignment without finishing it."""

    ABORTED = "aborted"
    """We asked for it (migration, drain, hand-over)."""
    ENGINE_FAILED = "engine_failed"
    """The engine died or forgot it; the response is not to blame."""
    RESPONSE_FAILED = "response_failed"
    """The engine lives but refuses or fails on this very response; counts towards its quarantine."""


class LossCause(StrEnum):
    """Why an instance is gone."""

    RESET = "reset"
    """Its connection closed and it did not come back within the grace."""
    SILENT = "silent"
    """Its lease ended without a heartbeat."""
    NOTICED = "noticed"
    """It signed off after a preemption notice."""
    REPLACED = "replaced"
    """The same instance registered again: its former life is over."""
    HUNG = "hung"
    """The agent lived but its engine made no progress."""
    STOPPED = "stopped"
    """We took it down."""
    MACHINE_GONE = "machine_gone"
    """The provider reports that its machine is gone."""


# --- what the shells are configured with -----------------------------------------------------------------


DEFAULT_BOOT_S = 600.0


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Tunables of one run; all durations in seconds."""

    max_spot_instances: int
    instances_per_machine: int = 1
    reserved_instances: int = 1
    lease_s: float = 6.0
    """Silence after which an instance is dead."""
    reset_grace_s: float = 0.5
    """Time a reset connection gets to come back."""
    seeding_initial_s: float = 10.0
    """T_init of the paper's Algorithm 1."""
    seeding_eta: float = 3.0
    """Adaptation rate eta: the idle-time difference is divided by it."""
    recall_after_s: float = 3.0
    """With work left and no spot instance able to serve for so long, the GPU is recalled from the trainer."""
    boot_deadline_s: float = DEFAULT_BOOT_S
    """A machine whose agents have not dialled in by then is ended and replaced."""
    quarantine_after: int = 3
    """Distinct instances a response may make fail before it is quarantined."""
    hang_after_s: float = 60.0
    """An engine with work that makes no progress for this long is evicted."""
    affinity_slack: float = 0.25
    """How much fuller (share of its KV capacity) an instance may be and still be given its siblings' work."""
    prices: Prices = field(default_factory=Prices)
    """What machines and bytes cost, for the fleet's size."""
    policy: SchedulingPolicy = field(default_factory=SchedulingPolicy)
    """The rules for dispatch, seeding, sizing and balance."""
    autoscaling: Autoscaling | None = None
    """The fleet only serves requests: it follows their load, and the reserved engines never sleep. None: it
    works for a trainer."""


# --- events ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Timed:
    """Any event. `at`: seconds of the run."""

    at: float


@dataclass(frozen=True, slots=True)
class _OfInstance(_Timed):
    """What an instance reports, under the epoch of its registration."""

    instance: str
    epoch: int


@dataclass(frozen=True, slots=True)
class RunStarted(_Timed):
    """First event of every log."""

    config: CoreConfig
    boot: str = ""
    """As `CoordinatorRestarted.boot`."""
    prior: Prior | None = None
    """What a former run like this one has measured; None: there was none."""


@dataclass(frozen=True, slots=True)
class CoordinatorRestarted(_Timed):
    """A new coordinator process replayed the log; every instance gets one fresh lease to come back.

    `boot`: names the head's boot, where the system does; another one may have cost the log its last seconds.
    """

    boot: str = ""
    num_named: int = 0
    """The first number that no machine ever had, by the books, which lose nothing: names are never reused."""


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """One continuation to generate. `response` is unique in the run; lengths in tokens. Outside a step
    `group` is the same number, or stands for its session."""

    response: int
    group: int
    prompt_tokens: int
    max_tokens: int
    episode: int | None = None
    """A turn's: the response of the open step that it belongs to."""


@dataclass(frozen=True, slots=True)
class StepStarted(_Timed):
    """The trainer asks for a step's responses under `policy_version`, and by that gives the GPU lease back,
    unless it `keeps_lease`: it goes on training the step before meanwhile.

    The same step and version again (a restarted trainer) re-opens nothing: finished groups are delivered
    again. Requests that are new are added to the open step, behind the others.
    """

    step: int
    policy_version: int
    requests: tuple[ResponseRequest, ...]
    keeps_lease: bool = False
    are_episodes: bool = False
    """Environments drive its responses: each is a number of turns, which arrive as requests, and is finished
    when the trainer says so."""
    in_flight_updates: bool = False
    """Versions published from now on are taken up while it is rolled out, and its responses go on under them
    (PipelineRL, arXiv 2509.19128). False: all of it is generated under `policy_version`."""
    open_from: int | None = None
    """Earlier steps from this one on stay open, and their responses go first; those before it are trained.
    None: it takes the place of whatever is open. Only with `in_flight_updates`, as an engine has one
    version."""


FIRST_REQUEST = 2**31
"""Number of the first response that was requested outside a step; those of steps are below it."""


@dataclass(frozen=True, slots=True)
class RequestArrived(_Timed):
    """One response is requested, outside a step or as a turn of an episode. Its prompt and how to sample it
    are journalled.

    It is generated under whatever version the fleet serves, during a step the step's: where that changes, it
    goes on under the new one.
    """

    request: ResponseRequest


@dataclass(frozen=True, slots=True)
class RequestWithdrawn(_Timed):
    """Nobody wants the rest of this response: its client left, or has all that it asked for. `num_tokens` are
    journalled."""

    response: int
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepTrained(_Timed):
    """The trainer has trained the step. `wait_s`: idle, holding the lease, for want of
    responses to fill a micro-batch (t_train^wait); `busy_s`: its training time without that (t_train).
    `handover_s`: the time to bring policy and optimizer back onto the GPUs; in neither of them."""

    step: int
    wait_s: float
    busy_s: float
    handover_s: float = 0.0


@dataclass(frozen=True, slots=True)
class VersionPublished(_Timed):
    """`version` can be pulled from now on; `num_bytes` by each instance, 0: not known."""

    version: int
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LeaseReturned(_Timed):
    """The trainer answered a recall: its GPU memory is free."""


@dataclass(frozen=True, slots=True)
class TrainerLost(_Timed):
    """The trainer's connection is gone; nothing is cancelled, it will come back from its checkpoint."""


@dataclass(frozen=True, slots=True)
class InstanceJoined(_Timed):
    """An agent registered. `max_running`: responses its engine decodes at once; `kv_tokens`: KV capacity;
    both are upper bounds where the engine has not started yet."""

    instance: str
    machine: str
    pool: Pool
    epoch: int
    max_running: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class InstanceReady(_OfInstance):
    """The instance proved (digests and probe) that it holds and serves `version`.

    `kv_tokens`: KV capacity as its engine allocated it, in blocks of `kv_block_tokens`; 0: not reported, as
    it registered. `max_running`: responses decoded at once, as the engine chose by its cache; 0: as it
    registered.
    """

    version: int
    kv_tokens: int = 0
    kv_block_tokens: int = 0
    max_running: int = 0


@dataclass(frozen=True, slots=True)
class VersionFetched(_OfInstance):
    """The instance has the files of `version`; it applies them once it holds no work."""

    version: int


@dataclass(frozen=True, slots=True)
class VersionRefused(_OfInstance):
    """The instance could not load `version`, or its probe did not match; it serves nothing."""

    version: int
    problem: str


@dataclass(frozen=True, slots=True)
class Slept(_OfInstance):
    """The instance's engine has freed its GPU memory."""


@dataclass(frozen=True, slots=True)
class Heartbeat(_OfInstance):
    """A heartbeat. `engine_progress` grows whenever the engine does anything; `tokens` maps the responses
    that it runs to their tokens so far (prompt not counted): estimates for balance, nothing that must be
    exact is decided on them."""

    engine_progress: int
    tokens: tuple[tuple[int, int], ...]
    num_queued: int | None = None
    """Assignments that the engine has accepted and does not execute yet; None: not reported."""


@dataclass(frozen=True, slots=True)
class Disconnected(_OfInstance):
    """The instance's connection closed without a goodbye."""


@dataclass(frozen=True, slots=True)
class Reconnected(_OfInstance):
    """The instance came back within its lease under its old epoch, still holding `assignments`."""

    assignments: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NoticeReceived(_OfInstance):
    """The cloud will take the machine in `seconds`; `is_assumed`: its notice gave no time."""

    seconds: float
    is_assumed: bool = False


@dataclass(frozen=True, slots=True)
class InstanceLeft(_OfInstance):
    """The agent signed off; everything that it generated has been received."""

    cause: LossCause


@dataclass(frozen=True, slots=True)
class Finished(_Timed):
    """The response is complete and journalled. `num_tokens` counts all its tokens, from every instance."""

    response: int
    num_tokens: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class TokensLost(_Timed):
    """The journal does not hold a finished response as its `Finished` said, with `num_tokens` tokens: it is
    generated again from its start."""

    response: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class EventsLost(_Timed):
    """The event log may have lost its last events: what instances do, and under which numbers, is unknown.

    All of them are given up and register anew. No number below these three is given out any more.
    """

    next_assignment: int
    next_epoch: int
    next_response: int


@dataclass(frozen=True, slots=True)
class Released(_Timed):
    """The instance let go of the assignment; the response's first `num_tokens` tokens are journalled."""

    instance: str
    assignment: int
    num_tokens: int
    reason: ReleaseReason


@dataclass(frozen=True, slots=True)
class MachineLaunched(_Timed):
    """The provider accepted the launch: money runs."""

    machine: str
    kind: MachineKind | None = None
    """None: not known; it counts as `CoreConfig.instances_per_machine` instances."""


@dataclass(frozen=True, slots=True)
class LaunchFailed(_Timed):
    """The launch did not happen. `retry_after_s`: when asking again makes sense."""

    machine: str
    problem: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class MachineGone(_Timed):
    """The provider reports that the machine no longer exists."""

    machine: str


@dataclass(frozen=True, slots=True)
class RunEnding(_Timed):
    """No more work: everything that runs is taken down."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick(_Timed):
    """Time passed; sent at `Core.next_deadline()`."""


Event = (
    RunStarted
    | CoordinatorRestarted
    | StepStarted
    | RequestArrived
    | RequestWithdrawn
    | StepTrained
    | VersionPublished
    | LeaseReturned
    | TrainerLost
    | InstanceJoined
    | InstanceReady
    | VersionFetched
    | VersionRefused
    | Slept
    | Heartbeat
    | Disconnected
    | Reconnected
    | NoticeReceived
    | InstanceLeft
    | Finished
    | TokensLost
    | EventsLost
    | Released
    | MachineLaunched
    | LaunchFailed
    | MachineGone
    | RunEnding
    | Tick
)


# --- commands --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Order:
    """A command to an instance, under the epoch of its registration."""

    instance: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Assign(_Order):
    """Generate `response` on `instance` from its prompt and whatever tokens are journalled.

    `keep_tokens`: only after so many of them; never set under the policies that live runs may have.
    """

    assignment: int
    response: int
    keep_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Abort(_Order):
    """Stop the assignment and hand over its tokens so far (`Released` answers)."""

    assignment: int


@dataclass(frozen=True, slots=True)
class LoadVersion(_Order):
    """Fetch `version`; once the engine holds no work and is awake, apply and prove it (`InstanceReady`)."""

    version: int


@dataclass(frozen=True, slots=True)
class Sleep(_Order):
    """Free the engine's GPU memory (`Slept` answers). Reserved instances only."""


@dataclass(frozen=True, slots=True)
class Wake(_Order):
    """Take GPU memory again and apply and prove the newest fetched version (`InstanceReady` answers)."""


@dataclass(frozen=True, slots=True)
class Evict(_Order):
    """Close the instance's connection; whatever it sends under this epoch is dropped and counted."""

    cause: LossCause


@dataclass(frozen=True, slots=True)
class DeliverGroup:
    """All responses of `group` are finished: hand them to the trainer."""

    step: int
    group: int


@dataclass(frozen=True, slots=True)
class EndRequest:
    """A request of its own is over, as all its tokens are there or it was quarantined."""

    response: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class GrantLease:
    """The GPU is the trainer's."""

    step: int


@dataclass(frozen=True, slots=True)
class RecallLease:
    """Ask the trainer to free the GPU after its current micro-batch (`LeaseReturned` answers)."""

    step: int


@dataclass(frozen=True, slots=True)
class LaunchMachine:
    """Write the intent, then ask the provider for one spot machine called `machine`."""

    machine: str


@dataclass(frozen=True, slots=True)
class TerminateMachine:
    """End the machine; asked again at each tick until `MachineGone`."""

    machine: str
    reason: str


Command = (
    Assign
    | Abort
    | LoadVersion
    | Sleep
    | Wake
    | Evict
    | DeliverGroup
    | EndRequest
    | GrantLease
    | RecallLease
    | LaunchMachine
    | TerminateMachine
)
