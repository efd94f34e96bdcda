"""The optimization of a step: micro-batches in, one division and one AdamW step per mini-batch.

Gradients of a mini-batch are accumulated un-normalised and divided once, so neither the split into
micro-batches nor their order changes the result beyond rounding, nor the number of ranks; the same
micro-batches in the same order give the same bits on a CPU.

`accumulate` packs its samples without padding into forward passes of at most `micro_batch_tokens` tokens and
distributes these over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlboost_runtime.job import IMPORTANCE_CAPS, WITHOUT_RATIO, Algorithm, Trainer
from rlboost_runtime.trainer.learn.companions import Critic, Reference
from rlboost_runtime.trainer.learn.logprobs import LogprobModel
from rlboost_runtime.trainer.learn.losses import (
    LossConfig,
    MismatchSums,
    Totals,
    divisor,
    kl_terms,
    mismatch,
    policy_loss,
)
from rlboost_runtime.trainer.learn.packing import micro_batches
from rlboost_runtime.trainer.learn.policy import Forward, Policy
from rlboost_runtime.trainer.learn.ranks import (
    ALONE,
    Accumulate,
    Adam,
    Apply,
    BeginStep,
    Ranks,
    Recompute,
    ScoreReference,
    ScoreValues,
    clip_gradients,
    leave_sharded,
)
from rlboost_runtime.trainer.learn.routing import RoutedPass, Routing
from rlboost_runtime.trainer.learn.sample import NOTHING, Logprobs, Routes, Sample


@dataclass(slots=True)
class PartSums:
    """Sums over a mini-batch's micro-batches on one rank, beside the `Totals`."""

    loss: float = 0.0
    clipped: int = 0
    corrected: int = 0
    entropy: float = 0.0
    kl: float = 0.0
    ordered: int = 0
    margin: float = 0.0
    imbalance: float = 0.0
    """Of a mixture's routers, weighted by choices; `choices` and `moved` as in `RoutedPass`."""
    choices: int = 0
    moved: int = 0
    mismatch: MismatchSums = field(default_factory=MismatchSums)


@dataclass(slots=True)
class StepSums:
    """Sums over a step's updates and all ranks; see `metrics`."""

    staleness: int = 0
    """Updates between the weights that sampled the step's tokens and those it begins with."""
    loss: float = 0.0
    tokens: int = 0
    clipped: int = 0
    corrected: int = 0
    entropy: float = 0.0
    kl: float = 0.0
    pairs: float = 0.0
    """dpo's; `ordered` and `margin` as in `LossSums`."""
    ordered: int = 0
    margin: float = 0.0
    grad_norms: list[float] = field(default_factory=list)
    empty_minibatches: int = 0
    not_finite_minibatches: int = 0
    kernels_refused: int = 0
    imbalance: float = 0.0
    """As in `PartSums`, and `choices` and `moved`, too."""
    choices: int = 0
    moved: int = 0
    mismatch: MismatchSums = field(default_factory=MismatchSums)

    def add(self, totals: Totals, part: PartSums) -> None:
        """Add a mini-batch."""
        self.tokens += int(totals.tokens)
        self.clipped += part.clipped
        self.corrected += part.corrected
        self.entropy += part.entropy
        self.kl += part.kl
        self.pairs += totals.responses / 2
        self.ordered += part.ordered
        self.margin += part.margin
        self.imbalance += part.imbalance
        self.choices += part.choices
        self.moved += part.moved
        self.mismatch += part.mismatch

    def metrics(self) -> dict[str, float]:
        """Return means per token (entropy in nats) and the mean gradient norm before clipping."""
        n = max(self.tokens, 1)
        routers = {
            "router_aux_loss": self.imbalance / max(self.choices, 1),
            "router_replay_moved_share": self.moved / max(self.choices, 1),
        }
        return {
            "loss": self.loss / max(len(self.grad_norms), 1),
            "tokens_trained": float(self.tokens),
            "clip_share": self.clipped / n,
            "importance_clip_share": self.corrected / n,
            "entropy": self.entropy / n,
            "reference_kl": self.kl / n,
            "grad_norm": sum(self.grad_norms) / max(len(self.grad_norms), 1),
            "minibatches_empty": float(self.empty_minibatches),
            "minibatches_not_finite": float(self.not_finite_minibatches),
            "kernels_refused": float(self.kernels_refused),
            **(routers if self.choices else {}),
            **self.mismatch.metrics(self.staleness),
        }


class Learner:
    """Trains a policy: `begin_step`, then `accumulate` and `apply` per mini-batch."""

    def __init__(
        self,
        policy: Policy,
        algorithm: Algorithm,
        trainer: Trainer | None = None,
        ranks: Ranks = ALONE,
        reference: Reference | None = None,
        critic: Critic | None = None,
    ) -> None:
        """`reference`, `critic`: where the job has one (`Algorithm.reference`, `Algorithm.critic`). Raises
        `ConfigError` where the job wants of a mixture's routers what the model has not."""
        assert (critic is None) == (algorithm.critic is None)
        trainer = Trainer() if trainer is None else trainer
        self.policy = policy
        self.critic = critic
        self._reference = reference
        self._routing = Routing.of(policy.scorer, algorithm)
        self.optimizer = Adam.of(policy.model, algorithm, trainer, policy.mover)
        if not policy.mover.moves:  # else the first `Residency.take` decides
            self.optimizer.use_fused(is_on=policy.scorer.kernels.adamw)
        self.sums = StepSums()
        self._algorithm = algorithm
        self._budget = trainer.pass_tokens
        self._ranks = ranks
        self._context = policy.scorer.context
        self._config = loss_config(algorithm)
        self._totals = Totals()
        self._part = PartSums()
        self._updated = False
        self._is_frozen = False
        """True while the critic alone is trained."""
        self._engine_agrees = algorithm.loss != "sft" and algorithm.trained_temperature == (
            algorithm.temperature or 1.0
        )  # its logprobs are of the distribution that is trained

    @property
    def divisor(self) -> float:
        """Divisor of the gradient accumulated so far on this rank, if it were the only one."""
        return divisor(self._totals, self._config)

    @property
    def critic_state(self) -> tuple[Policy, Adam] | None:
        """The critic's model and optimizer."""
        return None if self.critic is None else (self.critic.body, self.critic.optimizer)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of `step`."""
        return self._algorithm.learning_rate_at(step)

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics so far."""
        pairs = _pair_metrics(self.sums) if self._config.kind == "dpo" else {}
        self.sums.kernels_refused = len(self.policy.scorer.kernels.refused)
        values = {} if self.critic is None else self.critic.metrics()
        return self.sums.metrics() | pairs | values

    def begin_step(self, step: int, staleness: int = 0) -> None:
        """Reset sums and gradients; the weights are the step's policy until the first `apply`. `staleness`:
        updates between the weights that sampled its tokens and these; only rank 0 needs it, for metrics."""
        self._ranks.broadcast(BeginStep(step))
        self.sums = StepSums(staleness)
        self._reset()
        self._updated = False
        self._config = replace(self._config, entropy_coef=self._algorithm.entropy_coef_at(step))
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        if self.critic is not None:
            self.critic.begin_step(step)
            self._is_frozen = self.critic.is_warming_up(step)

    def accumulate(self, samples: Sequence[Sample]) -> None:
        """Add the un-normalised gradient of the samples."""
        self._ranks.broadcast(Accumulate(list(samples)))
        for _, batch in self._my_batches(samples):
            self._accumulate(batch)

    @torch.no_grad()
    def recompute(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with old logprobs from the current weights; only before the first `apply`."""
        assert not self._updated, "old logprobs are those of the step's policy"
        self._ranks.broadcast(Recompute(list(samples)))
        routing = None if self._algorithm.router_replay is None else self._routing
        found, routes = self._scored(samples, self.policy.scorer, routing)
        return [
            sample if values is None else replace(sample, old_logprobs=values, routes=route)
            for sample, values, route in zip(samples, found, routes, strict=True)
        ]

    @torch.no_grad()
    def score_reference(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with the reference's logprobs; only where there is a reference."""
        assert self._reference is not None
        self._ranks.broadcast(ScoreReference(list(samples)))
        with self._reference.ready() as scorer:
            found, _ = self._scored(samples, scorer)
        return [
            sample if values is None else replace(sample, reference_logprobs=values)
            for sample, values in zip(samples, found, strict=True)
        ]

    @torch.no_grad()
    def score_values(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with the critic's values; only before the first `apply`."""
        assert self.critic is not None
        self._ranks.broadcast(ScoreValues(list(samples)))
        found, _ = self._scored(samples, self.critic.scorer)
        leave_sharded(self.critic.scorer)  # the policy's pass comes first
        return [
            sample if values is None else replace(sample, values=values)
            for sample, values in zip(samples, found, strict=True)
        ]

    def _scored(
        self, samples: Sequence[Sample], scorer: LogprobModel, routing: Routing | None = None
    ) -> tuple[list[Logprobs | None], list[Routes | None]]:
        """Return the logprobs of each sample's tokens and, with `routing`, its routes; None for those that
        are not trained."""
        order: list[int] = []
        found, routes = [torch.empty(0)], [torch.empty(0, dtype=torch.int16)]
        for numbers, batch in self._my_batches(samples):
            with nullcontext() if routing is None else routing.watched() as routed:
                logprobs_BT = self._forward(batch, scorer).logprobs.cpu()
            if not self._context.leads:
                continue
            for number, sample, logprobs_T in zip(numbers, batch, logprobs_BT, strict=False):
                order.append(number)
                found.append(logprobs_T[: len(sample.token_ids)])
            if routed is not None and numbers:
                routes.append(routed.routes().flatten())
        orders = self._ranks.gather(torch.tensor(order, dtype=torch.long))
        sizes = [len(sample.token_ids) for sample in samples]
        logprobs = _by_sample(sizes, orders, self._ranks.gather(torch.cat(found)))
        if routing is None:
            return logprobs, [None] * len(samples)
        sizes = [
            (len(each.prompt_ids) + size - 1) * routing.width
            for each, size in zip(samples, sizes, strict=True)
        ]
        flat = [each.view(torch.int16) for each in self._ranks.gather(torch.cat(routes).view(torch.uint8))]
        return logprobs, _by_sample(sizes, orders, flat)

    def _my_batches(self, samples: Sequence[Sample]) -> Iterator[tuple[list[int], list[Sample]]]:
        """Yield this rank's share, a forward pass at a time, with the samples' numbers.

        All ranks get the same number of passes.
        """
        usable = [i for i, sample in enumerate(samples) if sample.usable and len(sample.token_ids)]
        together = 2 if self._config.kind == "dpo" else 1  # a pair is never split
        units = [usable[i : i + together] for i in range(0, len(usable), together)]
        sizes = [
            sum(len(samples[i].prompt_ids) + len(samples[i].token_ids) - 1 for i in unit) for unit in units
        ]
        num_rows = self._ranks.num // self._context.num
        batches = micro_batches(units, sizes, self._budget, num_rows)
        for start in range(0, len(batches), num_rows):
            mine = start + self._ranks.rank // self._context.num
            numbers = [i for unit in batches[mine] for i in unit] if mine < len(batches) else []
            yield numbers, [samples[i] for i in numbers] or [NOTHING] * together

    def _forward(self, samples: Sequence[Sample], scorer: LogprobModel | None = None) -> Forward:
        result = self.policy.forward(
            [sample.prompt_ids for sample in samples],
            [sample.token_ids for sample in samples],
            self._algorithm.trained_temperature,
            scorer,
        )
        if not samples[0].usable:
            return replace(result, mask=torch.zeros_like(result.mask))
        if all(sample.sampled is None for sample in samples):
            return result
        sampled = [
            np.ones(len(each.token_ids), np.float32)
            if each.sampled is None
            else each.sampled.astype(np.float32)
            for each in samples
        ]
        return replace(result, mask=result.mask * _table(sampled, result))

    def _accumulate(self, samples: Sequence[Sample]) -> None:
        self._accumulate_policy(samples)
        if self.critic is not None:
            values = self._forward(samples, self.critic.scorer)
            old, returns = (_table_of(samples, name, values) for name in ("values", "returns"))
            self.critic.accumulate(values.logprobs, old, returns, values.mask)

    def _accumulate_policy(self, samples: Sequence[Sample]) -> None:
        if self._routing is None:
            self._add_gradient(samples, None)
            return
        routes = [sample.routes for sample in samples if sample.routes is not None]
        known = routes and len(routes) == len(samples)
        with self._routing.watched(self._routing.table(routes) if known else None) as routed:
            self._add_gradient(samples, routed)

    def _add_gradient(self, samples: Sequence[Sample], routed: RoutedPass | None) -> None:
        with torch.set_grad_enabled(not self._is_frozen):
            result = self._forward(samples)
        mu = _table([sample.logprobs for sample in samples], result)
        old, bypass = self._old(samples, mu, result)
        if all(sample.advantages is None for sample in samples):
            advantages = torch.tensor([sample.advantage for sample in samples], device=mu.device)
        else:
            advantages = _table_of(samples, "advantages", result)
        reference = self._reference_table(samples, result)
        sums = policy_loss(
            result.logprobs, old, mu, advantages, result.mask, self._config, bypass=bypass,
            reference_BT=reference, entropy_BT=result.entropy,
        )  # fmt: skip
        loss = sums.loss
        if routed is not None:
            self._note_routes(routed, sums.totals)
            if coef := self._algorithm.router_aux_loss_coef / self._context.num:
                loss = loss + coef * divisor(sums.totals, self._config) * routed.imbalance()
        if not self._is_frozen:
            loss.backward()  # type: ignore[no-untyped-call]
        if not self._context.leads:
            return
        self._totals += sums.totals
        self._part.loss += float(sums.loss.detach())
        self._part.clipped += sums.clipped
        self._part.corrected += sums.corrected
        self._part.ordered += sums.ordered
        self._part.margin += sums.margin
        self._part.entropy += float((result.entropy.detach() * result.mask).sum())
        if reference is not None:
            kl = kl_terms(result.logprobs.detach(), reference, self._config.kl_estimator)
            self._part.kl += float((kl * result.mask).sum())
        if not bypass and self._engine_agrees:
            self._part.mismatch += mismatch(old, mu, result.mask)

    @torch.no_grad()
    def _note_routes(self, routed: RoutedPass, totals: Totals) -> None:
        if totals.responses:
            self._part.imbalance += float(routed.imbalance()) * routed.num()
            self._part.choices += routed.num()
            self._part.moved += routed.moved()

    def _reference_table(self, samples: Sequence[Sample], like: Forward) -> Tensor | None:
        if self._algorithm.reference is None:
            return None
        known = [sample.reference_logprobs for sample in samples if sample.reference_logprobs is not None]
        assert len(known) == len(samples) or not samples[0].usable, "score_reference comes first"
        return _table(known, like) if len(known) == len(samples) else torch.zeros_like(like.mask)

    def _old(self, samples: Sequence[Sample], mu: Tensor, result: Forward) -> tuple[Tensor, bool]:
        """Return the old logprobs, and True if they are the engine's; losses.py defines "old"."""
        recomputed = [sample.old_logprobs for sample in samples if sample.old_logprobs is not None]
        if len(recomputed) == len(samples):
            return _table(recomputed, result), False
        return (mu, True) if self._updated else (result.logprobs.detach(), False)

    def apply(self) -> None:
        """Divide the gradients once, clip them and step the optimizer.

        A mini-batch without a usable token, or with a gradient that is not finite, is counted and skipped.
        """
        self._ranks.broadcast(Apply())
        totals, part = self._summed()
        self.sums.add(totals, part)
        divide_by = divisor(totals, self._config)
        if divide_by == 0:
            self.sums.empty_minibatches += 1
            self._reset()
            return
        if self.critic is not None:
            self.critic.apply(totals.tokens)
        if self._is_frozen:
            self._reset()
            return
        divide_by_rank = divide_by / self._ranks.num  # sharding has averaged over the ranks
        norm = clip_gradients(self.policy.model, divide_by_rank, self._algorithm.grad_clip)
        if math.isfinite(norm):
            self.optimizer.update()
            self.sums.grad_norms.append(norm)
            self.sums.loss += part.loss / divide_by
            self._updated = True
        else:  # one such update would make every weight NaN
            self.sums.not_finite_minibatches += 1
        self._reset()

    def _summed(self) -> tuple[Totals, PartSums]:
        """Return the mini-batch's sums over all ranks."""
        totals, part, far = self._totals, self._part, self._part.mismatch
        values = self._ranks.sum(
            [totals.tokens, totals.responses, totals.advantage_squares, part.loss, part.clipped,
             part.corrected, part.entropy, part.kl, far.tokens, far.k3, far.absolute, far.weight,
             far.weight_squared, part.ordered, part.margin, part.imbalance, part.choices, part.moved]
        )  # fmt: skip
        (largest,) = self._ranks.largest([far.largest])
        kl, tokens, k3, absolute, weight, squares, ordered, margin = values[7:15]
        imbalance, choices, moved = values[15:]
        mismatches = MismatchSums(int(tokens), k3, absolute, largest, weight, squares)
        return Totals(*values[:3]), PartSums(
            values[3], int(values[4]), int(values[5]), values[6], kl, int(ordered), margin,
            imbalance, int(choices), int(moved), mismatches,
        )  # fmt: skip

    def _reset(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.critic is not None:
            self.critic.reset()
        self._totals, self._part = Totals(), PartSums()


CLIP_LOW = {"gspo": 3e-4, "cispo": 1.0}
CLIP_HIGH = {"dapo": 0.28, "gspo": 4e-4, "cispo": 4.0}
CLIP = 0.2
"""Meaning of `clip_low: null` and `clip_high: null`: the papers' values, cispo's from TRL and SkyRL (a ratio
of at most 5, no lower bound)."""


def loss_config(algorithm: Algorithm) -> LossConfig:
    """Return the loss that the job asks for, its defaults filled in."""
    loss, low, high, cap = algorithm.loss, algorithm.clip_low, algorithm.clip_high, algorithm.importance_cap
    importance = algorithm.importance_sampling
    if loss in WITHOUT_RATIO:
        importance = "none"
    if importance != "none" and cap is None:
        cap = IMPORTANCE_CAPS[importance]
    return LossConfig(
        kind=loss,
        clip_low=CLIP_LOW.get(loss, CLIP) if low is None else low,
        clip_high=CLIP_HIGH.get(loss, CLIP) if high is None else high,
        dual_clip=algorithm.dual_clip,
        importance_cap=None if importance == "none" else cap,
        importance="token" if importance == "none" else importance,
        importance_floor=algorithm.importance_floor,
        max_response_tokens=algorithm.max_response_tokens,
        kl_coef=0.0 if algorithm.kl is None or algorithm.kl.is_in_reward else algorithm.kl.coef,
        kl_estimator="k3" if algorithm.kl is None else algorithm.kl.estimator,
        entropy_coef=algorithm.entropy_coef_at(0),
        beta=algorithm.preference.beta,
    )


def _pair_metrics(sums: StepSums) -> dict[str, float]:
    pairs = max(sums.pairs, 1.0)
    return {
        "pairs": sums.pairs,
        "pairs_ordered_share": sums.ordered / pairs,
        "pair_margin": sums.margin / pairs,
    }


def _table(values: Sequence[Logprobs], like: Forward) -> Tensor:
    """Return values_BT of a value per token, 0 elsewhere."""
    table = np.zeros(like.logprobs.shape, np.float32)
    for row, each in zip(table, values, strict=True):
        row[: len(each)] = each
    return torch.from_numpy(table).to(like.logprobs.device, like.logprobs.dtype)


def _table_of(samples: Sequence[Sample], name: str, like: Forward) -> Tensor:
    """Return the samples' numbers per token of one name; 0 for those that have none, as they are not
    trained."""
    found = [getattr(sample, name) for sample in samples]
    return _table([np.zeros(0, np.float32) if each is None else each for each in found], like)


def _by_sample(
    sizes: Sequence[int], orders: Sequence[Tensor], values: Sequence[Tensor]
) -> list[NDArray[Any] | None]:
    """Return each sample's values, of `sizes`: per rank, numbers of samples and their values in a row."""
    found: list[NDArray[Any] | None] = [None] * len(sizes)
    for order, flat in zip(orders, values, strict=True):
        start = 0
        for number in order.tolist():
            end = start + sizes[number]
            found[number] = flat[start:end].numpy()
            start = end
    return found
