"""Warnings on the metrics of trained steps: what is measured, when one begins and when it ends."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlboost_runtime.health import limits
from rlboost_runtime.protocol.status import HealthWarning

Row = Mapping[str, float]
"""Metrics of a step by name; any of them may be missing."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of warning: its code, its words and its two limits."""

    code: str
    begins: float
    """Values at this limit or beyond are bad."""
    ends: float
    """Values on the good side of this limit are good; between the limits nothing changes."""
    text: str
    """Sentence with `{value}`, `{limit}` and `{since}`, the first bad step."""
    reason: str
    advice: str
    quantity: str
    """What is compared with the limits."""
    is_low_bad: bool = False
    steps: int = limits.STEPS_IN_A_ROW
    steps_to_end: int = limits.STEPS_IN_A_ROW

    def is_bad(self, value: float) -> bool:
        """Return True at the limit and beyond."""
        return value <= self.begins if self.is_low_bad else value >= self.begins

    def is_good(self, value: float) -> bool:
        """Return True on the good side of the milder limit."""
        return value > self.ends if self.is_low_bad else value < self.ends

    def warning(self, value: float, since_step: int) -> HealthWarning:
        """Return the warning with the measured value."""
        return HealthWarning(
            code=self.code,
            text=self.text.format(value=value, limit=self.begins, since=since_step),
            reason=self.reason,
            advice=self.advice,
            value=value,
            limit=self.begins,
            since_step=since_step,
        )


@dataclass(slots=True)
class Rule:
    """Applies a kind to one step after another."""

    kind: Kind
    measure: Callable[[Row], float | None]
    """None: the step reveals nothing, and changes nothing."""
    active: HealthWarning | None = None
    _bad: int = 0
    _good: int = 0

    def step(self, number: int, row: Row) -> bool:
        """Take in a step, counted from 1; return True if the warning began or ended."""
        value = self.measure(row)
        return value is not None and self.take(number, value)

    def take(self, number: int, value: float) -> bool:
        """Take in a step's value; return True if the warning began or ended."""
        kind = self.kind
        self._bad = self._bad + 1 if kind.is_bad(value) else 0
        self._good = self._good + 1 if kind.is_good(value) else 0
        if self.active is not None:
            if self._good >= kind.steps_to_end:
                self.active = None
                return True
            if self._bad:
                self.active = kind.warning(value, self.active.since_step or number)
        elif self._bad >= kind.steps:
            self.active = kind.warning(value, number - kind.steps + 1)
            return True
        return False


# --- what is measured --------------------------------------------------------------------------------------


def finite(row: Row, name: str) -> float | None:
    """Return a metric; None where it is missing or not finite."""
    value = row.get(name)
    return value if value is not None and math.isfinite(value) else None


def from_level(level: float) -> Callable[[Row], float | None]:
    """Return a measure of how far a step's rewards are from all being `level`."""

    def measure(row: Row) -> float | None:
        mean, std = finite(row, "reward_mean"), finite(row, "reward_std")
        if mean is None or std is None:  # without its spread, a mean of 0 may be that of centred rewards
            return None
        return max(abs(mean - level), std / limits.FLAT_REWARD_STD_FACTOR)

    return measure


def zero_variance(row: Row) -> float | None:
    """Return the share of groups with equal rewards; None where all rewards are 0 or 1, which is reported
    as such."""
    flat = (from_level(0.0)(row), from_level(1.0)(row))
    if any(each is not None and each <= limits.FLAT_REWARD for each in flat):
        return None
    return finite(row, "zero_variance_share")


def compared(name: str, tokens: str = "mismatch_tokens") -> Callable[[Row], float | None]:
    """Return a measure of a metric of two policies; None in steps without `tokens` to compare."""
    return lambda row: finite(row, name) if row.get(tokens, 1.0) else None


def not_finite(row: Row) -> float | None:
    """Return how many updates had a gradient that was not finite."""
    count = row.get("minibatches_not_finite")
    norm = row.get("grad_norm")
    if count is None and norm is None:
        return None
    return max(count or 0.0, 0.0 if norm is None or math.isfinite(norm) else 1.0)


def reserved_idle(row: Row) -> float | None:
    """Return the share of a step in which the reserved GPUs waited for responses."""
    waited, whole = finite(row, "train_wait_s"), finite(row, "step_s")
    return waited / whole if waited is not None and whole else None


class EntropyRatio:
    """Entropy relative to the mean of the first steps."""

    def __init__(self) -> None:
        self._first: list[float] = []

    def __call__(self, row: Row) -> float | None:
        """Return the ratio; None until there is a reference."""
        entropy = finite(row, "entropy")
        if entropy is None:
            return None
        if len(self._first) < limits.ENTROPY_FIRST_STEPS:
            self._first.append(entropy)
            return None
        first = statistics.fmean(self._first)
        return entropy / first if first >= limits.ENTROPY_LEAST else None


class GradNormRatio:
    """Gradient norm relative to the median of the usual ones before it."""

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=limits.GRAD_NORM_WINDOW)

    def __call__(self, row: Row) -> float | None:
        """Return the ratio; None until there are enough steps, and for steps without a gradient."""
        norm = finite(row, "grad_norm")
        if not norm:
            return None
        ratio = None
        if len(self._usual) >= limits.GRAD_NORM_FIRST_STEPS:
            ratio = norm / statistics.median(self._usual)
        if ratio is None or ratio < limits.GRAD_NORM_FACTOR_ENDS:
            self._usual.append(norm)
        return ratio if ratio is None or norm >= limits.GRAD_NORM_LEAST else min(ratio, 1.0)


# --- the kinds ---------------------------------------------------------------------------------------------

REWARD_ZERO = Kind(
    "reward_zero", limits.FLAT_REWARD, limits.FLAT_REWARD_ENDS,
    "Rewards flat at 0: mean within {value:.3f} since step {since} (limit {limit:.2f}).",
    "Without two different rewards in a group, every advantage is 0 and nothing is learnt.",
    "Read responses with `rlboost samples`; check the reward function and the prompt format, or begin with"
    " easier prompts.",
    "distance of the mean reward from 0", is_low_bad=True,
)  # fmt: skip
REWARD_ONE = Kind(
    "reward_one", limits.FLAT_REWARD, limits.FLAT_REWARD_ENDS,
    "Rewards flat at 1: mean within {value:.3f} since step {since} (limit {limit:.2f}).",
    "The policy solves every prompt, so that further steps cost money and teach nothing.",
    "Use harder prompts or end the run; check with `rlboost samples` that the reward is not being gamed.",
    "distance of the mean reward from 1", is_low_bad=True,
)  # fmt: skip
ZERO_VARIANCE = Kind(
    "zero_variance", limits.ZERO_VARIANCE, limits.ZERO_VARIANCE_ENDS,
    "Equal rewards in {value:.0%} of the groups since step {since} (limit {limit:.0%}).",
    "Such groups have advantage 0: they are paid for and teach nothing.",
    "Raise algorithm.group_size, choose prompts of medium difficulty, or set"
    " algorithm.zero_variance_groups: replace with spare_prompts.",
    "zero_variance_share",
)  # fmt: skip
TRUNCATED = Kind(
    "truncated", limits.TRUNCATED, limits.TRUNCATED_ENDS,
    "Length limit reached by {value:.0%} of responses since step {since} (limit {limit:.0%}).",
    "A truncated response has no answer, so its reward measures length.",
    "Raise algorithm.max_response_tokens, or set overlong_penalty_tokens or mask_truncated; check that the"
    " model ends its responses.",
    "truncated_share",
)  # fmt: skip
MISMATCH_KL = Kind(
    "mismatch_kl", limits.MISMATCH_KL, limits.MISMATCH_KL_ENDS,
    "Engine-trainer mismatch {value:.3f} nats/token since step {since} (limit {limit:.2f}).",
    "Samples then come from another policy than the one trained, which biases the gradient.",
    "Give engine and trainer the same dtype, avoid fp8, and keep algorithm.importance_sampling on.",
    "mismatch_kl",
)  # fmt: skip
LAG_KL = Kind(
    "lag_kl", limits.LAG_KL, limits.LAG_KL_ENDS,
    "Policy lag {value:.2f} nats/token since step {since} (limit {limit:.1f}).",
    "So much lies between the policy that sampled and the one that is trained; most of it is clipped away.",
    "Lower algorithm.learning_rate or max_staleness; see effective_sample_share.",
    "lag_kl",
)  # fmt: skip
MISMATCH_TOKEN = Kind(
    "mismatch_token", limits.MISMATCH_ABS, limits.MISMATCH_ABS_ENDS,
    "One token's logprob differs by {value:.1f} nats since step {since} (limit {limit:.0f}).",
    "Rounding does not explain this: the engine has other weights or another sampler.",
    "Compare mismatch_kl with `rlboost metrics`; check engine_args and custom model code.",
    "mismatch_abs_max",
)  # fmt: skip
ENTROPY = Kind(
    "entropy_collapse", limits.ENTROPY_RATIO, limits.ENTROPY_RATIO_ENDS,
    "Entropy at {value:.0%} of that of the first steps since step {since} (limit {limit:.0%}).",
    "Nearly equal responses leave nothing to compare, so that learning stops.",
    "Raise algorithm.clip_high or the temperature, or lower learning_rate, from an earlier checkpoint.",
    "entropy / mean of the first 5 steps", is_low_bad=True,
)  # fmt: skip
NOT_FINITE = Kind(
    "grad_not_finite", 1.0, 1.0,
    "Gradient not finite in {value:.0f} updates of a step, since step {since} (limit {limit:.0f}).",
    "These updates were skipped; their responses were paid for and not learnt from.",
    "Lower learning_rate or set trainer.dtype: float32; check the rewards for extreme values.",
    "minibatches_not_finite", steps=1, steps_to_end=limits.NOT_FINITE_ENDS_AFTER,
)  # fmt: skip
GRAD_NORM = Kind(
    "grad_exploding", limits.GRAD_NORM_FACTOR, limits.GRAD_NORM_FACTOR_ENDS,
    "The gradient norm is {value:.0f} times the usual one since step {since} (limit {limit:.0f}).",
    "Clipping bounds the size of an update, not its wrong direction: training may diverge.",
    "Lower learning_rate and resume from an earlier checkpoint; look at mismatch_kl and length_max.",
    "grad_norm / median of the steps before",
)  # fmt: skip
IDLE_RESERVED = Kind(
    "idle_reserved_gpu", limits.IDLE_RESERVED, limits.IDLE_RESERVED_ENDS,
    "The reserved GPU waits {value:.0%} of a step since step {since} (limit {limit:.0%}).",
    "It is the dearest machine of the run, and waiting is billed like working.",
    "Raise rollout.spot.max_instances, lower max_response_tokens, or allow algorithm.max_staleness: 1.",
    "train_wait_s / step_s",
)  # fmt: skip
SAVING = Kind(
    "spot_does_not_pay", limits.SAVING, limits.SAVING_ENDS,
    "Spot does not pay: saving {value:z.1%} since step {since} (limit {limit:.0%}).",
    "Boots, preemptions or egress cost more than the lower price saves.",
    "See waste by cause in `rlboost cost`; try another region or GPU (`rlboost prices`), or no spot.",
    "saving over on-demand", is_low_bad=True,
)  # fmt: skip
FLEET = Kind(
    "fleet_too_small", limits.FLEET_SHARE, limits.FLEET_SHARE_ENDS,
    "Spot instances at {value:.0%} of the useful number for {minutes:.0f} min (limit {limit:.0%}).",
    "With fewer, each step takes longer and the reserved GPU is billed for the wait.",
    "Add regions or GPU types to rollout.spot.any_of, raise the bid, or set on_demand_floor.",
    "connected / useful spot instances", is_low_bad=True,
)  # fmt: skip

STORM = Kind(
    "preemption_storm", limits.STORM_SHARE, limits.STORM_SHARE_ENDS,
    "{count} spot instances ({value:.0%}) lost within {minutes:.0f} min (limit {limit:.0%}).",
    "Every lost machine is replaced, and boots are billed; until then the rollout is slower.",
    "Wait. On a cloud, more regions or GPU types in rollout.spot.any_of, a higher bid or on_demand_floor"
    " help.",
    "lost / (lost + connected) spot instances",
)  # fmt: skip
STUCK = Kind(
    "stuck", limits.STUCK_S / 60, limits.STUCK_S / 60,
    "Stuck: no new token or step for {minutes:.0f} min (limit {limit:.0f} min).",
    "The head and every living machine are billed while nothing is produced.",
    "See what the run waits for with `rlboost status` and `rlboost logs`; `rlboost down` ends it.",
    "minutes without a new token or step",
)  # fmt: skip
BACKUP = Kind(
    "backup", limits.BACKUP_LAG_S, limits.BACKUP_LAG_ENDS_S,
    "The copy of the head is {value:.0f} s old (limit {limit:.0f} s).",
    "If the head's disk is lost, so is everything since then.",
    "Check the head's rights at output and its upload bandwidth; `rlboost logs RUN backup` has details.",
    "age of the copy at output, in seconds",
)  # fmt: skip
FLEET_KINDS = (SAVING, FLEET, STORM, STUCK, BACKUP)
"""Kinds that are judged on the fleet and the bill, not on a step's metrics."""


def step_rules() -> list[Rule]:
    """Return the rules on a step's metrics, which have seen nothing yet."""
    return [
        Rule(NOT_FINITE, not_finite),
        Rule(REWARD_ZERO, from_level(0.0)),
        Rule(REWARD_ONE, from_level(1.0)),
        Rule(ZERO_VARIANCE, zero_variance),
        Rule(TRUNCATED, lambda row: finite(row, "truncated_share")),
        Rule(MISMATCH_KL, compared("mismatch_kl")),
        Rule(MISMATCH_TOKEN, compared("mismatch_abs_max")),
        Rule(LAG_KL, compared("lag_kl", "lag_tokens")),
        Rule(ENTROPY, EntropyRatio()),
        Rule(GRAD_NORM, GradNormRatio()),
        Rule(IDLE_RESERVED, reserved_idle),
    ]
