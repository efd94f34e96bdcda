"""A run's status in Prometheus' text format 0.0.4: what `/metrics` of the coordinator's port answers.

All figures are those of `rlboost status --json`. Names follow Prometheus' conventions: base units, `_total`
for what only grows. Amounts that the books may correct and tokens that a lost machine takes back are gauges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from msgspec import UNSET, UnsetType

from rlboost_runtime.protocol.status import InstanceRow, MachineRow, Status

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("provisioning", "rollout", "training", "serving", "done", "failed", "stopped")

Figure = float | UnsetType | None
Samples = Mapping[tuple[str, ...], Figure]
"""Values by the metric's own label values."""


@dataclass(frozen=True, slots=True)
class PromMetric:
    """A metric: its name without `rlboost_`, and how it is read from a status."""

    name: str
    type: Literal["counter", "gauge"]
    help: str
    read: Callable[[Status], Figure | Samples]
    labels: tuple[str, ...] = ()
    """Its labels beside `run`."""

    @property
    def full_name(self) -> str:
        """Name as Prometheus knows it."""
        return f"rlboost_{self.name}"


def _saving(status: Status) -> Figure:
    found = status.cost.counterfactual
    return None if found is None or isinstance(found, UnsetType) else found.saving_fraction


def _counted(rows: Iterable[InstanceRow | MachineRow]) -> Samples:
    return Counter((row.pool or "", row.state or "") for row in rows)


def _by_pool(status: Status, field: str) -> Samples:
    sums: Counter[tuple[str, ...]] = Counter()
    for row in status.instances:
        sums[(row.pool or "",)] += getattr(row, field)
    return sums


PROM_METRICS = (
    PromMetric("run_state", "gauge", "1 for the state that the run is in, 0 for the others.",
               lambda s: {(each,): float(each == s.state) for each in STATES}, ("state",)),
    PromMetric("run_start_time_seconds", "gauge", "When the run began, in seconds since the Unix epoch.",
               lambda s: s.started_at),
    PromMetric("steps_total", "counter", "Trained steps.", lambda s: s.step),
    PromMetric("steps_target", "gauge", "Steps that the job asks for.", lambda s: s.steps),
    PromMetric("step_responses_finished", "gauge", "Finished responses of the open step.",
               lambda s: s.step_responses.finished if s.step_responses else None),
    PromMetric("step_responses_requested", "gauge", "Requested responses of the open step.",
               lambda s: s.step_responses.requested if s.step_responses else None),
    PromMetric("policy_version", "gauge", "Newest published weight version.", lambda s: s.policy_version),
    PromMetric("reward_mean", "gauge", "Mean reward of the last trained step.", lambda s: s.reward_mean),
    PromMetric("eval_reward_mean", "gauge", "Mean reward of the newest results of each evaluation.",
               lambda s: {(each.name,): each.values.get("reward_mean") for each in s.evaluations},
               ("evaluation",)),
    PromMetric("eval", "gauge", "Newest results of each evaluation, by metric, such as avg_at_8.",
               lambda s: {(each.name, metric): value for each in s.evaluations
                          for metric, value in each.values.items()}, ("evaluation", "metric")),
    PromMetric("rewards_scored_total", "counter", "Responses that have a reward.",
               lambda s: s.rewards.get("scored")),
    PromMetric("reward_failures_total", "counter", "Responses that scored 0 because their reward failed.",
               lambda s: {(why,): n for why, n in s.rewards.items() if why not in ("scored", "failed")},
               ("reason",)),
    PromMetric("tokens_generated", "gauge", "Response tokens; those that are lost leave it again.",
               lambda s: s.tokens.generated),
    PromMetric("tokens_trained_total", "counter", "Response tokens that were trained on.",
               lambda s: s.tokens.trained),
    PromMetric("tokens_migrated_total", "counter", "Tokens that another instance went on from.",
               lambda s: s.tokens.migrated),
    PromMetric("tokens_lost_total", "counter",
               "Tokens lost with machines, estimated; counted since the coordinator's start.",
               lambda s: s.tokens.lost_estimate),
    PromMetric("tokens_redone_total", "counter", "Tokens generated again.", lambda s: s.tokens.redone),
    PromMetric("tokens_per_second", "gauge", "Response tokens per second, mean of 5 seconds.",
               lambda s: s.tokens_per_s),
    PromMetric("responses_requested_total", "counter", "Requested responses.",
               lambda s: s.responses.requested),
    PromMetric("responses_finished_total", "counter", "Finished responses.", lambda s: s.responses.finished),
    PromMetric("responses_migrated_total", "counter", "Responses whose instance was lost or going.",
               lambda s: s.responses.migrated),
    PromMetric("responses_rebalanced_total", "counter", "Responses moved although their instance stayed.",
               lambda s: s.responses.rebalanced),
    PromMetric("responses_quarantined_total", "counter", "Responses given up after three instances failed.",
               lambda s: s.responses.quarantined),
    PromMetric("responses_cancelled_total", "counter", "Cancelled responses.",
               lambda s: s.responses.cancelled),
    PromMetric("responses_in_flight", "gauge", "Responses that instances hold.",
               lambda s: s.responses.in_flight),
    PromMetric("requests_open", "gauge", "Requests of a run that only serves that are open.",
               lambda s: s.serving.open if s.serving else None),
    PromMetric("requests_waiting", "gauge", "Those of them that wait for an engine.",
               lambda s: s.serving.waiting if s.serving else None),
    PromMetric("requests_longest_wait_seconds", "gauge", "How long one of them has waited.",
               lambda s: s.serving.longest_wait_s if s.serving else None),
    PromMetric("requests_answered_total", "counter", "Requests of a run that only serves that were answered.",
               lambda s: s.serving.finished if s.serving else None),
    PromMetric("tokens_served_total", "counter", "Response tokens of requests.",
               lambda s: s.serving.tokens if s.serving else None),
    PromMetric("served_usd_per_million_tokens", "gauge", "What a million served tokens cost, in dollars.",
               lambda s: s.serving.usd_per_million_tokens if s.serving else None),
    PromMetric("preemptions_total", "counter", "Lost spot instances, by how the coordinator learnt of it.",
               lambda s: {("noticed",): s.preemptions.noticed, ("silent",): s.preemptions.silent,
                          ("reset",): s.preemptions.reset}, ("detected",)),
    PromMetric("instances", "gauge", "Instances by pool and state.",
               lambda s: _counted(s.instances), ("pool", "state")),
    PromMetric("instances_useful", "gauge", "Spot instances from which on another one does not pay.",
               lambda s: s.seeding.useful_instances),
    PromMetric("machines", "gauge", "Machines by pool and state, those that have ended included.",
               lambda s: _counted(s.machines), ("pool", "state")),
    PromMetric("kv_cache_tokens", "gauge", "KV cache of all instances, in tokens.",
               lambda s: _by_pool(s, "kv_tokens"), ("pool",)),
    PromMetric("kv_cache_booked_tokens", "gauge", "KV cache that is booked for responses, in tokens.",
               lambda s: _by_pool(s, "kv_booked_tokens"), ("pool",)),
    PromMetric("seeding_window_seconds", "gauge", "Length of the seeding window.",
               lambda s: s.seeding.t_seed_s),
    PromMetric("trainer_connected", "gauge", "1 while the trainer is connected.",
               lambda s: float(s.trainer.connected)),
    PromMetric("cost_usd", "gauge", "What the run has cost, in dollars.", lambda s: s.cost.spent_usd),
    PromMetric("cost_usd_per_hour", "gauge", "What the run costs per hour now, in dollars.",
               lambda s: s.cost.rate_usd_per_hour),
    PromMetric("budget_usd", "gauge", "budget.max_usd of the job, in dollars.", lambda s: s.cost.budget_usd),
    PromMetric("saving_ratio", "gauge", "Saving over machines on demand alone, as a fraction of their cost.",
               _saving),
    PromMetric("warnings", "gauge", "1 for each health warning in force.",
               lambda s: {(each.code,): 1 for each in s.warnings}, ("code",)),
    PromMetric("backup_lag_seconds", "gauge", "Age of the copy of the head at the job's output.",
               lambda s: s.backup.lag_s if s.backup else None),
    PromMetric("backup_lag_bytes", "gauge", "Bytes of the head that its copy at the job's output lacks.",
               lambda s: s.backup.lag_bytes if s.backup else None),
    PromMetric("loop_lag_p99_seconds", "gauge", "Lag of the coordinator's loop, 99th percentile of a minute.",
               lambda s: s.loop_lag_p99_ms / 1000),
)  # fmt: skip
"""Every metric of `/metrics`; docs/metrics.md is written from this table."""


def exposition(status: Status) -> str:
    """Return the metrics of a run, each with HELP and TYPE; one that has no value yet is left out."""
    return "".join(f"{line}\n" for metric in PROM_METRICS for line in _lines(metric, status))


def _lines(metric: PromMetric, status: Status) -> Iterator[str]:
    found = metric.read(status)
    samples: Samples = found if isinstance(found, Mapping) else {(): found}
    known = {labels: value for labels, value in samples.items() if value is not None and value is not UNSET}
    if not known:
        return
    yield f"# HELP {metric.full_name} {metric.help}"
    yield f"# TYPE {metric.full_name} {metric.type}"
    for values, value in sorted(known.items()):
        labels = zip(("run", *metric.labels), (status.run, *values), strict=True)
        text = ",".join(f'{name}="{_escaped(each)}"' for name, each in labels)
        yield f"{metric.full_name}{{{text}}} {value!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
