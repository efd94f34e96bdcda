"""Messages between processes of a run: msgpack over TLS WebSockets, read leniently (unknown keys ignored).

A message that carries an event or a command of the core (`core.base.messages`) has its name plus `Message`;
every other message, such as `Frame` or `Ack`, exists on the wire only.

Three conversations with the coordinator, all dialled by the other side, all starting with a hello that
carries `SCHEMA`:

- agent (`/v1/agent`): `AgentHello` -> `Welcome` | `Refused`; then `Frame`, `HeartbeatMessage`,
  `InstanceReadyMessage`, ... up and `Ack`, `AssignMessage`, `AbortMessage`, `LoadVersionMessage`, ... down.
- trainer (`/v1/trainer`): `TrainerHello` -> `TrainerWelcome`; then `StepStartedMessage`,
  `VersionPublishedMessage`, `StepTrainedMessage`, ... up and `DeliverGroupMessage`,
  `DeliverResponseMessage` (to a trainer that asks for it), `GrantLeaseMessage`, `RecallLeaseMessage` down.
- endpoint (`/v1/requests`): `EndpointHello` -> `EndpointWelcome`; then `GenerateMessage`, `WithdrawMessage`
  up and `TokensMessage` down.

Flat arrays travel as little-endian bytes: token ids i32, logprobs f32, assignments and offsets u32, counts
u16.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

SCHEMA = (2, 4)
"""(major, minor). Peers of the same major understand each other; a higher minor only adds fields."""

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Upper bound of one WebSocket message: a step request of 1,024 prompts of 4,096 tokens takes 16 MiB."""


MAX_AGENT_MESSAGE_BYTES = 16 * 1024 * 1024
"""The same for an agent's: a frame of two million tokens."""

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError)
"""What decoding raises for what is no message: text that is not UTF-8 is not a `DecodeError`."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Size = Annotated[int, msgspec.Meta(ge=1, le=2**48)]
Number = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
"""Never NaN nor infinite: one NaN among the core's deadlines would spoil their order."""
Text = Annotated[str, msgspec.Meta(max_length=100_000)]
Numbers = Annotated[dict[Text, Number], msgspec.Meta(max_length=1_000)]


class Message(msgspec.Struct, frozen=True, tag=True, array_like=False, omit_defaults=True):
    """Base of all messages: tagged with its class name."""


# --- shared parts ----------------------------------------------------------------------------------------


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to sample. Temperature 0 is greedy. Logprobs are of the distribution sampled from."""

    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    """Of one request: only its `stop_token_ids` end it, else only the engine's."""


class WorkItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """One assignment. `token_ids`: i32 prompt followed by the tokens kept so far; `offset`: how many of
    them are kept response tokens; `max_new_tokens`: how many may still be generated (> 0)."""

    assignment: int
    token_ids: bytes
    offset: int
    max_new_tokens: int
    policy_version: int
    sampling: Sampling | None = None
    """How to sample it; None: as the engine samples."""


# --- agent -> coordinator --------------------------------------------------------------------------------


class AgentHello(Message, frozen=True, omit_defaults=True):
    """First message of an agent's connection, sent before there is an engine.

    `max_running` responses are decoded at once, with at most `kv_tokens` of KV cache; how much the engine
    really has comes with `InstanceReadyMessage`.
    `epoch` is the one it was welcomed under before (None: never), with `assignments` the work it still holds.
    """

    schema: tuple[int, int]
    run: Text
    instance: Text
    machine: Text
    pool: Text
    max_running: Size
    kv_tokens: Size
    engine: Text
    epoch: Count | None = None
    assignments: tuple[Count, ...] = ()
    install_s: Numbers = {}
    """How long our installation took on its machine, by phase; {}: none was needed."""
    age_s: Number = 0.0
    """Since the agent's process began."""


class AssignmentEnd(msgspec.Struct, frozen=True, array_like=True):
    """An assignment that ends with this frame. `reason` is a FinishReason or a ReleaseReason value."""

    assignment: Count
    reason: Text
    problem: Text = ""


class Frame(Message, frozen=True, omit_defaults=True):
    """Generated tokens since the last frame, all under one policy version; deltas only.

    Columns, one entry per assignment that moved: `assignments` u32, `offsets` u32 (index in the response of
    the first token of the delta), `counts` u16 (> 0). `token_ids` i32 and `logprobs` f32 hold the deltas end
    to end: both have sum(counts) entries. `endings` apply after the tokens. `seq` grows by one per frame
    within an agent process, and a frame is kept by the agent until an `Ack` of its number or a higher one.
    """

    seq: int
    policy_version: int
    assignments: bytes
    offsets: bytes
    counts: bytes
    token_ids: bytes
    logprobs: bytes
    endings: tuple[AssignmentEnd, ...] = ()


class HeartbeatMessage(Message, frozen=True, omit_defaults=True):
    """Heartbeat, every `Welcome.beat_s`. `engine_progress` grows whenever the engine does anything;
    `running` and `waiting` are numbers of responses that the engine executes, and that it has accepted and
    does not execute. `preempted`: times that it took the KV cache from a running response, since the agent
    began; `kv_free_tokens`: unused KV cache, None where the engine does not report it.

    `pulling`: the version that is being fetched, its bytes that are here, and all of them.
    """

    engine_progress: Count
    running: Count
    waiting: Count
    tokens_per_s: Number
    pulling: tuple[Count, Count, Count] | None = None
    preempted: Count = 0
    kv_free_tokens: Count | None = None


class InstanceReadyMessage(Message, frozen=True, omit_defaults=True):
    """The engine serves `version`; digests and probe agreed. Seconds spent pulling, and until it served it.

    `load_s` of `apply_s` went into the weights, `pause_s` of that without tokens; `start_s` are the phases of
    the engine's start, where it was started for this version.
    """

    version: Count
    pulled_bytes: Count = 0
    pull_s: Number = 0.0
    apply_s: Number = 0.0
    load_s: Number = 0.0
    pause_s: Number = 0.0
    start_s: Numbers = {}
    how: Text = ""
    """How it came: full, delta, linked (from a store on the same machine), here (it was never away)."""
    full_bytes: Count = 0
    sources: Annotated[dict[Text, Count], msgspec.Meta(max_length=1_000)] = {}
    """Bytes that came over the network, by holder: head, bucket, or a peer's instance name."""
    complaints: Annotated[dict[Text, Text], msgspec.Meta(max_length=1_000)] = {}
    """Holders that were given up during the pull, and why."""
    kv_tokens: Count = 0
    """KV cache capacity as the engine allocated it; 0: it does not report it."""
    kv_block_tokens: Count = 0
    max_running: Count = 0
    """Responses decoded at once, as the engine chose by its cache; 0: as in the hello."""


class PeerListening(Message, frozen=True, omit_defaults=True):
    """Others of the zone may pull from this instance; `certificate`: PEM text of its server."""

    url: Text
    certificate: Text
    token: Text = ""
    """Opens this instance's server and nothing else."""


class VersionFetchedMessage(Message, frozen=True):
    """The files of `version` are here; they are applied once the engine holds no request."""

    version: Count


class VersionRefusedMessage(Message, frozen=True, omit_defaults=True):
    """`version` could not be pulled, applied or proved; the engine serves nothing until another load."""

    version: Count
    problem: Text


class SleptMessage(Message, frozen=True):
    """Answer to `SleepMessage`."""


TIMELESS_NOTICE = "SIGTERM"
"""The `source` of a notice that gives no time: its `seconds` are assumed."""


class NoticeReceivedMessage(Message, frozen=True, omit_defaults=True):
    """The machine will be taken in `seconds`; `source` is where that is known from."""

    seconds: Number
    source: Text


class Goodbye(Message, frozen=True, omit_defaults=True):
    """Last message. Every frame was sent before it; where the notice ran out first, some may not have been
    acknowledged, and the engine may have held work."""

    reason: Text


# --- coordinator -> agent --------------------------------------------------------------------------------


class Welcome(Message, frozen=True, omit_defaults=True):
    """Registration accepted. `resumed` False: everything held from before is void and must be dropped."""

    epoch: int
    resumed: bool
    lease_s: float
    beat_s: float
    flush_s: float
    weights_url: str


class Refused(Message, frozen=True, omit_defaults=True):
    """Registration refused; `retry` False means that the agent should end."""

    problem: str
    retry: bool = False
    is_run_over: bool = False
    """The run ends: nothing is wrong with the peer."""


class Ack(Message, frozen=True, omit_defaults=True):
    """All frames up to `seq` are journalled."""

    seq: int


class AssignMessage(Message, frozen=True, omit_defaults=True):
    """New assignments."""

    items: tuple[WorkItem, ...]


class AbortMessage(Message, frozen=True, omit_defaults=True):
    """Stop these; answer with an `AssignmentEnd` "aborted" for each that was still held."""

    assignments: tuple[int, ...]


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """An instance from which others of its zone may pull."""

    instance: str
    url: str
    certificate: str
    token: str = ""


class LoadVersionMessage(Message, frozen=True, omit_defaults=True):
    """Fetch `version`; apply it when the engine is awake and holds no work.

    `digest`: its content digest where that is known; `peers`: who may have it nearby; `part`: (i, n), the
    slice of it to take from the head, (0, 0): none.
    """

    version: int
    digest: str = ""
    peers: tuple[Peer, ...] = ()
    part: tuple[int, int] = (0, 1)


class SleepMessage(Message, frozen=True):
    """Free the GPU."""


class WakeMessage(Message, frozen=True):
    """Take the GPU again, apply and prove the newest fetched version (`InstanceReadyMessage` answers)."""


class Stop(Message, frozen=True, omit_defaults=True):
    """End the agent and its children."""

    reason: str


AgentMessage = (
    AgentHello
    | Frame
    | HeartbeatMessage
    | InstanceReadyMessage
    | VersionFetchedMessage
    | VersionRefusedMessage
    | SleptMessage
    | NoticeReceivedMessage
    | Goodbye
    | PeerListening
)
AgentCommand = (
    Welcome
    | Refused
    | Ack
    | AssignMessage
    | AbortMessage
    | LoadVersionMessage
    | SleepMessage
    | WakeMessage
    | Stop
)


# --- trainer -> coordinator ------------------------------------------------------------------------------


class TrainerHello(Message, frozen=True, omit_defaults=True):
    """First message of the trainer's connection; a later trainer replaces an earlier one.

    `holds_lease`: it is training right now, on a lease granted before the connection was lost.
    """

    schema: tuple[int, int]
    run: str
    boot_id: str
    holds_lease: bool = False


class PromptSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """One prompt of a step: `group` is its index in the step, `token_ids` i32 bytes.

    The rest is for prompts that differ from the others: number of responses and longest response (0: as the
    step says), and how to sample (None: as the engines do).
    """

    group: int
    token_ids: bytes
    num_responses: int = 0
    max_tokens: int = 0
    sampling: Sampling | None = None


class StepStartedMessage(Message, frozen=True, omit_defaults=True, tag="StepRequest"):
    """Roll out `group_size` responses per prompt under `policy_version`; gives the GPU lease back, unless
    `keeps_lease`.

    Idempotent: the same step, version and prompts again deliver what is finished again. With further prompts
    behind them, once all groups have arrived, these are added to the step; a trainer that was killed then
    requests the step without them first. Each step's journal begins with it, so its tag stays the one that
    earlier versions wrote.
    """

    step: int
    policy_version: int
    prompts: tuple[PromptSpec, ...]
    group_size: int
    max_response_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response, also in `generation_config.json` of every version."""
    keeps_lease: bool = False
    """The trainer holds the GPU and goes on training an earlier step."""
    are_episodes: bool = False
    """Environments drive the responses, and the trainer has them: it says when each is over
    (`EpisodeEnded`), and no group is delivered."""
    in_flight_updates: bool = False
    """Its responses go on under versions that are published meanwhile; each segment of a delivered response
    says under which it was made."""
    open_from: int | None = None
    """Earlier steps from this one on stay open, and their responses go first; None: none does. Only with
    `in_flight_updates`."""
    wants_responses: bool = False
    """The trainer has something to do with a response before its group is complete
    (`DeliverResponseMessage`)."""

    def begins(self, other: StepStartedMessage) -> bool:
        """Return True if `other` requests the same, with the same prompts and perhaps more behind them."""
        if self == other:
            return True
        first = other.prompts[: len(self.prompts)]
        return bool(first) and msgspec.structs.replace(other, prompts=first) == self


class VersionPublishedMessage(Message, frozen=True, omit_defaults=True):
    """`version` lies complete in the store; `digest` is its manifest's content digest, sizes in bytes.

    Training stood still for `stop_s` of `publish_s`; `delta_bytes`: of the delta from the version before, 0:
    there is none.
    """

    version: int
    digest: str
    num_bytes: int
    publish_s: float
    stop_s: float = 0.0
    delta_bytes: int = 0


class LeaseReturnedMessage(Message, frozen=True):
    """Answer to `RecallLeaseMessage`: the GPU is free."""


class StepTrainedMessage(Message, frozen=True, omit_defaults=True):
    """The step is trained. `metrics` go to status and the step table as they are.

    `checkpointed`: with a checkpoint; without one, and before `Checkpointed`, a restarted trainer will ask
    for this step again.
    """

    step: int
    wait_s: float
    busy_s: float
    tokens_trained: int
    reward_mean: float | None
    """None: nothing was rolled out."""
    metrics: dict[str, float]
    checkpointed: bool = True


class EpisodeEnded(Message, frozen=True):
    """Episode `number` of a step is over; episodes are counted through the step's groups. `num_tokens`: what
    was sampled in it. Idempotent."""

    step: int
    number: int
    num_tokens: int


class Checkpointed(Message, frozen=True):
    """There is a durable checkpoint after `step`; sent after `StepTrainedMessage`, often during later steps.

    Until then a restarted trainer may ask for `step` again. Idempotent.
    """

    step: int


class Evaluated(Message, frozen=True):
    """The final weights, those after the last `step`, were evaluated: their metrics join the step's.
    Idempotent."""

    step: int
    metrics: dict[str, float]


class RunFinished(Message, frozen=True, omit_defaults=True):
    """All steps are trained and the final model is saved at `model_path`."""

    model_path: str


class RunFailed(Message, frozen=True, omit_defaults=True):
    """The trainer cannot go on, and a restart would not help. `exit_code` is what the CLI then returns."""

    problem: str
    remedy: str
    exit_code: int = 1


# --- coordinator -> trainer ------------------------------------------------------------------------------


class TrainerWelcome(Message, frozen=True, omit_defaults=True):
    """Registration accepted. `published_version` is the newest version known here (None: none yet)."""

    published_version: int | None


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """`num_tokens` tokens in a row made by `instance` under `policy_version`."""

    instance: str
    policy_version: int
    num_tokens: int


class FinishedResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """A complete response: ids i32, logprobs f32 of the same length; segments add up to it."""

    response: int
    token_ids: bytes
    logprobs: bytes
    segments: tuple[Segment, ...]
    finish_reason: str


class StepOpened(Message, frozen=True):
    """A step of episodes is open: turns of its first episode name the response `first_response`."""

    step: int
    first_response: int


class DeliverGroupMessage(Message, frozen=True, omit_defaults=True):
    """All responses of one group, in response order."""

    step: int
    group: int
    responses: tuple[FinishedResponse, ...]


class DeliverResponseMessage(Message, frozen=True, omit_defaults=True):
    """A finished response of a group that is not complete: the `place`-th of the group, from 0. It comes
    again with its group, which alone counts: a damaged journal may have had it generated again."""

    step: int
    group: int
    place: int
    response: FinishedResponse


class GrantLeaseMessage(Message, frozen=True, omit_defaults=True):
    """The GPU is the trainer's until it asks for the next step or answers a recall."""

    step: int
    num_groups: int = 0
    """Groups of the request that this answers; 0: of any. A trainer that has asked for more since, without
    the GPU, has left it to the engines."""


class RecallLeaseMessage(Message, frozen=True, omit_defaults=True):
    """Free the GPU after the current micro-batch and send `LeaseReturnedMessage`."""

    step: int


TrainerMessage = (
    TrainerHello
    | StepStartedMessage
    | VersionPublishedMessage
    | LeaseReturnedMessage
    | StepTrainedMessage
    | EpisodeEnded
    | Checkpointed
    | Evaluated
    | RunFinished
    | RunFailed
)
TrainerCommand = (
    TrainerWelcome
    | StepOpened
    | DeliverGroupMessage
    | DeliverResponseMessage
    | GrantLeaseMessage
    | RecallLeaseMessage
    | Refused
)


# --- endpoint -> coordinator -----------------------------------------------------------------------------


class EndpointHello(Message, frozen=True, omit_defaults=True):
    """First message of the endpoint's connection; it then repeats what it still waits for."""

    schema: tuple[int, int]
    run: str


class GenerateMessage(Message, frozen=True, omit_defaults=True):
    """Generate one response to `token_ids` (i32), of at most `max_tokens` tokens; send it from token `offset`
    on.

    `request_id` names it: a name that is known continues, whoever asked before and however often the
    coordinator has died meanwhile. It is kept until `WithdrawMessage`.
    """

    request_id: str
    token_ids: bytes
    max_tokens: int
    sampling: Sampling
    offset: int = 0
    session: str = ""
    """Requests of one session have a prefix in common: they go where it is cached, if there is room."""
    episode: int | None = None
    """The response of the open step that this is a turn of."""


class WithdrawMessage(Message, frozen=True):
    """Nothing more of this is wanted: it was delivered, or its client left."""

    request_id: str


# --- coordinator -> endpoint -----------------------------------------------------------------------------


class EndpointWelcome(Message, frozen=True, omit_defaults=True):
    """Registration accepted. `version`: the newest policy version (None: none yet)."""

    version: int | None = None


class TokensMessage(Message, frozen=True, omit_defaults=True):
    """Tokens of a request from `offset` on, all on stable storage: ids i32, logprobs f32.

    `versions`: (policy version, number of tokens) in order, adding up to them. With a `finish_reason`
    (FinishReason) they are the last ones. With a `problem` it is over without them: it is not known, or
    what was sent of it is not.
    """

    request_id: str
    offset: int
    token_ids: bytes = b""
    logprobs: bytes = b""
    versions: tuple[tuple[int, int], ...] = ()
    finish_reason: str = ""
    problem: str = ""


EndpointMessage = EndpointHello | GenerateMessage | WithdrawMessage
EndpointCommand = EndpointWelcome | TokensMessage | Refused

_encoder = msgspec.msgpack.Encoder()
endpoint_message_decoder: msgspec.msgpack.Decoder[EndpointMessage] = msgspec.msgpack.Decoder(EndpointMessage)
endpoint_command_decoder: msgspec.msgpack.Decoder[EndpointCommand] = msgspec.msgpack.Decoder(EndpointCommand)
agent_message_decoder: msgspec.msgpack.Decoder[AgentMessage] = msgspec.msgpack.Decoder(AgentMessage)
agent_command_decoder: msgspec.msgpack.Decoder[AgentCommand] = msgspec.msgpack.Decoder(AgentCommand)
trainer_message_decoder: msgspec.msgpack.Decoder[TrainerMessage] = msgspec.msgpack.Decoder(TrainerMessage)
trainer_command_decoder: msgspec.msgpack.Decoder[TrainerCommand] = msgspec.msgpack.Decoder(TrainerCommand)

M = TypeVar("M", bound=Message)


def encode(message: Message) -> bytes:
    """Return the message as bytes."""
    return _encoder.encode(message)
