"""How it learns: the loss, its sampling and its steps."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, create_model, model_validator

from rlboost_runtime.job.base import Model, Seed


class Lora(Model):
    """Low-rank adapters: the model's own weights stay, small ones beside them are trained (arXiv
    2106.09685)."""

    rank: int = Field(default=32, ge=1)
    """Rank of the adapters of every linear layer."""
    alpha: int | None = Field(default=None, ge=1)
    """Adapters are scaled by alpha / rank; null: twice the rank."""

    @property
    def scaled_by(self) -> int:
        """`alpha`, its default filled in."""
        return 2 * self.rank if self.alpha is None else self.alpha


_IN: dict[str, Any] = {
    "in": (
        Literal["loss", "reward"],
        Field(
            default="loss",
            description="loss: coef x KL of each token is added to its term, with a gradient; reward: coef x"
            " the sum over the response's tokens, without one, is subtracted from its reward.",
        ),
    )
}
_Place: Any = create_model("_Place", __base__=Model, **_IN)  # no class body can have `in`, a keyword


class Kl(_Place):  # type: ignore[misc]
    """A penalty on the distance from a reference policy."""

    coef: float = Field(default=0.001, ge=0)
    """Weight of the penalty."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per token, with d = log pi_ref - log pi: k1: -d; k2: d^2 / 2; k3: exp(d) - d - 1, never negative, also
    called low_var_kl. k1 in the loss has a gradient of mean 0: use it in the reward."""
    reference: str = "start"
    """start: the model that the run began with; under adapters the frozen weights serve and take no memory.
    Else a model's folder, or the id of one of the hub with the same tokenizer."""

    @property
    def is_in_reward(self) -> bool:
        """True if the penalty is part of the reward."""
        return bool(getattr(self, "in") == "reward")


class EntropyBonus(Model):
    """Rewards the policy for staying undecided: coef x entropy in nats, per token, is added to the
    objective."""

    coef: float = Field(default=0.001, ge=0)
    """Weight in the first step."""
    final_coef: float | None = Field(default=None, ge=0)
    """Weight in the last step, reached linearly; null: it stays the same."""


class Dpo(Model):
    """Preference pairs of the `dpo` loss."""

    beta: float = Field(default=0.1, gt=0)
    """How strongly the policy is held near the reference."""
    reference: str = "start"
    """As in `kl`: start is the model that the run began with; else a folder, or an id of the hub."""


class Rejection(Model):
    """Which responses the `rejection` loss imitates."""

    keep: int = Field(default=1, ge=1)
    """At most so many of a group, those with the highest reward; equal ones in order of their numbers."""
    above: float | None = 0.0
    """Only responses whose reward is above this; null: any."""


class Ppo(Model):
    """The critic of the `ppo` loss: a second model that predicts what is still to come of a response's
    reward."""

    critic: str = "start"
    """What it begins as, with a new head: start: the model that the run began with; else a model's folder, or
    the id of one of the hub with the same tokenizer, such as a reward model."""
    learning_rate: float = Field(default=9.0e-6, gt=0, le=10)
    """Its peak learning rate; schedule, warm-up, weight decay and the gradient's bound are the policy's."""
    warmup_steps: int = Field(default=0, ge=0)
    """First steps in which the critic alone is trained."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per token."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """1: advantages are returns minus values; lower: less variance, more of the critic's errors."""
    value_clip: float | None = Field(default=0.5, gt=0)
    """How far a value may move from that before the step's first update until its gradient is cut; null:
    any."""


Loss = Literal[
    "grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_pp", "ppo", "dpo", "rejection", "sft"
]
WITHOUT_RATIO = ("dpo", "rejection", "sft")
"""Losses without a probability ratio: clips and corrections of it have no meaning there."""


IMPORTANCE_CAPS = {"token": 2.0, "icepop": 5.0, "sequence_mask": 3.0}
"""What `importance_cap: null` stands for: the caps of verl and SkyRL, of IcePop's authors, of TRL."""


class Algorithm(Model):
    """The RL algorithm."""

    loss: Loss = "dapo"
    """grpo: mean per response (arXiv 2402.03300); dapo: mean over tokens, higher upper clip (2503.14476);
    dr_grpo: constant divisor, no std (2503.20783); gspo: one ratio per response (2507.18071); cispo: clipped
    weight, every token keeps its gradient (2506.13585); rloo: leave-one-out baseline (2402.14740);
    reinforce_pp: group baseline, batch std (2501.03262); ppo: advantages from a critic (1707.06347); dpo: the
    best response of a group against the worst (2305.18290, online as in 2405.07863); rejection: the best
    responses are imitated (2304.06767); sft: the data's own responses are imitated, nothing is rolled out."""
    group_size: int = Field(default=8, ge=1, le=10_000)
    """Responses per prompt; at least 2, but for ppo, which compares no responses."""
    prompts_per_step: int = Field(default=128, ge=1, le=1_000_000)
    """Prompts per step; a step has prompts_per_step x group_size responses."""
    steps: int = Field(default=200, ge=1, le=1_000_000_000)
    """Steps of the run: roll out, train, publish."""
    learning_rate: float = Field(default=1.0e-6, gt=0, le=10)
    """Peak learning rate."""
    learning_rate_warmup_steps: int = Field(default=5, ge=0)
    """Steps over which the learning rate rises to its peak."""
    learning_rate_schedule: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = "constant"
    """After the warm-up. linear, cosine: falls until the run ends; warmup_stable_decay: constant, then falls
    linearly over the last learning_rate_decay_steps."""
    learning_rate_floor: float = Field(default=0.0, ge=0, le=1)
    """Share of the peak to which a falling learning rate falls by the end of the run."""
    learning_rate_decay_steps: int | None = Field(default=None, ge=1)
    """warmup_stable_decay: number of last steps in which it falls; null: a tenth of all."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay of matrices; vectors (norms, biases) have none."""
    adam_betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=[0.9, 0.95], min_length=2, max_length=2
    )
    """AdamW's decay rates of the moments."""
    adam_eps: float = Field(default=1.0e-8, gt=0)
    """AdamW's term against division by zero."""
    kl: Kl | None = None
    """Penalty on the distance from a reference policy; null: none."""
    entropy_bonus: EntropyBonus | None = None
    """Bonus for entropy; null: none."""
    ppo: Ppo | None = None
    """Settings of loss ppo; null: its defaults."""
    dpo: Dpo | None = None
    """Settings of loss dpo; null: its defaults."""
    rejection: Rejection | None = None
    """Settings of loss rejection; null: its defaults."""
    advantage_level: Literal["response", "turn"] = "response"
    """Where there is an environment, what has an advantage of its own: response, all of an episode's tokens
    the same; turn, each turn by what the episode earns from it on (docs/agents.md)."""
    minibatches_per_step: int = Field(default=1, ge=1)
    """Optimizer steps per step; must divide prompts_per_step."""
    clip_low: float | None = Field(default=None, gt=0, lt=1)
    """Lower clip of the probability ratio: 1 - clip_low; null: 3e-4 for gspo, none for cispo, else 0.2."""
    clip_high: float | None = Field(default=None, gt=0)
    """Upper clip: 1 + clip_high; null: 0.28 for dapo, 4e-4 for gspo, 4 for cispo, else 0.2."""
    dual_clip: float | None = Field(default=3.0, gt=1)
    """Bound on the loss of tokens with negative advantage (arXiv 1912.09729), not of gspo and cispo; null:
    off."""
    importance_sampling: Literal["token", "icepop", "sequence_mask", "none"] = "token"
    """Correction of the engine's logprobs against the trainer's: token weights, truncated; icepop: tokens
    outside [importance_floor, importance_cap] are dropped; sequence_mask: responses above importance_cap
    are."""
    importance_cap: float | None = Field(default=None, gt=0)
    """Largest weight; null: 2 for token, 5 for icepop, 3 for sequence_mask."""
    importance_floor: float = Field(default=0.5, gt=0, lt=1)
    """Smallest weight of icepop."""
    old_logprobs: Literal["auto", "engine", "recompute"] = "auto"
    """What the ratio compares with after the step's first optimizer step. engine: what the engine reported;
    recompute: a forward pass beforehand, for which all later mini-batches wait; auto: recompute for gspo,
    whose clip is narrower than the mismatch, and for ppo, which waits anyway, else engine."""
    router_replay: Literal["recompute"] | None = None
    """Of a mixture of experts: mini-batches after a step's first send each token to the experts that the
    step's policy chose, as old_logprobs: recompute found them (arXiv 2507.18071, section 5.3); null: to
    those that the present weights prefer."""
    router_aux_loss_coef: float = Field(default=0.0, ge=0)
    """Of a mixture of experts: coefficient of the loss that evens the experts' loads (arXiv 2101.03961,
    equation 4; 1 with even loads); 0: off."""
    zero_variance_groups: Literal["keep", "drop", "replace"] = "keep"
    """Groups whose rewards are all equal, before penalties for length and KL, teach nothing of the task.
    keep: they count in the mean; drop: they do not; replace: other prompts of the same step take their places
    (arXiv 2503.14476, section 3.2): spare_prompts, and what max_refills asks for."""
    spare_prompts: int = Field(default=0, ge=0)
    """Spare prompts per step, rolled out as replacements; unused ones are discarded and counted."""
    max_refills: int = Field(default=0, ge=0, le=100)
    """How often at most a step that lacks groups once all have arrived asks for more prompts: as many as it
    lacks over the share of its groups that teach something, at most prompts_per_step each time. A step that
    lacks groups after that is trained with fewer."""
    mask_truncated: bool = False
    """Leave responses that were cut at max_response_tokens out of the loss; their rewards still count in the
    group."""
    max_prompt_tokens: int = Field(default=512, ge=1, le=10_000_000)
    """Longest prompt, in tokens."""
    max_response_tokens: int = Field(default=4096, ge=1, le=10_000_000)
    """Longest response, in tokens."""
    overlong_penalty_tokens: int = Field(default=0, ge=0)
    """DAPO's soft overlong penalty over the last so many tokens of max_response_tokens; 0: off."""
    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy: every response of a group is the same, so nothing is learnt; for tests."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: the smallest set of tokens with this probability; 1: off."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Upper bound of the gradient's norm."""
    micro_batch_responses: int = Field(default=16, ge=1)
    """Finished responses needed before a micro-batch is trained."""
    lora: Lora | None = None
    """Train adapters instead of all weights; null: all weights. Learning rates are higher then: 1e-5 to
    2e-5."""
    max_staleness: int = Field(default=0, ge=0, le=8)
    """Maximum policy lag, in updates, between sampling and training. 0: synchronous. From 1 on,
    spot machines roll out the next steps while one is trained; without in_flight_updates a response finishes
    under the version that it began with."""
    in_flight_updates: bool = False
    """Load a version as soon as it is published, in the middle of a step: responses continue under it, and
    each token keeps the log-probability that it was sampled with (PipelineRL). Steps are requested before
    the step before them has arrived. Needs max_staleness from 1 on."""
    seed: Seed = 0
    """Seed of the order of prompts, of adapters and of torch. Responses differ from run to run nevertheless
    (docs/comparing.md)."""

    @model_validator(mode="after")
    def _minibatches_divide(self) -> Self:
        prompts, parts = self.prompts_per_step, self.minibatches_per_step
        if left := prompts % parts:  # the search ends soon, as prompts_per_step has a bound
            near = max(divisor for divisor in range(1, min(parts, prompts) + 1) if prompts % divisor == 0)
            raise ValueError(
                f"minibatches_per_step {parts} does not divide prompts_per_step {prompts}"
                f" ({prompts} = {prompts // parts} x {parts} + {left}); write {near}"
            )
        if self.overlong_penalty_tokens >= self.max_response_tokens:
            raise ValueError(
                f"overlong_penalty_tokens {self.overlong_penalty_tokens} is not less than"
                f" max_response_tokens {self.max_response_tokens};"
                f" write at most {self.max_response_tokens - 1}"
            )
        return self

    @model_validator(mode="after")
    def _groups_are_large_enough(self) -> Self:
        if self.group_size == 1 and self.loss not in ("ppo", "sft"):
            raise ValueError(
                f"group_size is 1, but {self.loss} compares the responses to a prompt; write at least 2"
            )
        if self.max_refills and self.max_staleness:
            raise ValueError(
                f"max_refills is {self.max_refills}, but max_staleness is {self.max_staleness}: the next"
                " step is rolled out before this one's rewards are known; remove one of them (spare_prompts"
                " go with both)"
            )
        if self.group_size == 1 and self.zero_variance_groups != "keep":
            raise ValueError(
                f"zero_variance_groups is {self.zero_variance_groups}, but a single response has no variance;"
                " write keep, or a group_size of at least 2"
            )
        return self

    @model_validator(mode="after")
    def _updates_can_be_in_flight(self) -> Self:
        if self.in_flight_updates and not self.max_staleness:
            raise ValueError(
                "in_flight_updates is true, but max_staleness is 0: no version is published while a step is"
                " rolled out; write max_staleness: 1, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _turns_can_be_compared(self) -> Self:
        if self.advantage_level == "turn" and self.loss in ("gspo", "reinforce_pp", *WITHOUT_RATIO):
            raise ValueError(
                f"advantage_level is turn, but loss {self.loss} has one advantage per response; write"
                " response, or another loss: grpo, dapo, dr_grpo, rloo, cispo, ppo"
            )
        return self

    @model_validator(mode="after")
    def _terms_can_be_summed(self) -> Self:
        if self.loss == "reinforce_pp":  # divided by a std that is known only once all is summed
            if self.kl is not None and not self.kl.is_in_reward:
                raise ValueError("kl is in the loss, which reinforce_pp has in the reward; write in: reward")
            if self.entropy_bonus is not None:
                raise ValueError(
                    "entropy_bonus does not go with reinforce_pp; remove it, or write loss: grpo"
                )
        if self.loss == "dpo" and (self.kl is not None or self.entropy_bonus is not None):
            name = "entropy_bonus" if self.kl is None else "kl"
            raise ValueError(f"{name} does not go with dpo, which has dpo.beta for that; remove it")
        if self.loss == "sft" and self.kl is not None and self.kl.is_in_reward:
            raise ValueError("kl is in the reward, but sft has no rewards; write in: loss")
        if self.loss == "sft" and self.max_staleness:
            raise ValueError(f"max_staleness is {self.max_staleness}, but sft rolls nothing out; remove it")
        if self.learning_rate_decay_steps and self.learning_rate_schedule != "warmup_stable_decay":
            raise ValueError(
                "learning_rate_decay_steps is for warmup_stable_decay, but learning_rate_schedule is"
                f" {self.learning_rate_schedule}; write that, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _routes_are_known(self) -> Self:
        if self.router_replay is not None and not self.recomputes_old_logprobs:
            raise ValueError(
                "router_replay is recompute, but old logprobs are not recomputed, with which the routes come;"
                " write old_logprobs: recompute and more than one of minibatches_per_step, or remove it"
            )
        if self.router_aux_loss_coef and self.loss == "reinforce_pp":
            raise ValueError(
                f"router_aux_loss_coef is {self.router_aux_loss_coef}, which does not go with reinforce_pp;"
                " remove it, or write loss: grpo"
            )
        return self

    @property
    def has_reference_model(self) -> bool:
        """True if the reference is a model beside the policy: the base under adapters is none."""
        return self.reference is not None and (self.reference != "start" or self.lora is None)

    @property
    def reference(self) -> str | None:
        """What the policy is held near, by a KL penalty or as dpo does; None: nothing."""
        if self.loss == "dpo":
            return self.preference.reference
        return None if self.kl is None else self.kl.reference

    @property
    def early_passes(self) -> int:
        """Forward passes that a response may have before its group is complete: the reference's and that for
        old logprobs. None where updates are in flight: there the trainer hardly waits for groups."""
        return 0 if self.in_flight_updates else (self.kl is not None) + self.recomputes_old_logprobs

    @property
    def recomputes_old_logprobs(self) -> bool:
        """Later mini-batches of a step need the trainer's own old logprobs."""
        wanted = self.old_logprobs
        return (
            self.loss not in WITHOUT_RATIO
            and self.minibatches_per_step > 1
            and (wanted == "recompute" or (wanted == "auto" and self.loss in ("gspo", "ppo")))
        )

    @property
    def preference(self) -> Dpo:
        """`dpo`, its defaults filled in."""
        return self.dpo or Dpo()

    @property
    def critic(self) -> Ppo | None:
        """`ppo`, its defaults filled in; None without a critic."""
        return (self.ppo or Ppo()) if self.loss == "ppo" else None

    @property
    def trained_temperature(self) -> float:
        """The temperature of the distribution that is trained: the sampled one, but 1 where responses are
        imitated; temperature 0 reads as 1."""
        return 1.0 if self.loss in ("rejection", "sft") else self.temperature or 1.0

    def learning_rate_at(self, step: int, peak: float | None = None) -> float:
        """Return the learning rate of `step`, from 0: a linear warm-up, then the schedule of that name in
        `transformers`. `peak`: None for the policy's."""
        peak = self.learning_rate if peak is None else peak
        start, steps = self.learning_rate_warmup_steps, self.steps
        if step < start:
            return peak * (step + 1) / start
        if self.learning_rate_schedule == "constant":
            return peak
        if self.learning_rate_schedule == "warmup_stable_decay":
            start = max(start, steps - (self.learning_rate_decay_steps or max(1, steps // 10)))
        done = min(1.0, max(0.0, (step - start) / max(1, steps - start)))
        is_cosine = self.learning_rate_schedule == "cosine"
        share = (1 + math.cos(math.pi * done)) / 2 if is_cosine else 1 - done
        return peak * (self.learning_rate_floor + (1 - self.learning_rate_floor) * share)

    def entropy_coef_at(self, step: int) -> float:
        """Return the weight of the entropy in `step`, from 0."""
        bonus = self.entropy_bonus
        if bonus is None:
            return 0.0
        final = bonus.coef if bonus.final_coef is None else bonus.final_coef
        return bonus.coef + (final - bonus.coef) * min(1.0, step / max(1, self.steps - 1))

    @property
    def prompts_asked_per_step(self) -> int:
        """Prompts of a step with its spares."""
        return self.prompts_per_step + self.spare_prompts

    @property
    def most_prompts_per_step(self) -> int:
        """Prompts of a step that is refilled as often as it may be, each time with as many as it may."""
        return self.prompts_asked_per_step + self.max_refills * self.prompts_per_step
