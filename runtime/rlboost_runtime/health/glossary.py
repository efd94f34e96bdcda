"""Every metric of `metrics.jsonl`, in words: unit, meaning, healthy range and what to do.

docs/metrics.md is written from this table. A test compares it with what the trainer writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Literal

from rlboost_runtime.protocol.episode_failures import WORDS as EPISODE_WORDS
from rlboost_runtime.protocol.reward_failures import WORDS, RewardFailure, metric_of

Unit = Literal["", "share", "tokens", "s", "nats", "count", "bytes", "tokens/s"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of a step."""

    name: str
    section: str
    unit: Unit
    meaning: str
    healthy: str = ""
    """Empty: depends on the job."""
    advice: str = ""
    """What to do outside the healthy range; empty: nothing."""
    better: Literal["high", "low", ""] = ""
    """Which value is the best of a run; empty: neither."""


_REWARD, _LENGTH, _GROUPS = "Reward", "Length and ending", "Groups"
_UPDATE, _MISMATCH, _TIME, _STEP = "Update", "Engine and trainer", "Time", "Step"
_EVALUATION, _EPISODES, _CRITIC = "Evaluation", "Episodes", "Critic (ppo)"

_TABLE: tuple[Metric, ...] = (
    Metric("step", _STEP, "count", "Step; from 0 in the file, from 1 in every command."),
    Metric("policy_version", _STEP, "count", "Weight version that generated the responses."),
    Metric(
        "staleness", _STEP, "count", "Updates between the weights that generated and those that are trained.",
        "0, at most algorithm.max_staleness", better="low",
    ),
    Metric(
        "newer_tokens_share", _STEP, "share",
        "Tokens sampled from versions that were published after the step was requested (in_flight_updates).",
    ),
    Metric("learning_rate", _STEP, "", "Learning rate of the step, warm-up included."),
    Metric(
        "prompts_skipped", _STEP, "count", "Prompts left out so far because they are too long.",
        "0", "Raise algorithm.max_prompt_tokens, or shorten the prompts.", "low",
    ),
    Metric(
        "reward_mean", _REWARD, "", "Mean reward of the step's responses, without the overlong penalty.",
        "rising; away from the ends of its range", "Flat: see reward_zero and zero_variance.", "high",
    ),
    Metric("reward_std", _REWARD, "", "Standard deviation of these rewards.", "clearly above 0",
           "0: all responses score alike; check the reward."),
    Metric("reward_max", _REWARD, "", "Highest reward of the step.", "above reward_mean", better="high"),
    Metric("group_reward_std", _REWARD, "", "Standard deviation within a group, averaged over groups.",
           "clearly above 0", "It is what advantages are made of; at 0 nothing is learnt."),
    Metric("group_reward_min", _REWARD, "", "Mean reward of the worst group.", better="high"),
    Metric("group_reward_max", _REWARD, "", "Mean reward of the best group.", better="high"),
    Metric("reward_NAME_mean", _REWARD, "", "Mean of one of several named rewards, without its weight.",
           "rising, unless another one is bought with it", better="high"),
    Metric("responses_scored", _REWARD, "count", "Responses that got a reward.",
           "prompts x group_size"),
    *(
        Metric(metric_of(kind), _REWARD, "count", f"Responses scored 0 because their reward {WORDS[kind]}.",
               "0", "See `rlboost logs RUN reward`; correct the reward function.", "low")
        for kind in RewardFailure
    ),
    Metric("eval_updates", _EVALUATION, "count", "Updates in the weights that were evaluated."),
    Metric("eval_reward_mean", _EVALUATION, "", "Mean reward on prompts that are never trained on.",
           "rising with reward_mean", "Falls while reward_mean rises: the policy overfits its prompts.",
           "high"),
    Metric("eval_reward_best", _EVALUATION, "", "Best response per prompt, averaged.",
           "at or above eval_reward_mean", better="high"),
    Metric("eval_avg_at_K", _EVALUATION, "share", "Correct ones among the K responses per prompt (avg@K).",
           "rising with reward_mean", better="high"),
    Metric("eval_pass_at_K", _EVALUATION, "share",
           "Chance that at least one of K responses to a prompt is correct (pass@K, unbiased).",
           "at or above eval_avg_at_K", "Falls while avg@K rises: the policy loses variety.", "high"),
    Metric("eval_length_mean", _EVALUATION, "tokens", "Mean length of a response."),
    Metric("eval_truncated_share", _EVALUATION, "share", "Responses cut at the evaluation's max_tokens.",
           "below 0.1", "Raise max_tokens of the evaluation.", "low"),
    Metric("zero_variance_share", _GROUPS, "share", "Groups whose rewards are all equal.", "below 0.5",
           "Choose prompts of medium difficulty, raise group_size, or replace such groups.", "low"),
    Metric("groups_trained", _GROUPS, "count", "Groups that were trained on.", "prompts_per_step"),
    Metric("groups_flat", _GROUPS, "count", "Groups whose rewards are all equal, also among spares.",
           "fewer than half", "As for zero_variance_share.", "low"),
    Metric("groups_replaced", _GROUPS, "count",
           "Groups of spare prompts, or of those asked for later, that took the place of flat ones."),
    Metric("groups_spare_unused", _GROUPS, "count", "Spare groups that were rolled out and thrown away.",
           "few", "Lower algorithm.spare_prompts.", "low"),
    Metric("refills", _GROUPS, "count", "Times that the step asked for more prompts, as it lacked groups.",
           "at most max_refills; near 0", "Each one is a wait: raise spare_prompts.", "low"),
    Metric("prompts_resting_solved", _GROUPS, "count",
           "Prompts that the curriculum passes over at present, as all responses of their last visits were"
           " correct.", "", "When nearly all rest: harder prompts, or end the run."),
    Metric("prompts_resting_unsolved", _GROUPS, "count",
           "Prompts that it passes over because no response was.", "falling",
           "Easier prompts, or a warm start.", "low"),
    Metric("prompts_passed_over", _GROUPS, "count",
           "Turns in which the curriculum passed over a prompt for this step."),
    Metric("truncated_share", _LENGTH, "share", "Responses cut at max_response_tokens.", "below 0.1",
           "Raise max_response_tokens, or penalise length.", "low"),
    Metric("quarantined_share", _LENGTH, "share", "Responses given up because engines failed on them.",
           "0", "See the engines' logs.", "low"),
    Metric("migrated_share", _LENGTH, "share", "Responses that more than one instance worked on.",
           "any: migration costs little"),
    Metric("not_finite_share", _LENGTH, "share", "Responses with a logprob or reward that is not finite.",
           "0", "Check the engine's dtype and the reward.", "low"),
    Metric("length_mean", _LENGTH, "tokens", "Mean length of a response.", "steady or slowly rising",
           "A jump to the limit or to a few tokens: read `rlboost samples`."),
    Metric("length_p10", _LENGTH, "tokens", "Length that 10 % of the responses do not exceed."),
    Metric("length_p50", _LENGTH, "tokens", "Median length of a response."),
    Metric("length_p90", _LENGTH, "tokens", "Length that 90 % of the responses do not exceed."),
    Metric("length_max", _LENGTH, "tokens", "Length of the longest response.",
           "below max_response_tokens"),
    Metric("turns_mean", _EPISODES, "count", "Requests to the model per episode.", "below max_turns"),
    Metric("environment_s", _EPISODES, "s", "What the environment takes per turn, without the model."),
    Metric("turns_max", _EPISODES, "count", "The most requests of an episode."),
    Metric("samples_per_episode", _EPISODES, "count", "Samples that an episode was trained as.",
           "1", "Above 1 the chat template rewrites history, or requests overlap (agents.md).", "low"),
    Metric("environment_tokens_mean", _EPISODES, "tokens", "Tokens per episode that the environment wrote."),
    Metric("episodes_limited_share", _EPISODES, "share", "Episodes that asked for more turns or tokens than"
           " they may have.", "below 0.1", "Raise environment.max_turns or algorithm.max_response_tokens.",
           "low"),
    Metric("episodes_tried_again", _EPISODES, "count", "Attempts at episodes that failed or were lost.",
           "near 0", "Read `rlboost logs RUN environment`.", "low"),
    *(
        Metric(f"episodes_left_out_{kind}", _EPISODES, "count",
               f"Episodes that were left out because the environment {words}.", "0",
               "Read `rlboost logs RUN environment`.", "low")
        for kind, words in EPISODE_WORDS.items()
    ),
    Metric("loss", _UPDATE, "", "Mean loss of the step's updates.",
           "near 0; it does not show progress: use reward_mean (sft: it falls)"),
    Metric("pairs", _UPDATE, "count", "dpo: pairs of a best and a worst response that were trained on.",
           "near prompts_per_step", better="high"),
    Metric("pairs_tied", _GROUPS, "count", "dpo: groups without a pair, as their rewards are equal.",
           "fewer than half", "As for zero_variance_share.", "low"),
    Metric("pairs_ordered_share", _UPDATE, "share",
           "dpo: pairs whose best response has the higher log(pi / pi_ref).", "rises above 0.5",
           better="high"),
    Metric("pair_margin", _UPDATE, "", "dpo: beta x the difference of log(pi / pi_ref) of a pair, mean.",
           "rises slowly from 0", "If it jumps: raise dpo.beta or lower learning_rate."),
    Metric("responses_kept", _GROUPS, "count", "rejection: responses that were imitated.", better="high"),
    Metric("groups_without_kept", _GROUPS, "count", "rejection: groups without such a response.",
           "fewer than half", "Raise group_size, choose easier prompts, or lower rejection.above.", "low"),
    Metric("tokens_trained", _UPDATE, "tokens", "Response tokens that the step trained on."),
    Metric("tokens_per_s", _TIME, "tokens/s", "Tokens trained on per second of the step (computed:"
           " tokens_trained / step_s).", better="high"),
    Metric("clip_share", _UPDATE, "share", "Tokens whose probability ratio was clipped.",
           "0 with one update per step, else below 0.2", "Lower learning_rate or minibatches_per_step.",
           "low"),
    Metric("importance_clip_share", _UPDATE, "share", "Tokens whose importance weight was capped or dropped.",
           "below 0.01", "See mismatch_kl.", "low"),
    Metric("entropy", _UPDATE, "nats", "Entropy of the policy per token.",
           "falls slowly; above a tenth of its first value",
           "Collapse: raise clip_high or the temperature, lower learning_rate."),
    Metric("reference_kl", _UPDATE, "nats",
           "KL to the reference per token, by the estimator of algorithm.kl; 0 without one (dpo: k3).",
           "rises slowly; below about 0.1", "Raise algorithm.kl.coef or lower learning_rate.", "low"),
    Metric("grad_norm", _UPDATE, "", "Norm of the gradient before clipping, averaged over updates.",
           "steady; below ten times its median", "Lower learning_rate; look at mismatch_kl."),
    Metric("minibatches_empty", _UPDATE, "count", "Updates skipped because no token was left to train on.",
           "0", "See zero_variance_share and mask_truncated.", "low"),
    Metric("minibatches_not_finite", _UPDATE, "count", "Updates skipped because the gradient was not finite.",
           "0", "Lower learning_rate; use trainer.dtype: float32.", "low"),
    Metric("router_aux_loss", _UPDATE, "",
           "Of a mixture: how unevenly experts are loaded, mean over layers; 1: evenly.",
           "level; below a quarter of the number of experts", "Write or raise router_aux_loss_coef.", "low"),
    Metric("router_replay_moved_share", _UPDATE, "share",
           "Of a mixture: choices of experts that router_replay held to the step's policy's.",
           "below 0.1; 0 without router_replay", "Lower learning_rate or minibatches_per_step.", "low"),
    Metric("kernels_refused", _UPDATE, "count",
           "Fast kernels that did not agree with plain arithmetic on this GPU, and are not used.",
           "0", "`rlboost logs RUN trainer` gives the reason; training is right, but slower.", "low"),
    Metric("value_loss", _CRITIC, "", "The critic's loss: half the mean square of return minus value.",
           "falling from its start, then level", "Raise ppo.learning_rate, or ppo.warmup_steps.", "low"),
    Metric("explained_variance", _CRITIC, "share",
           "1 - var(return - value) / var(return), of the values before the update.",
           "above 0.3 after some tens of steps", "Raise ppo.learning_rate; below 0: lower it.", "high"),
    Metric("value_clip_share", _CRITIC, "share", "Tokens whose value was cut by value_clip.", "below 0.2",
           "Raise ppo.value_clip, or lower ppo.learning_rate.", "low"),
    Metric("value_mean", _CRITIC, "", "Mean value per token, before the update.", "near return_mean",
           "Give it steps: ppo.warmup_steps."),
    Metric("return_mean", _CRITIC, "", "Mean of what values are trained to be."),
    Metric("critic_grad_norm", _CRITIC, "", "Norm of the critic's gradient before clipping.",
           "steady; below ten times its median", "Lower ppo.learning_rate."),
    Metric("mismatch_tokens", _MISMATCH, "tokens",
           "Tokens that the mismatch metrics compare: sampled from the weights that the step begins with."),
    Metric("mismatch_kl", _MISMATCH, "nats",
           "KL of engine against trainer per token (k3 estimate), both with the same weights.",
           "below 0.003; warned from 0.01", "Same dtype in both, no fp8, importance_sampling on.", "low"),
    Metric("mismatch_abs_mean", _MISMATCH, "nats", "Mean difference of the two log-probabilities.",
           "below 0.03", "As for mismatch_kl.", "low"),
    Metric("mismatch_abs_max", _MISMATCH, "nats", "Largest difference of a single token.",
           "below 3; warned from 8", "As for mismatch_kl; check that the engine has the same model.", "low"),
    Metric("lag_tokens", _MISMATCH, "tokens",
           "Tokens sampled from older weights (max_staleness): the mismatch metrics leave them out."),
    Metric("lag_kl", _MISMATCH, "nats",
           "KL of the policy that sampled such tokens against the one that the step begins with, per token"
           " (k3 estimate); the mismatch is in it.",
           "below 0.03; warned from 0.1", "Lower learning_rate or max_staleness.", "low"),
    Metric("effective_sample_share", _MISMATCH, "share", "Effective sample size of the importance weights.",
           "above 0.9", "As for mismatch_kl and lag_kl.", "high"),
    Metric("rollout_wait_s", _TIME, "s", "The trainer's wait while others held the GPUs."),
    Metric("early_share", _TIME, "share",
           "Responses whose reference or old logprobs were computed before their groups were complete."),
    Metric("train_wait_s", _TIME, "s", "Its wait while it held them: idle reserved GPUs.",
           "below half of step_s", "Larger fleet, shorter responses, or max_staleness: 1.", "low"),
    Metric("reward_wait_s", _TIME, "s", "Its wait for rewards.", "near 0",
           "Raise reward_processes, or make the function faster.", "low"),
    Metric("train_s", _TIME, "s", "Forward and backward passes and updates.", better="low"),
    Metric("lease_wait_s", _TIME, "s", "Its wait until the engines had freed the GPUs.", "seconds",
           better="low"),
    Metric("handover_s", _TIME, "s", "Moving weights and optimizer state onto the GPUs.",
           "seconds", better="low"),
    Metric("handover_asleep_s", _TIME, "s", "Moving them back to main memory.",
           better="low"),
    Metric("publish_s", _TIME, "s", "Copying the new version for publication.", "seconds", better="low"),
    Metric("checkpoint_s", _TIME, "s", "Copying the checkpoint while training waits.", "seconds",
           better="low"),
    Metric("checkpoint_write_s", _TIME, "s", "Writing the previous checkpoint, beside the rollout.",
           "below step_s", "Leave checkpoint_every_steps to auto, or use a faster disk.", "low"),
    Metric("step_s", _TIME, "s", "The whole step.", better="low"),
    Metric("gpu_peak_bytes", _TIME, "bytes", "Most GPU memory that the trainer has held.",
           "below the GPU's memory"),
)  # fmt: skip

GLOSSARY: dict[str, Metric] = {metric.name: metric for metric in _TABLE}
"""By name."""

IMPORTANT = (
    *("reward_mean", "eval_reward_mean", "length_mean", "truncated_share", "zero_variance_share", "entropy"),
    *("grad_norm", "mismatch_kl", "tokens_per_s"),
)
"""Shown where no name is given."""


_EVALUATED = re.compile(
    r"eval_(?:(.+)_)?(reward_mean|reward_best|(?:avg|pass)_at_\d+|length_mean|truncated_share)"
)


_NAMED_REWARD = re.compile(r"reward_.+_mean")


def evaluation_metric(name: str) -> tuple[str, str] | None:
    """Return evaluation ("" for one without a name) and metric of `eval_NAME_METRIC`; None for others."""
    found = _EVALUATED.fullmatch(name)
    return None if found is None else (found[1] or "", found[2])


def described(name: str) -> Metric:
    """Return the entry of a metric; one without meaning for a metric of somebody's own trainer."""
    if (parts := evaluation_metric(name)) is not None:
        general = "eval_" + re.sub(r"\d+$", "K", parts[1])
        return replace(GLOSSARY[general], name=name)
    if name not in GLOSSARY and _NAMED_REWARD.fullmatch(name):
        return replace(GLOSSARY["reward_NAME_mean"], name=name)
    return GLOSSARY.get(name) or Metric(name, "", "", "A metric of this run's own trainer.")


def is_important(name: str) -> bool:
    """Return True for a metric that is shown where no name is given."""
    metric = (evaluation_metric(name) or ("", ""))[1]
    if name not in GLOSSARY and _NAMED_REWARD.fullmatch(name):
        return True
    return name in IMPORTANT or metric == "reward_mean" or metric.startswith(("avg_at_", "pass_at_"))


def similar(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names most like `name`."""
    names = sorted({*known, *GLOSSARY})
    return get_close_matches(name, names, n=3, cutoff=0.4) or [each for each in names if name in each][:3]
