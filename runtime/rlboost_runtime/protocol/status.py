"""A run's status: written once a second by the coordinator, read by the command line and by scripts.

The names of the fields, and their order, are the keys of `status.json` and of `rlboost status --json`. Every
field has a default, so that a status of an older version, or of a run that has just begun, can be read; what
is UNSET there is no key. Light on purpose: `rlboost status` imports it.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class Preparation(msgspec.Struct):
    """What the trainer does before its first step, and how far it is."""

    doing: str = ""
    done: float | None = None
    of: float | None = None
    unit: str = ""
    since: float | None = None


class StepProgress(msgspec.Struct):
    """Responses of the open step."""

    finished: int = 0
    requested: int = 0


class TokenCounts(msgspec.Struct):
    """Response tokens since the run began."""

    generated: int = 0
    trained: int = 0
    migrated: int = 0
    lost_estimate: int = 0
    redone: int = 0
    dropped_late: int = 0
    duplicate: int | UnsetType = UNSET


class ResponseCounts(msgspec.Struct):
    """Responses since the run began."""

    requested: int = 0
    in_flight: int = 0
    finished: int = 0
    migrated: int = 0
    """They went on elsewhere because their instance was lost or about to go."""
    rebalanced: int = 0
    """They went on elsewhere although their instance stayed: at the end of a window, or for balance."""
    quarantined: int = 0
    cancelled: int | UnsetType = UNSET


class PreemptionCounts(msgspec.Struct):
    """Instances that were lost, by how the coordinator learnt of it."""

    noticed: int = 0
    silent: int = 0
    reset: int = 0

    @property
    def total(self) -> int:
        """Lost instances in all."""
        return self.noticed + self.silent + self.reset


class SeedingStatus(msgspec.Struct):
    """The seeding window, the learned number of spot instances, and who holds the reserved GPUs."""

    t_seed_s: float | None = None
    useful_instances: int | None = None
    lease: str | UnsetType = UNSET


class MachineRow(msgspec.Struct):
    """A machine with its bill so far."""

    id: str = "?"
    pool: str | None = None
    provider: str | None = None
    zone: str | None = None
    accelerator: str | None = None
    price_usd_per_hour: float = 0.0
    billed_s: float = 0.0
    cost_usd: float = 0.0
    state: str | None = None
    joined: bool = False
    """True once an agent on it has registered."""
    boot_s: dict[str, float] = {}
    """Seconds by phase, in the order of the phases."""


class PullStatus(msgspec.Struct):
    """How much of a weight version an instance has."""

    version: int = 0
    done_bytes: int = 0
    total_bytes: int = 0


class InstanceRow(msgspec.Struct):
    """An instance: what it serves and how fast."""

    id: str = "?"
    machine: str | None = None
    pool: str | None = None
    state: str | None = None
    policy_version: int | None = None
    in_flight: int = 0
    tokens_per_s: float = 0.0
    uptime_s: float = 0.0
    pulling: PullStatus | None = None
    pull_s: float = 0.0
    apply_s: float = 0.0
    load_s: float = 0.0
    pause_s: float = 0.0
    start_s: dict[str, float] = {}
    """Seconds by phase of the engine's start."""
    max_running: int = 0
    """Responses decoded at once: as configured, or with `auto` as it follows from the measured KV cache."""
    max_running_measured: bool = False
    """True once it follows from the measured KV cache; with `auto` it is an upper bound until then."""
    running: int = 0
    queued: int = 0
    """Responses that its engine has accepted and does not execute yet."""
    engine_preemptions: int = 0
    """Times that its engine took the KV cache from a running response, to compute it again."""
    kv_tokens: int = 0
    """KV cache capacity: as measured by the engine once it serves, until then the most it can be."""
    kv_block_tokens: int | None = None
    """Tokens of a KV cache block; None: not measured."""
    kv_booked_tokens: int = 0
    """What the coordinator has booked for the responses that it holds."""
    kv_free_tokens: int | None = None
    """Unused KV cache, as the engine reports it; None: it does not."""


class OnDemandFigures(msgspec.Struct):
    """The cost report's comparison with on-demand machines only, as of the last trained step."""

    spent_usd_per_million_tokens: float | None = None
    usd_per_million_tokens: float | None = None
    saving_fraction: float | None = None
    basis: str = "estimated"


class CostSoFar(msgspec.Struct):
    """What the run has spent."""

    spent_usd: float | None = None
    rate_usd_per_hour: float = 0.0
    budget_usd: float | None = None
    counterfactual: OnDemandFigures | UnsetType | None = UNSET
    """None before the first trained step."""


class ServingStatus(msgspec.Struct):
    """Requests of a run that only serves, and what their tokens cost."""

    open: int = 0
    """Requests that wait or are generated."""
    waiting: int = 0
    longest_wait_s: float = 0.0
    """Of those that wait for an engine."""
    finished: int = 0
    """Requests since the run began."""
    tokens: int = 0
    """Their response tokens."""
    wanted_instances: int = 0
    """Spot instances that the load wants."""
    usd_per_million_tokens: float | None = None
    """Everything spent so far over `tokens`; None before the first."""


class RecentEvent(msgspec.Struct):
    """Something that happened, in words."""

    at: float = 0.0
    kind: str = ""
    text: str = ""


class HealthWarning(msgspec.Struct):
    """Something about the run that a person should look at, as long as it lasts."""

    code: str = ""
    """Stable name, such as zero_variance (docs/metrics.md)."""
    text: str = ""
    """One sentence with the measured value and the limit."""
    reason: str = ""
    """Why it matters."""
    advice: str = ""
    """What to do."""
    value: float = 0.0
    limit: float = 0.0
    since_step: int | None = None
    """First step that showed it, counted from 1."""


class EvaluationStatus(msgspec.Struct):
    """The newest results of one of the job's evaluations."""

    name: str = ""
    """Empty: the job names none."""
    step: int = 0
    """Step whose metrics have them, counted from 1."""
    updates: int = 0
    """Updates in the weights that were evaluated."""
    values: dict[str, float] = {}
    """reward_mean, reward_best, avg_at_K, pass_at_K, length_mean, truncated_share (docs/metrics.md)."""
    first: dict[str, float] = {}
    """The same of the run's first evaluation."""


class CurriculumStatus(msgspec.Struct):
    """Prompts that the job's `curriculum` passes over at present, as of the last trained step."""

    resting_solved: int = 0
    """All responses of their last visits were correct."""
    resting_unsolved: int = 0
    """None was."""
    passed_over: int = 0
    """Turns in which a prompt was passed over for that step."""


class TrainerStatus(msgspec.Struct):
    """Whether the trainer is connected."""

    connected: bool = False


class BackupStatus(msgspec.Struct):
    """How far the copy of the head at the job's `output` is behind."""

    lag_s: float = 0.0
    """Age of the newest state there, in seconds; before the first, the time since copying began."""
    lag_bytes: int = 0
    """Bytes of journal, event log and the like that are not there."""
    requests: int = 0
    """Writes to the bucket by this head's copying process since it began."""
    stored_bytes: int = 0
    """What the copy takes there, without checkpoints."""
    problem: str = ""
    """Why the last attempt failed."""


class ReplayDigest(msgspec.Struct):
    """Events, the commands that followed, and the commands' digest: a replay of the log gives the same."""

    events: int = 0
    commands: int = 0
    digest: str = ""


class Status(msgspec.Struct, kw_only=True):
    """What a run looks like at one moment."""

    run: str = "RUN"
    state: str = "unknown"
    """provisioning, training, rollout, serving, or how the run ended: done, failed, stopped."""
    phase: str | None = None
    preparing: Preparation | None = None
    ancestors: list[str] = []
    """Of a fork: the checkpoints, RUN@STEP, that it goes back to, the one that it started from first."""
    step: int = 0
    """Trained steps, with those up to the checkpoint that a fork started from."""
    steps: int | None = None
    step_responses: StepProgress | None = None
    serving: ServingStatus | None = None
    """None in a run that trains."""
    policy_version: int | None = None
    reward_mean: float | None = None
    reward_history: list[float | None] = []
    tokens: TokenCounts = msgspec.field(default_factory=TokenCounts)
    responses: ResponseCounts = msgspec.field(default_factory=ResponseCounts)
    rewards: dict[str, int] = {}
    preemptions: PreemptionCounts = msgspec.field(default_factory=PreemptionCounts)
    seeding: SeedingStatus = msgspec.field(default_factory=SeedingStatus)
    machines: list[MachineRow] = []
    instances: list[InstanceRow] = []
    weights: dict[str, Any] = {}
    """What published versions weigh and how they were pulled, and what egress cost by route."""
    cost: CostSoFar = msgspec.field(default_factory=CostSoFar)
    tokens_per_s: float = 0.0
    started_at: float | None = None
    at: float | None = None
    trainer: TrainerStatus = msgspec.field(default_factory=TrainerStatus)
    backup: BackupStatus | None = None
    """None: the job has no `output`, or nothing was copied yet."""
    warnings: list[HealthWarning] = []
    """Warnings in force."""
    evaluations: list[EvaluationStatus] = []
    """Empty before the first evaluation, and without one in the job."""
    curriculum: CurriculumStatus | None = None
    """None before the first trained step, and without a curriculum in the job."""
    events: list[RecentEvent] = []
    replay: ReplayDigest = msgspec.field(default_factory=ReplayDigest)
    journal_problem: str | None = None
    loop_lag_p99_ms: float = 0.0


def read_status(data: dict[str, Any]) -> Status:
    """Return the status of a JSON object; what is missing or null has its default. Raises `ValueError` for a
    value of another type."""
    return msgspec.convert(_without_nulls(data), Status, strict=False)


def _without_nulls(value: Any) -> Any:  # any JSON value
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
