"""The cost report: what a run spent, on what, and what the same would have cost without spot machines.

Pure: everything comes out of the ledger, the budget and the moment given. Guarantees, in whole micro-dollars:

- `total_usd` is the sum of the machines' `cost_usd` plus `other_usd`, and also `useful_usd` plus `wasted_usd`
  plus `other_usd`; so is each machine's `cost_usd` its `useful_usd` plus its `wasted_usd`;
- `steps[].usd` plus `outside_steps_usd` is `total_usd`: a step pays for everything from the end of the step
  before it (the first, and the first of a resumed run: from its own start) to its own end;
- a dollar figure is the decimal number of its micro-dollars, so sums over rounded figures are exact again.

What counts as waste, and how it is measured, is in `coordinator.observers.waste`.

The counterfactual is what the run would have cost on its reserved machine alone: computed from what was
measured, not run. It takes its figures from each step's metrics, where the coordinator put them:
`train_busy_s` (training without waiting), and the rate at which the reserved engines would roll out whole
steps. That is `reserved_alone_tokens_per_s`, with the slow tail in which few responses are left. In runs
without it, it is `reserved_tokens` over `reserved_rollout_s`, as in seeding windows, without a tail. Where
figures are missing the result is null, and `basis` gives the reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from rlboost_runtime.billing.accounts import BillParts, MachineBill, Spending, WasteKind, to_seconds
from rlboost_runtime.billing.counterfactual import ALONE_RATE, Counterfactual, on_demand_only
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.billing.ledger_file import StepRecord
from rlboost_runtime.billing.planned import PlanComparison, PlanDifference, PlannedParts
from rlboost_runtime.job import Budget
from rlboost_runtime.money import MICRO_USD_PER_USD, format_usd, money_places, parse_usd
from rlboost_runtime.protocol.reward_failures import count_failures
from rlboost_runtime.run.reserved import node_of

_POOLS = ("reserved", "spot")
_SERVED = "not computed: requests were served and nothing was trained"


class BudgetState(msgspec.Struct):
    """The job's bounds and what is left."""

    max_usd: float | None = None
    left_usd: float | None = None
    hours_left: float | None = None
    """At the present rate; None where no machine costs anything."""
    max_usd_per_hour: float | None = None


class StepCost(msgspec.Struct):
    """A trained step, from its request on; it pays for all that was spent since the end of the one before,
    but for a resumption in between."""

    step: int
    """From 0 on."""
    usd: float
    tokens: int
    seconds: float
    """Without the time between the end of a run and its resumption, which nothing is billed for."""
    started_at: float
    ended_at: float
    reward_mean: float | None
    usd_per_million_tokens: float | None
    restart_usd: float = 0.0
    """What a resumption before it cost: from the end of the step before to its own start."""


class OutsideSteps(msgspec.Struct):
    """What was spent before the first step, on resumptions, and after the last."""

    before: float = 0.0
    after: float = 0.0
    restarts: float = 0.0


class MachineCost(msgspec.Struct):
    """A machine's bill; `num_lives` counts how often it was launched."""

    id: str
    pool: str
    provider: str
    zone: str
    accelerator: str
    state: str
    started_at: float | None
    ended_at: float | None
    num_lives: int
    billed_s: float
    price_usd_per_hour: float
    price_source: str
    cost_usd: float
    useful_usd: float
    wasted_usd: dict[str, float]


class CostReport(msgspec.Struct):
    """The report; the names of the fields, and their order, are the keys of `rlboost cost --json`."""

    run: str
    as_of: float
    total_usd: float
    rate_usd_per_hour: float
    budget: BudgetState
    compute_usd: dict[str, float]
    """By pool."""
    other_usd: dict[str, float]
    useful_usd: float
    wasted_usd: dict[str, float]
    tokens_trained: int
    usd_per_million_tokens: float | None
    """Of the tokens trained; in a run that trained none, of those served."""
    counterfactual: Counterfactual
    steps: list[StepCost]
    outside_steps_usd: OutsideSteps
    machines: list[MachineCost]
    price_sources: list[str]
    rewards: dict[str, int]
    notes: list[str]
    state: str = "open"
    """How the run ended."""
    tokens_served: int = 0
    """Response tokens of requests outside a step."""
    requests_served: int = 0
    plan: PlanComparison | None = None
    """What the plan said at the launch, and where the difference comes from; None: no plan was kept."""


def cost_report(ledger: Ledger, now_wall: float, run: str, budget: Budget | None = None) -> CostReport:
    """Return the report of `run` up to `now_wall` (seconds since the Unix epoch)."""
    spending = ledger.spending()
    bills = spending.machines(now_wall)
    wasted = ledger.wasted_ns()
    parts = [bill.parts(wasted.get(bill.machine, {})) for bill in bills]
    steps = ledger.steps()
    total, rate = spending.total_micro_usd(now_wall), spending.rate_micro_usd_per_hour()
    pauses_ns = spending.pauses_ns()
    before, restarts, spent = _spent_per_step(spending, steps, pauses_ns)
    tokens = sum(step.tokens for step in steps)
    requests_served, tokens_served = ledger.served()
    rewards = count_failures(step.metrics for step in steps)
    return CostReport(
        run=run,
        as_of=now_wall,
        total_usd=_usd(total),
        rate_usd_per_hour=_usd(rate),
        budget=_budget(budget or Budget(), total, rate),
        compute_usd={pool: _usd(sum(b.cost_micro_usd for b in bills if b.pool == pool)) for pool in _POOLS},
        other_usd={str(kind): _usd(amount) for kind, amount in spending.usage(now_wall).items()},
        useful_usd=_usd(sum(p.useful for p in parts)),
        wasted_usd={str(kind): _usd(sum(p.wasted[kind] for p in parts)) for kind in WasteKind},
        tokens_trained=tokens,
        usd_per_million_tokens=_usd_per_million(total, tokens or tokens_served),
        tokens_served=tokens_served,
        requests_served=requests_served,
        counterfactual=Counterfactual(basis=_SERVED)
        if requests_served and not steps
        else counterfactual(bills, steps, spent),
        steps=[
            _step(step, usd, restart, pauses_ns)
            for step, usd, restart in zip(steps, spent, restarts, strict=True)
        ],
        outside_steps_usd=OutsideSteps(
            _usd(before), _usd(total - before - sum(restarts) - sum(spent)), _usd(sum(restarts))
        ),
        machines=[_machine(b, p) for b, p in zip(bills, parts, strict=True)],
        price_sources=sorted({b.price_source for b in bills}),
        rewards=rewards.as_json(),
        notes=[*_notes(bills), *([rewards.in_words()] if rewards.failed else [])],
    )


def _spent_per_step(
    spending: Spending, steps: Sequence[StepRecord], pauses_ns: Sequence[tuple[int, int]]
) -> tuple[int, list[int], list[int]]:
    """Return micro-dollars before the first step, and per step for a resumption before it and for the step:
    differences of a total that never falls.

    A step that was trained again ended after later ones that were not yet: these pay nothing so far.
    """
    if not steps:
        return 0, [], []
    moments = [to_seconds(steps[0].started_ns)]
    for before, step in zip([None, *steps], steps, strict=False):
        is_first = before is not None and was_resumed(before, step, pauses_ns)
        moments.append(max(moments[-1], to_seconds(step.started_ns)) if is_first else moments[-1])
        moments.append(max(moments[-1], to_seconds(step.ended_ns)))
    totals = spending.totals_micro_usd(moments)
    spent = [after - before for before, after in itertools.pairwise(totals)]
    return totals[0], spent[::2], spent[1::2]


def was_resumed(before: StepRecord, step: StepRecord, pauses_ns: Sequence[tuple[int, int]]) -> bool:
    """Return True if the run had ended and was resumed (`Spending.pauses_ns`) between two steps."""
    return any(before.ended_ns <= end <= step.started_ns for _, end in pauses_ns)


def _budget(budget: Budget, total: int, rate: int) -> BudgetState:
    left = None if budget.max_usd is None else parse_usd(budget.max_usd) - total
    return BudgetState(
        max_usd=budget.max_usd,
        left_usd=None if left is None else _usd(left),
        hours_left=None if left is None or rate == 0 else round(max(0, left) / rate, 4),
        max_usd_per_hour=budget.max_usd_per_hour,
    )


def _step(
    step: StepRecord, micro_usd: int, restart_micro_usd: int, pauses_ns: Sequence[tuple[int, int]]
) -> StepCost:
    paused_ns = sum(max(0, min(end, step.ended_ns) - max(start, step.started_ns)) for start, end in pauses_ns)
    return StepCost(
        step=step.step,
        usd=_usd(micro_usd),
        tokens=step.tokens,
        seconds=(step.ended_ns - step.started_ns - paused_ns) / 1e9,
        started_at=to_seconds(step.started_ns),
        ended_at=to_seconds(step.ended_ns),
        reward_mean=step.reward_mean,
        usd_per_million_tokens=_usd_per_million(micro_usd, step.tokens),
        restart_usd=_usd(restart_micro_usd),
    )


def _machine(bill: MachineBill, parts: BillParts) -> MachineCost:
    return MachineCost(
        id=bill.machine,
        pool=bill.pool,
        provider=bill.provider,
        zone=bill.zone,
        accelerator=bill.accelerator,
        state=str(bill.state),
        started_at=bill.launched_at,
        ended_at=bill.ended_at,
        num_lives=bill.num_lives,
        billed_s=bill.billed_ns / 1e9,
        price_usd_per_hour=_usd(bill.price_micro_usd_per_hour),
        price_source=bill.price_source,
        cost_usd=_usd(bill.cost_micro_usd),
        useful_usd=_usd(parts.useful),
        wasted_usd={str(kind): _usd(amount) for kind, amount in parts.wasted.items()},
    )


def _notes(bills: Sequence[MachineBill]) -> list[str]:
    notes = []
    if any(b.provider == "local" for b in bills):
        notes.append(
            "prices of local machines are the job file's own (price_usd_per_hour): illustrative, not billed"
        )
    if any(b.state == "intended" for b in bills):
        notes.append("machines whose launch is not confirmed yet are listed at no cost")
    if any(b.num_lives > 1 for b in bills):
        notes.append("the run was resumed: the time in between is not billed")
    return notes


def _usd(micro_usd: int) -> float:
    """Return the float nearest to the dollars: printed, it is the exact decimal (up to 9 billion dollars)."""
    return micro_usd / MICRO_USD_PER_USD


def _usd_per_million(micro_usd: int, tokens: int) -> float | None:
    """Micro-dollars per token are dollars per million tokens."""
    return None if tokens == 0 else round(micro_usd / tokens, 6)


def counterfactual(
    bills: Sequence[MachineBill], steps: Sequence[StepRecord], spent: Sequence[int]
) -> Counterfactual:
    """Return what the steps would have cost on the reserved machine; `spent`: micro-dollars per step.

    Of a run without spot machines that is what it paid: nothing is computed, and nothing saved.
    """
    measured = _measured(steps, spent)
    price = sum({_place_of(b): b.all_micro_usd_per_hour for b in bills if b.pool == "reserved"}.values())
    tokens = sum(step.tokens for step in steps)
    if price and tokens and not any(b.pool == "spot" for b in bills):
        return Counterfactual(
            usd_per_million_tokens=_usd_per_million(sum(spent), tokens),
            basis="the run had no spot machines: what it paid is the price on demand",
            usd_per_hour=_usd(price),
        )
    reason = _why_unknown(bills, measured, price)
    if reason is not None:
        return Counterfactual(basis=f"not known: {reason}")
    rate = measured.alone_tokens_per_s or measured.reserved_tokens / measured.reserved_rollout_s
    tail = (
        "the slow tail included, by the step times and lengths measured in this run"
        if measured.alone_tokens_per_s
        else "as in its seeding windows, which have full batches and no slow tail: that favours this figure"
    )
    rollout_s, billed = measured.tokens / rate, measured.spent_micro_usd
    return on_demand_only(
        tokens=measured.tokens,
        seconds=rollout_s + measured.train_busy_s + measured.between_s,
        reserved_micro_usd_per_hour=price,
        spent_micro_usd=billed,
        basis=(
            f"computed, not run: for the {measured.tokens:,} tokens of {measured.num_steps} measured steps"
            f" the reserved machine alone would need {rollout_s:,.1f} s of rollout (at {rate:,.0f} tokens/s,"
            f" {tail}), {measured.train_busy_s:,.1f} s of training and"
            f" {measured.between_s:,.1f} s between steps, at {format_usd(price, 2)} per hour; compared with"
            f" the {format_usd(billed, money_places(_usd(billed)))} spent on these steps"
        ),
    )


@dataclass(frozen=True, slots=True)
class _Measured:
    """Sums over the steps that carry all three figures, and what the run spent on those steps."""

    tokens: int
    spent_micro_usd: int
    train_busy_s: float
    between_s: float
    """Neither rollout nor training: publishing, checkpoints, rewards; 0 where steps do not say."""
    reserved_tokens: float
    reserved_rollout_s: float
    num_steps: int
    alone_tokens_per_s: float
    """Over whole rollouts, tails included; 0: not measured."""


def _measured(steps: Sequence[StepRecord], spent: Sequence[int]) -> _Measured:
    complete = [
        (step, usd)
        for step, usd in zip(steps, spent, strict=True)
        if {"reserved_tokens", "reserved_rollout_s", "train_busy_s"} <= step.metrics.keys()
    ]

    def total(name: str) -> float:
        return sum(step.metrics[name] for step, _ in complete)

    return _Measured(
        tokens=sum(step.tokens for step, _ in complete),
        spent_micro_usd=sum(usd for _, usd in complete),
        train_busy_s=total("train_busy_s"),
        between_s=sum(_between_s(step) for step, _ in complete),
        reserved_tokens=total("reserved_tokens"),
        reserved_rollout_s=total("reserved_rollout_s"),
        num_steps=len(complete),
        alone_tokens_per_s=_alone_tokens_per_s([step for step, _ in complete]),
    )


def _alone_tokens_per_s(steps: Sequence[StepRecord]) -> float:
    known = [(step.tokens, rate) for step in steps if (rate := step.metrics.get(ALONE_RATE, 0.0)) > 0]
    seconds = sum(tokens / rate for tokens, rate in known)
    return sum(tokens for tokens, _ in known) / seconds if seconds else 0.0


def _between_s(step: StepRecord) -> float:
    if not {"rollout_wait_s", "train_wait_s"} <= step.metrics.keys():
        return 0.0
    known = sum(step.metrics[name] for name in ("rollout_wait_s", "train_wait_s", "train_busy_s"))
    return max(0.0, (step.ended_ns - step.started_ns) / 1e9 - known)


def _place_of(bill: MachineBill) -> int:
    """Return which node of the trainer a reserved machine is or was; 0: the head."""
    node = node_of(bill.machine)
    return 0 if node is None else node[0]


def _why_unknown(bills: Sequence[MachineBill], measured: _Measured, price: int) -> str | None:
    if not any(b.pool == "reserved" for b in bills):
        return "the run has no reserved machine"
    if price == 0:
        return "the reserved machine has no price; set trainer.price_usd_per_hour in the job file"
    if measured.num_steps == 0 or measured.tokens == 0:
        return "no step has measured how fast the reserved machine generates and trains"
    if not measured.alone_tokens_per_s and min(measured.reserved_tokens, measured.reserved_rollout_s) <= 0:
        return "the reserved machine generated nothing, so its speed alone was not measured"
    return None


def compared(plan: PlannedParts, report: CostReport) -> PlanComparison:
    """Return the plan beside the bill, and where the difference comes from."""
    trained = len(report.steps)
    body = (plan.total_usd - plan.startup_usd) / plan.steps
    steps_usd = (trained - plan.steps) * body
    share = (plan.total_usd + steps_usd) / plan.total_usd if plan.total_usd else 0.0
    hours = {
        pool: sum(m.billed_s for m in report.machines if m.pool == pool) / 3600.0
        for pool in report.compute_usd
    }
    booted = sum(m.wasted_usd.get("boot", 0.0) for m in report.machines if m.pool == "spot")
    boots = booted - share * plan.boot_usd
    planned = {"reserved": (plan.reserved_usd, plan.hours), "spot": (plan.spot_usd, plan.spot_hours)}
    prices = time = 0.0
    for pool, (usd, planned_hours) in planned.items():
        spent = report.compute_usd.get(pool, 0.0)
        price = usd / planned_hours if planned_hours else None
        at_plan = spent if price is None else price * hours.get(pool, 0.0)
        prices += spent - at_plan
        time += at_plan - share * usd
    other = report.other_usd
    egress, storage = (
        other.get(kind, 0.0) - share * said
        for kind, said in (("egress", plan.egress_usd), ("storage", plan.storage_usd))
    )
    return PlanComparison(
        planned_usd=plan.total_usd,
        planned_hours=plan.hours,
        actual_usd=report.total_usd,
        actual_hours=hours.get("reserved", 0.0),
        difference_usd=PlanDifference(steps_usd, boots, time - boots, prices, egress, storage),
    )
