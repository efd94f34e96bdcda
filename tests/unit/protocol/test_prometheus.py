"""/metrics: Prometheus' own parser reads the status' figures; the dashboard asks for nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from rlboost_runtime.protocol.prometheus import PROM_METRICS, STATES, exposition
from rlboost_runtime.protocol.status import read_status

DASHBOARD = Path(__file__).resolve().parents[3] / "docs" / "grafana-dashboard.json"
STATUS: dict[str, Any] = {
    "run": 'odd "name" \\ with\nlines',
    "state": "rollout",
    "step": 7,
    "steps": 40,
    "step_responses": {"finished": 3, "requested": 24},
    "policy_version": 7,
    "reward_mean": 0.625,
    "tokens": {"generated": 123456789, "trained": 1200, "migrated": 34, "lost_estimate": 5, "redone": 6},
    "responses": {"requested": 90, "in_flight": 8, "finished": 80, "migrated": 4, "rebalanced": 7,
                  "quarantined": 1, "cancelled": 2},
    "rewards": {"scored": 80, "failed": 3, "timeout": 2, "raised": 1},
    "preemptions": {"noticed": 2, "silent": 1, "reset": 0},
    "seeding": {"t_seed_s": 1.25, "useful_instances": 3, "lease": "ENGINES"},
    "machines": [{"id": "m", "pool": "spot", "state": "running"},
                 {"id": "n", "pool": "spot", "state": "ended"}],
    "instances": [
        {"id": "a", "pool": "spot", "state": "serving", "kv_tokens": 1000, "kv_booked_tokens": 400},
        {"id": "b", "pool": "spot", "state": "serving", "kv_tokens": 1000, "kv_booked_tokens": 1},
        {"id": "c", "pool": "reserved", "state": "training", "kv_tokens": 50, "kv_booked_tokens": 0},
    ],
    "cost": {
        "spent_usd": 12.3456789, "rate_usd_per_hour": 15.79, "budget_usd": 100.0,
        "counterfactual": {"saving_fraction": 0.41},
    },
    "tokens_per_s": 812.5,
    "started_at": 1790000000.25,
    "trainer": {"connected": True},
    "serving": {"open": 12, "waiting": 4, "longest_wait_s": 1.5, "finished": 80, "tokens": 4_000,
                "usd_per_million_tokens": 3.25},
    "backup": {"lag_s": 4.5, "lag_bytes": 1300},
    "warnings": [{"code": "truncated"}, {"code": "stuck"}],
    "evaluations": [
        {"name": "", "step": 6, "values": {"reward_mean": 0.5}},
        {"name": "aime", "step": 6, "values": {"reward_mean": 0.25, "avg_at_8": 0.125}},
    ],
    "loop_lag_p99_ms": 2.5,
}  # fmt: skip
SAME = {
    "backup_lag_seconds": ("backup", "lag_s"),
    "backup_lag_bytes": ("backup", "lag_bytes"),
    "steps_total": ("step",),
    "steps_target": ("steps",),
    "step_responses_finished": ("step_responses", "finished"),
    "step_responses_requested": ("step_responses", "requested"),
    "policy_version": ("policy_version",),
    "reward_mean": ("reward_mean",),
    "rewards_scored_total": ("rewards", "scored"),
    "tokens_generated": ("tokens", "generated"),
    "tokens_trained_total": ("tokens", "trained"),
    "tokens_migrated_total": ("tokens", "migrated"),
    "tokens_lost_total": ("tokens", "lost_estimate"),
    "tokens_redone_total": ("tokens", "redone"),
    "tokens_per_second": ("tokens_per_s",),
    "responses_requested_total": ("responses", "requested"),
    "responses_finished_total": ("responses", "finished"),
    "responses_migrated_total": ("responses", "migrated"),
    "responses_rebalanced_total": ("responses", "rebalanced"),
    "responses_quarantined_total": ("responses", "quarantined"),
    "responses_cancelled_total": ("responses", "cancelled"),
    "responses_in_flight": ("responses", "in_flight"),
    "instances_useful": ("seeding", "useful_instances"),
    "requests_open": ("serving", "open"),
    "requests_waiting": ("serving", "waiting"),
    "requests_longest_wait_seconds": ("serving", "longest_wait_s"),
    "requests_answered_total": ("serving", "finished"),
    "tokens_served_total": ("serving", "tokens"),
    "served_usd_per_million_tokens": ("serving", "usd_per_million_tokens"),
    "seeding_window_seconds": ("seeding", "t_seed_s"),
    "trainer_connected": ("trainer", "connected"),
    "cost_usd": ("cost", "spent_usd"),
    "cost_usd_per_hour": ("cost", "rate_usd_per_hour"),
    "budget_usd": ("cost", "budget_usd"),
    "saving_ratio": ("cost", "counterfactual", "saving_fraction"),
    "run_start_time_seconds": ("started_at",),
}
"""Where `status --json` has a metric's figure."""


def families(status: dict[str, Any]) -> dict[str, Any]:
    """Metrics by name, without `rlboost_`, as Prometheus' parser reads them."""
    found = list(text_string_to_metric_families(exposition(read_status(status))))
    return {sample.name.removeprefix("rlboost_"): family for family in found for sample in family.samples}


def values(family: Any, label: str) -> dict[str, float]:
    return {sample.labels[label]: sample.value for sample in family.samples}


def test_prometheus_reads_the_figures_of_status_json() -> None:
    found = families(STATUS)
    for name, path in SAME.items():
        figure: Any = STATUS
        for key in path:
            figure = figure[key]
        (sample,) = found[name].samples
        assert sample.value == float(figure), name
        assert sample.labels == {"run": STATUS["run"]}
    assert values(found["run_state"], "state") == {each: float(each == "rollout") for each in STATES}
    assert values(found["preemptions_total"], "detected") == STATUS["preemptions"]
    assert values(found["reward_failures_total"], "reason") == {"timeout": 2, "raised": 1}
    assert values(found["kv_cache_tokens"], "pool") == {"spot": 2000, "reserved": 50}
    assert values(found["kv_cache_booked_tokens"], "pool") == {"spot": 401, "reserved": 0}
    assert values(found["eval_reward_mean"], "evaluation") == {"": 0.5, "aime": 0.25}
    assert values(found["eval"], "metric") == {"reward_mean": 0.25, "avg_at_8": 0.125}
    assert values(found["warnings"], "code") == {"truncated": 1, "stuck": 1}
    assert values(found["instances"], "state") == {"serving": 2, "training": 1}
    assert values(found["machines"], "state") == {"running": 1, "ended": 1}
    assert found["loop_lag_p99_seconds"].samples[0].value == 0.0025
    assert set(found) == {metric.name for metric in PROM_METRICS}, "nothing was left out or is unknown"
    assert all(family.documentation for family in found.values())
    types = {metric.name: metric.type for metric in PROM_METRICS}
    assert {name: family.type for name, family in found.items()} == types


def test_a_run_that_has_just_begun_has_metrics_without_made_up_figures() -> None:
    found = families({"run": "new", "state": "provisioning"})
    assert not {"reward_mean", "cost_usd", "budget_usd", "eval_reward_mean", "saving_ratio"} & set(found)
    assert found["steps_total"].samples[0].value == 0


def test_names_follow_the_conventions() -> None:
    names = [metric.full_name for metric in PROM_METRICS]
    assert len(set(names)) == len(names)
    for metric in PROM_METRICS:
        assert re.fullmatch(r"rlboost(_[a-z0-9]+)+", metric.full_name)
        assert metric.full_name.endswith("_total") == (metric.type == "counter"), metric.name
        assert not re.search(r"_(ms|minutes|mib|gb|percent)$", metric.name), "base units only"
        assert metric.help.endswith(".")


def test_every_query_of_the_grafana_dashboard_names_metrics_that_exist() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [each["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    labels = {metric.full_name: {"run", *metric.labels} for metric in PROM_METRICS}
    used = set()
    for query in queries:
        names = re.findall(r"\brlboost_\w+", query)
        assert names, query
        assert set(names) <= set(labels), query
        used |= set(names)
        for grouped in re.findall(r"by \(([^)]*)\)", query):
            assert set(grouped.split(", ")) <= labels[names[0]], query
    assert len(used) > 15
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
