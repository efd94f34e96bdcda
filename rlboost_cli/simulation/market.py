"""The spot market that a job is simulated on: the one that it declares, or one that is assumed.

A job whose spot machines are all processes of this machine declares its market; seed 0 is the one that the
run itself will meet, other seeds draw others like it. Clouds publish no such thing: there the market is
`ASSUMED`, another one for each seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from rlboost_providers.local.market_plan import MarketPlan, plan_for
from rlboost_runtime.job import Job, LocalOffer, Market
from rlboost_runtime.traces import PROFILES, Trace, TraceEvent, generate_trace, load_trace

ASSUMED = "generated-p3"
WINDOW_H = 2.0
"""Hours between the beginnings of the windows of an assumed market."""
LIVES = 60
"""Lives per node of a declared market, on average: after them the last machines stay."""
QUIET_H = 1.0
"""Length of a market in which nothing happens."""


def has_own_market(job: Job) -> bool:
    """Return True if the job says itself when its spot machines come and go."""
    return len(job.rollout.spot.local_offers) == len(job.rollout.spot.any_of)


def market_in_words(job: Job) -> str:
    """Return which market the job is simulated on."""
    if not has_own_market(job):
        return f"the spot market is assumed to be like {ASSUMED}, another one for each seed"
    markets = [offer.market for offer in job.rollout.spot.local_offers]
    return "the spot market is the job's own" if any(markets) else "spot machines stay until the end"


def market_of(job: Job, folder: Path, seed: int, lives: int = LIVES) -> Trace:
    """Return the market of a job whose files are in `folder`. Raises `ConfigError` for an unusable trace."""
    if not has_own_market(job):
        whole = generate_trace(PROFILES[ASSUMED], seed)
        start_s = (WINDOW_H * 3600.0 * seed) % (whole.duration_s - WINDOW_H * 3600.0)
        return whole.window(start_s, whole.duration_s)
    offers = job.rollout.spot.local_offers
    if len(offers) == 1 and offers[0].market is not None and offers[0].market.trace is not None:
        return load_trace(folder / offers[0].market.trace)
    duration_s = max((_span_s(offer.market, lives) for offer in offers), default=0.0) or QUIET_H * 3600.0
    num_nodes = job.rollout.spot.max_instances
    plans = [_plan(offer, num_nodes, folder, seed) for offer in offers]
    nodes = [(plan, name) for k in range(num_nodes) for plan, name in _kth_nodes(plans, k)]
    events = [e for k, (plan, node) in enumerate(nodes) for e in _events(plan, node, f"n{k}", duration_s)]
    events.sort(key=lambda event: event.at_s)
    return Trace(f"{job.name}'s market", "the job file's market", tuple(events), duration_s)


def _span_s(market: Market | None, lives: int) -> float:
    return 0.0 if market is None else lives * (market.mean_lifetime_s + market.mean_absence_s)


def _plan(offer: LocalOffer, num_nodes: int, folder: Path, seed: int) -> MarketPlan | None:
    market = offer.market
    if market is None:
        return None
    return plan_for(market.model_copy(update={"seed": market.seed + 1_000 * seed}), num_nodes, folder)


def _kth_nodes(plans: list[MarketPlan | None], k: int) -> Iterator[tuple[MarketPlan | None, str]]:
    """Yield the k-th node of each offer: simulated nodes take the offers' machines in turn."""
    for plan in plans:
        if plan is None:
            yield None, f"node-{k}"
        elif k < len(plan.nodes):
            yield plan, plan.nodes[k]


def _events(plan: MarketPlan | None, node: str, name: str, end_s: float) -> Iterator[TraceEvent]:
    """Yield a node's life after life, each machine launched as soon as the node can be had."""
    taken_at: float | None = None
    life, number = 0, 0
    while True:
        now = taken_at or 0.0
        start_s = now if plan is None else plan.available_from(node, life, taken_at, now, 0.0)
        if start_s is None or start_s >= end_s:
            return
        yield TraceEvent(start_s, name, "add")
        reclaim = None if plan is None else plan.reclaim(node, life, start_s, 0.0)
        if plan is None or reclaim is None or reclaim.at >= end_s or math.isinf(reclaim.at):
            return
        number += 1
        notice_s = plan.notice_s(number) if reclaim.notice_s is None else reclaim.notice_s
        if notice_s:
            yield TraceEvent(max(start_s, reclaim.at - notice_s), name, "notice")
        yield TraceEvent(reclaim.at, name, "remove")
        taken_at, life = reclaim.at, life + 1
