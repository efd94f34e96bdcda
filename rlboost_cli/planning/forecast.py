"""What a step will take and cost with so many spot instances, from measured rates: pure arithmetic.

A step of W tokens, with n spot instances at s tokens/s each and reserved engines at r tokens/s in all, opens
a seeding window of T seconds and then trains for B seconds while the instances go on. The paper's Algorithm 1
(section 4.1) moves T until neither side waits for the other (t_train^wait = t_remote^wait = 0); there::

    r T + n s (T + B) = W   so   T = max(0, (W - n s B) / (r + n s)),   step = T + B + overhead

With n = 0 that is rollout and training one after the other, as without spot machines. How many instances are
useful is not computed here: the core's own rule is asked (`core.window.seeding_window`,
`core.base.cost_model`), the one that the run will follow: what gives the most tokens per dollar, weights'
egress included, or, without prices, the paper's N_prem.

The arithmetic leaves out the tail of the last, longest responses, hand-overs and machines that are taken
away. So it is held against the very run that the rates are from: what that run's steps took longer is added
to every row. As it is the same with and without spot instances, it makes them look less useful, never more.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlboost_cli.planning.rates import Rates, makes_like_responses
from rlboost_runtime.core.base.cost_model import Prices, StepRates
from rlboost_runtime.core.base.messages import CoreConfig
from rlboost_runtime.core.window.seeding_window import (
    StepObservation,
    instances_to_keep_up,
    worthwhile_instances,
)
from rlboost_runtime.job import Job
from rlboost_runtime.money import MICRO_USD_PER_USD


@dataclass(frozen=True, slots=True)
class ForecastRow:
    """A step with `instances` spot instances all the time; the dollars count the weights' egress too.
    `usd_per_million_tokens` counts trained tokens."""

    instances: float
    seeding_s: float
    step_s: float
    usd_per_hour: float
    usd_per_million_tokens: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """A prediction and what it rests on."""

    rates: Rates
    tokens_per_step: float
    responses_like_before: bool
    """True if responses are taken to be as long as in the measured run; else: as long as allowed."""
    useful_instances: int
    """What the run will hold, by the core's rule, if it can get it."""
    rows: tuple[ForecastRow, ...]
    """For 0 to `max_instances` instances; without the rows that the rates say nothing about."""
    computed_s: float
    """What the arithmetic alone gives for a step of the measured run, which took `rates.step_s`."""

    @property
    def left_out_s(self) -> float:
        """Seconds per step that the arithmetic does not explain; they are in every row."""
        return _left_out(self.rates, self.computed_s)

    def row(self, instances: int) -> ForecastRow | None:
        """Return the row for so many instances, where there is one."""
        return next((row for row in self.rows if row.instances == instances), None)

    @property
    def saving_fraction(self) -> float | None:
        """Share of the cost per token that the useful instances save against none; None: not known."""
        alone, planned = self.row(0), self.row(self.useful_instances)
        if alone is None or planned is None or alone is planned or alone.usd_per_million_tokens == 0:
            return None
        return 1 - planned.usd_per_million_tokens / alone.usd_per_million_tokens

    @property
    def speedup(self) -> float | None:
        """Step time without spot instances over that with the useful ones; None: not known."""
        alone, planned = self.row(0), self.row(self.useful_instances)
        return None if alone is None or planned is None or alone is planned else alone.step_s / planned.step_s


def forecast(job: Job, prices: Prices, rates: Rates, former: Job) -> Forecast:
    """Return the prediction for `job`, given what its like `former` measured."""
    like_before = makes_like_responses(job, former)
    length = rates.tokens_per_response if like_before else float(job.algorithm.max_response_tokens)
    tokens = length * job.algorithm.prompts_per_step * job.algorithm.group_size
    former_algorithm = former.algorithm
    former_tokens = (
        rates.tokens_per_response * former_algorithm.prompts_per_step * former_algorithm.group_size
    )
    computed_s = _step_s(rates, former_tokens, rates.spot_instances)
    more_s = _left_out(rates, computed_s)
    counts = range(job.rollout.spot.max_instances + 1)
    return Forecast(
        rates=rates,
        tokens_per_step=tokens,
        responses_like_before=like_before,
        useful_instances=_useful(job, prices, rates, tokens, more_s),
        rows=tuple(_row(prices, rates, tokens, n, more_s) for n in counts if _tokens_per_s(rates, n) > 0),
        computed_s=computed_s,
    )


def seeding_s(rates: Rates, tokens: float, instances: float) -> float:
    """Return the window at which nobody waits; the rates must say something about so many instances."""
    spot = instances * rates.spot_tokens_per_s
    left = tokens - spot * tokens * rates.train_s_per_token
    return max(0.0, left / (rates.reserved_tokens_per_s + spot))


def _step_s(rates: Rates, tokens: float, instances: float) -> float:
    return seeding_s(rates, tokens, instances) + tokens * rates.train_s_per_token + rates.overhead_s


def _tokens_per_s(rates: Rates, instances: float) -> float:
    """Tokens per second of everybody; 0 where the rates do not say."""
    if instances and not rates.spot_tokens_per_s:
        return 0.0
    return rates.reserved_tokens_per_s + instances * rates.spot_tokens_per_s


def _useful(job: Job, prices: Prices, rates: Rates, tokens: float, more_s: float) -> int:
    """Return where the core's rule settles: asked at the job's maximum, as a run does at first.

    From there it does not move: with more than enough instances the window is 0 and N_prem is W / (s B)
    whatever n is; with fewer, N_prem exceeds n and the maximum holds.
    """
    most = job.rollout.spot.max_instances
    config = CoreConfig(most, reserved_instances=job.trainer.local_engines, prices=prices)
    if most == 0 or _tokens_per_s(rates, most) == 0:
        return most
    window = seeding_s(rates, tokens, most)
    rest = tokens - rates.reserved_tokens_per_s * window
    seen = StepObservation(
        n_prem=most,
        n_hat=most,
        t_train_wait=0.0,
        t_remote_wait=0.0,
        t_train=tokens * rates.train_s_per_token,
        t_remote=rest / (most * rates.spot_tokens_per_s),
    )
    n_prem = instances_to_keep_up(seen, window, config.reserved_instances) if seen.t_train > 0 else None
    step = StepRates(
        tokens=tokens,
        shared_s=tokens / rates.spot_tokens_per_s,
        reserved_engines=rates.reserved_tokens_per_s / rates.spot_tokens_per_s,
        train_s=tokens * rates.train_s_per_token,
        fixed_s=rates.overhead_s + more_s,
    )
    return worthwhile_instances(n_prem, step, rates.weight_bytes, config)


def _left_out(rates: Rates, computed_s: float) -> float:
    return max(0.0, rates.step_s - computed_s)


def _row(prices: Prices, rates: Rates, tokens: float, instances: int, more_s: float) -> ForecastRow:
    step_s = _step_s(rates, tokens, instances) + more_s
    egress_usd = instances * rates.weight_bytes / 1e9 * prices.egress_usd_per_gb
    usd_per_hour = prices.reserved_usd_per_hour + instances * prices.spot_usd_per_hour
    usd_per_hour += egress_usd * 3600 / step_s
    return ForecastRow(
        instances=instances,
        seeding_s=seeding_s(rates, tokens, instances),
        step_s=step_s,
        usd_per_hour=usd_per_hour,
        usd_per_million_tokens=usd_per_hour * step_s / 3600 / tokens * MICRO_USD_PER_USD,
    )
