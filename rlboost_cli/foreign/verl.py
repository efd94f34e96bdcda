"""veRL: its options, with the defaults of `ppo_trainer.yaml`, and fields of a job file.

Read against veRL of August 2026. Batches count prompts there as here; `ppo_mini_batch_size` does as well.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from rlboost_cli.foreign.mapping import (
    Framework,
    OptionReader,
    OptionRule,
    Untranslatable,
    group_size,
    lora,
    run_name,
    schedule,
    whole,
)

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_OPTIM, _MODEL = f"{_ACTOR}.optim", "actor_rollout_ref.model"
_VAL = f"{_ROLLOUT}.val_kwargs"
_CORRECTION = "algorithm.rollout_correction"
_LENGTH = "reward.reward_kwargs.overlong_buffer_cfg"
_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_SCHEDULES = {"constant": "constant", "cosine": "cosine"}
_LOSSES = {
    ("grpo", "token-mean", True): "dapo",
    ("grpo", "seq-mean-token-mean", True): "grpo",
    ("grpo", "seq-mean-token-sum-norm", False): "dr_grpo",
    ("rloo", "seq-mean-token-sum", True): "rloo",
    ("reinforce_plus_plus_baseline", "token-mean", True): "reinforce_pp",
}
"""By advantage estimator, aggregation and division by the group's std, for the clipped policy loss."""
_NEAREST = {"rloo": "rloo", "rloo_vectorized": "rloo", "reinforce_plus_plus": "reinforce_pp"} | {
    "reinforce_plus_plus_baseline": "reinforce_pp"
}
_SIZES = "RLBoost packs micro-batches itself: trainer.micro_batch_tokens"
_MEMORY = "RLBoost decides by the GPU's memory: trainer.optimizer_offload, trainer.activation_checkpointing"
_MACHINES = "follows from your machines: trainer, rollout.spot"


def _loss(options: OptionReader) -> str:
    """Return `algorithm.loss`; where none is the same, the nearest, with the differences listed."""
    estimator = str(options["algorithm.adv_estimator"])
    mode = options[f"{_ACTOR}.policy_loss.loss_mode"]
    aggregation = options[f"{_ACTOR}.loss_agg_mode"]
    if options.given.get(f"{_ACTOR}.use_token_level_loss") is False:
        aggregation = "seq-mean-token-mean"
    by_std = bool(options["algorithm.norm_adv_by_std_in_grpo"]) or not estimator.startswith("grpo")
    if estimator == "gae":
        if mode != "vanilla":
            options.leave(f"{_ACTOR}.policy_loss.loss_mode", "ppo has the clipped policy loss")
        if aggregation != "token-mean":
            options.leave(f"{_ACTOR}.loss_agg_mode", "ppo is the mean over tokens")
        return "ppo"
    if mode in ("gspo", "cispo") and estimator == "grpo":
        if not by_std:
            options.leave("algorithm.norm_adv_by_std_in_grpo", f"{mode} divides by the group's std here")
        return str(mode)
    if mode != "vanilla":
        options.leave(f"{_ACTOR}.policy_loss.loss_mode", "no such policy loss; the clipped one is used")
    if found := _LOSSES.get((estimator, aggregation, by_std)):
        return found
    if estimator in _NEAREST:
        nearest = _NEAREST[estimator]
    elif estimator == "grpo":
        nearest = (
            "grpo" if aggregation == "seq-mean-token-mean" and by_std else "dapo" if by_std else "dr_grpo"
        )
    else:
        options.leave("algorithm.adv_estimator", "no such estimator; the job has loss: dapo")
        return "dapo"
    if estimator == "reinforce_plus_plus":
        options.leave("algorithm.adv_estimator", "reinforce_pp has the group's mean as a baseline")
    else:
        options.leave(
            f"{_ACTOR}.loss_agg_mode", f"with this estimator the nearest is {nearest}, by another divisor"
        )
    return nearest


def _ppo(options: OptionReader) -> Any:
    """Return `algorithm.ppo`."""
    if options["algorithm.adv_estimator"] != "gae":
        return ...
    for name in ("ppo_epochs", "ppo_mini_batch_size", "loss_agg_mode"):
        wanted = options[f"{_ACTOR}.{name}"]
        if name == "loss_agg_mode":
            wanted = "token-mean"
        if options.given.get(f"critic.{name}", wanted) != wanted:
            options.leave(f"critic.{name}", f"critic and policy take the same updates, over {wanted}")
    path = options["critic.model.path"]
    found = {} if path in (None, options[f"{_MODEL}.path"]) else {"critic": path}
    warm_up = options["trainer.critic_warmup"]
    if warm_up > 1:
        found["warmup_steps"] = warm_up - 1
    return found | {
        "learning_rate": options["critic.optim.lr"],
        "gamma": options["algorithm.gamma"],
        "gae_lambda": options["algorithm.lam"],
        "value_clip": options["critic.cliprange_value"],
    }


def _group_size(options: OptionReader) -> int:
    size: int = options[f"{_ROLLOUT}.n"]
    return size if options["algorithm.adv_estimator"] == "gae" else group_size(size)


def _kl(options: OptionReader) -> Any:
    """Return `algorithm.kl`."""
    in_loss, in_reward = options[f"{_ACTOR}.use_kl_loss"], options["algorithm.use_kl_in_reward"]
    loss_coef, reward_coef = options[f"{_ACTOR}.kl_loss_coef"], options["algorithm.kl_ctrl.kl_coef"]
    if in_reward and options["algorithm.kl_ctrl.type"] != "fixed":
        options.leave("algorithm.kl_ctrl.type", "the weight is fixed here")
    if in_loss and in_reward:
        options.leave("algorithm.use_kl_in_reward", "one KL only; the one in the loss is kept")
    if in_loss:
        place = "loss"
        if str(options["algorithm.adv_estimator"]).startswith("reinforce"):
            options.leave(f"{_ACTOR}.use_kl_loss", "reinforce_pp has its KL in the reward")
            place = "reward"
        return _kl_section(options, f"{_ACTOR}.kl_loss_type", loss_coef, place)
    return _kl_section(options, "algorithm.kl_penalty", reward_coef, "reward") if in_reward else ...


def _kl_section(options: OptionReader, option: str, coef: Any, place: str) -> dict[str, Any]:
    kind = str(options[option])
    if kind.removesuffix("+") not in _ESTIMATORS:
        options.leave(option, "no such estimator; k3 is used")
    elif kind.endswith("+"):
        options.leave(option, "its straight-through gradient has no counterpart")
    return {"coef": coef, "estimator": _ESTIMATORS.get(kind.removesuffix("+"), "k3"), "in": place}


def _dual_clip(options: OptionReader) -> Any:
    mode, option = options[f"{_ACTOR}.policy_loss.loss_mode"], f"{_ACTOR}.clip_ratio_c"
    return ... if mode in ("gspo", "cispo") else options[option]


def _old_logprobs(options: OptionReader) -> Any:
    if options["data.train_batch_size"] <= options[f"{_ACTOR}.ppo_mini_batch_size"]:
        return ...
    return "engine" if options[f"{_CORRECTION}.bypass_mode"] else "recompute"


def _entropy(options: OptionReader) -> Any:
    if not options[f"{_ACTOR}.entropy_coeff"]:
        return ...
    if options["algorithm.adv_estimator"].startswith("reinforce"):
        raise Untranslatable("reinforce_pp has no entropy bonus")
    return {"coef": options[f"{_ACTOR}.entropy_coeff"]}


def _minibatches(options: OptionReader) -> int:
    whole_batch, part = options["data.train_batch_size"], options[f"{_ACTOR}.ppo_mini_batch_size"]
    if options[f"{_ACTOR}.ppo_epochs"] != 1:
        options.leave(f"{_ACTOR}.ppo_epochs", "every response is trained on once")
    return whole(max(1, whole_batch / part), "train_batch_size / ppo_mini_batch_size")


def _clip(side: str) -> Any:
    def value(options: OptionReader) -> Any:
        found = options[f"{_ACTOR}.clip_ratio_{side}"]
        if side == "low" and found is not None and found >= 1:
            return ...  # a ratio is never below 0: no lower clip
        return options[f"{_ACTOR}.clip_ratio"] if found is None else found

    return value


def _spares(options: OptionReader) -> Any:
    generated, trained = options["data.gen_batch_size"], options["data.train_batch_size"]
    if not options["algorithm.filter_groups.enable"]:
        return ...
    return max(0, generated - trained) if generated else ...


REFILLS_WITHOUT_BOUND = 10


def _refills(options: OptionReader) -> Any:
    name = "algorithm.filter_groups.max_num_gen_batches"
    if not options["algorithm.filter_groups.enable"]:
        return ...
    most = options[name]
    if most is None or most <= 0:
        options.leave(name, f"a bound is needed here: max_refills {REFILLS_WITHOUT_BOUND}")
        return REFILLS_WITHOUT_BOUND
    return most - 1


def _zero_variance(options: OptionReader) -> Any:
    if options["algorithm.filter_groups.metric"] not in (
        None,
        "acc",
        "score",
        "seq_reward",
        "seq_final_reward",
    ):
        options.leave("algorithm.filter_groups.metric", "groups are judged by their rewards")
    return "replace" if options["algorithm.filter_groups.enable"] else ...


def _steps(options: OptionReader) -> int:
    if options["trainer.total_training_steps"]:
        return int(options["trainer.total_training_steps"])
    raise Untranslatable("write algorithm.steps: epochs x number of prompts / prompts_per_step")


def _warmup(options: OptionReader) -> int:
    steps, share = options[f"{_OPTIM}.lr_warmup_steps"], options[f"{_OPTIM}.lr_warmup_steps_ratio"]
    if steps is not None and steps > 0:
        return int(steps)
    if not share:
        return 0
    if not options["trainer.total_training_steps"]:
        raise Untranslatable("write algorithm.learning_rate_warmup_steps: this share of all steps")
    return int(share * options["trainer.total_training_steps"])


def _schedule(options: OptionReader) -> str:
    kind = options[f"{_OPTIM}.warmup_style"] or options[f"{_OPTIM}.lr_scheduler_type"]
    return schedule(kind, _SCHEDULES)


def _importance(options: OptionReader) -> str:
    kind = options[f"{_CORRECTION}.rollout_is"]
    if options[f"{_CORRECTION}.rollout_rs"]:
        options.leave(
            f"{_CORRECTION}.rollout_rs", "see icepop and sequence_mask of algorithm.importance_sampling"
        )
    if kind not in (None, "token"):
        raise Untranslatable("weights are per token here; see algorithm.importance_sampling")
    return "token" if kind else "none"


def _overlong(options: OptionReader) -> Any:
    if not options[f"{_LENGTH}.enable"]:
        return ...
    if options[f"{_LENGTH}.penalty_factor"] != 1:
        options.leave(f"{_LENGTH}.penalty_factor", "the penalty reaches 1")
    return options[f"{_LENGTH}.len"]


def _data(options: OptionReader) -> Any:
    """Return `data`: copies of the files, beside the job file."""
    shuffle = {"shuffle": False} if options["data.shuffle"] is False else {}
    sources = [{"source": name, **_rows(options), **shuffle} for name in _copies(options["data.train_files"])]
    return sources[0] if len(sources) == 1 else sources


def _copies(files: str | list[str]) -> list[str]:
    """Return where copies of the files lie, from the job file."""
    paths = [PurePosixPath(name) for name in ([files] if isinstance(files, str) else files)]
    is_unique = len({path.name for path in paths}) == len(paths)
    return ["/".join(path.parts[-1 if is_unique else -2 :]) for path in paths]


def _rows(options: OptionReader) -> dict[str, Any]:
    template_args = options["data.apply_chat_template_kwargs"]
    return {"prompt_field": options["data.prompt_key"]} | (
        {"template_args": template_args} if template_args else {}
    )


def _reward(options: OptionReader) -> str:
    path, name = options["reward.custom_reward_function.path"], options["reward.custom_reward_function.name"]
    if path:
        options.leave(
            "reward.custom_reward_function.path",
            f"functions take response and row here: wrap {name} in rewards.py:score, and write it as reward",
        )
    return "math"


def _evaluation(options: OptionReader) -> Any:
    """Return `evaluation`: one for each file, with veRL's own sampling."""
    every = options["trainer.test_freq"]
    if not every or every < 1:
        return ...
    common = {"every_steps": every, "samples": whole(options[f"{_VAL}.n"], "n")} | _val_sampling(options)
    if not options["trainer.val_before_train"]:
        common["at_start"] = False
    found = [{"source": name, **_rows(options), **common} for name in _copies(options["data.val_files"])]
    if len(found) == 1:
        return found[0]
    names = [str(run_name(PurePosixPath(each["source"]).with_suffix("")))[:32] for each in found]
    if len(set(names)) < len(names) or not all(name[:1].isalpha() for name in names):
        raise Untranslatable("write evaluation, with a name for each file")
    return [{"name": name, **each} for name, each in zip(names, found, strict=True)]


def _val_sampling(options: OptionReader) -> dict[str, Any]:
    if not options[f"{_VAL}.do_sample"]:
        return {"temperature": 0}
    return {"temperature": options[f"{_VAL}.temperature"], "top_p": options[f"{_VAL}.top_p"]}


def _tracking(kind: str) -> Any:
    def value(options: OptionReader) -> Any:
        loggers = options["trainer.logger"]
        if kind not in ([loggers] if isinstance(loggers, str) else loggers or []):
            return ...
        return {"project": options["trainer.project_name"]} if kind == "wandb" else True

    return value


def _lora(options: OptionReader) -> Any:
    if options[f"{_MODEL}.lora_rank"] and options[f"{_MODEL}.target_modules"] != "all-linear":
        options.leave(f"{_MODEL}.target_modules", "adapters are on every linear layer")
    return lora(options[f"{_MODEL}.lora_rank"], options[f"{_MODEL}.lora_alpha"])


RULES = (
    OptionRule(
        "name",
        ("trainer.experiment_name",),
        lambda o: run_name(o.given.get("trainer.experiment_name")),
        "spelt as a name",
    ),
    OptionRule("model", (f"{_MODEL}.path",)),
    OptionRule(
        "data",
        ("data.train_files", "data.prompt_key", "data.apply_chat_template_kwargs", "data.shuffle"),
        _data,
        "`source` and `prompt_field`, `template_args`, `shuffle`; copy the files next to the job file",
    ),
    OptionRule(
        "reward",
        ("reward.custom_reward_function.path", "reward.custom_reward_function.name"),
        _reward,
        "`math` until you write yours: veRL chooses a function by the row's data_source, and reads"
        " reward_model.ground_truth, as `math` does where there is no `answer`",
        "chosen by the row's data_source: write yours, if it is not mathematics",
    ),
    OptionRule(
        "algorithm.loss",
        (
            "algorithm.adv_estimator",
            f"{_ACTOR}.policy_loss.loss_mode",
            f"{_ACTOR}.loss_agg_mode",
            "algorithm.norm_adv_by_std_in_grpo",
            f"{_ACTOR}.use_token_level_loss",
        ),
        _loss,
        "grpo with token-mean: `dapo`; with seq-mean-token-mean: `grpo`; with seq-mean-token-sum-norm and no"
        " std: `dr_grpo`; loss_mode gspo, cispo: the same; rloo with seq-mean-token-sum: `rloo`;"
        " reinforce_plus_plus_baseline: `reinforce_pp`; gae: `ppo`; else the nearest, and the difference is"
        " listed",
    ),
    OptionRule(
        "algorithm.ppo",
        (
            "critic.model.path",
            "critic.optim.lr",
            "algorithm.gamma",
            "algorithm.lam",
            "critic.cliprange_value",
            "trainer.critic_warmup",
            "critic.ppo_epochs",
            "critic.ppo_mini_batch_size",
            "critic.loss_agg_mode",
        ),
        _ppo,
        "with gae: `critic`, `learning_rate`, `gamma`, `gae_lambda`, `value_clip`, `warmup_steps` (one less:"
        " veRL counts from 1)",
    ),
    OptionRule("algorithm.group_size", (f"{_ROLLOUT}.n",), _group_size),
    OptionRule("algorithm.prompts_per_step", ("data.train_batch_size",), None, "prompts in both"),
    OptionRule(
        "algorithm.minibatches_per_step",
        ("data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size", f"{_ACTOR}.ppo_epochs"),
        _minibatches,
        "train_batch_size / ppo_mini_batch_size, both in prompts",
    ),
    OptionRule(
        "algorithm.steps",
        ("trainer.total_training_steps", "trainer.total_epochs"),
        _steps,
        "total_training_steps; epochs x prompts / train_batch_size is left to you",
    ),
    OptionRule("algorithm.learning_rate", (f"{_OPTIM}.lr",)),
    OptionRule(
        "algorithm.learning_rate_warmup_steps",
        (f"{_OPTIM}.lr_warmup_steps", f"{_OPTIM}.lr_warmup_steps_ratio"),
        _warmup,
        "steps of training in both, not of the optimizer",
    ),
    OptionRule(
        "algorithm.learning_rate_schedule",
        (f"{_OPTIM}.lr_scheduler_type", f"{_OPTIM}.warmup_style"),
        _schedule,
    ),
    OptionRule(
        "algorithm.learning_rate_floor",
        (f"{_OPTIM}.min_lr_ratio",),
        lambda o: o[f"{_OPTIM}.min_lr_ratio"] or 0.0,
    ),
    OptionRule("algorithm.weight_decay", (f"{_OPTIM}.weight_decay",)),
    OptionRule("algorithm.adam_betas", (f"{_OPTIM}.betas",)),
    OptionRule(
        "algorithm.kl",
        (
            f"{_ACTOR}.use_kl_loss",
            f"{_ACTOR}.kl_loss_coef",
            f"{_ACTOR}.kl_loss_type",
            "algorithm.use_kl_in_reward",
            "algorithm.kl_ctrl.kl_coef",
            "algorithm.kl_ctrl.type",
            "algorithm.kl_penalty",
        ),
        _kl,
        "`in: loss` from use_kl_loss and kl_loss_coef, `in: reward` from use_kl_in_reward and"
        " kl_ctrl.kl_coef; kl: `k1`, mse: `k2`, low_var_kl: `k3`",
    ),
    OptionRule(
        "algorithm.entropy_bonus",
        (f"{_ACTOR}.entropy_coeff",),
        _entropy,
        "`coef`",
    ),
    OptionRule("algorithm.clip_low", (f"{_ACTOR}.clip_ratio_low", f"{_ACTOR}.clip_ratio"), _clip("low")),
    OptionRule("algorithm.clip_high", (f"{_ACTOR}.clip_ratio_high", f"{_ACTOR}.clip_ratio"), _clip("high")),
    OptionRule("algorithm.dual_clip", (f"{_ACTOR}.clip_ratio_c",), _dual_clip),
    OptionRule(
        "algorithm.importance_sampling",
        (f"{_CORRECTION}.rollout_is", f"{_CORRECTION}.rollout_rs"),
        _importance,
        "null: `none`, token: `token`",
    ),
    OptionRule(
        "algorithm.importance_cap",
        (f"{_CORRECTION}.rollout_is_threshold",),
        lambda o: (
            o[f"{_CORRECTION}.rollout_is_threshold"] if o[f"{_CORRECTION}.rollout_is"] == "token" else ...
        ),
    ),
    OptionRule(
        "algorithm.old_logprobs",
        (f"{_CORRECTION}.bypass_mode",),
        _old_logprobs,
        "true: `engine`, false: `recompute`, with several mini-batches",
    ),
    OptionRule(
        "algorithm.zero_variance_groups",
        ("algorithm.filter_groups.enable", "algorithm.filter_groups.metric"),
        _zero_variance,
        "true: `replace`",
    ),
    OptionRule(
        "algorithm.spare_prompts",
        ("data.gen_batch_size", "algorithm.filter_groups.enable", "data.train_batch_size"),
        _spares,
        "gen_batch_size - train_batch_size, with filter_groups",
    ),
    OptionRule(
        "algorithm.max_refills",
        ("algorithm.filter_groups.max_num_gen_batches", "algorithm.filter_groups.enable"),
        _refills,
        "max_num_gen_batches - 1; a refill asks for what is missing, not for a whole batch, and a step that"
        " lacks groups at the end is trained",
    ),
    OptionRule(
        "algorithm.max_prompt_tokens",
        ("data.max_prompt_length",),
        None,
        "longer prompts are left out and counted",
    ),
    OptionRule("algorithm.max_response_tokens", ("data.max_response_length",)),
    OptionRule(
        "algorithm.overlong_penalty_tokens",
        (f"{_LENGTH}.len", f"{_LENGTH}.enable", f"{_LENGTH}.penalty_factor"),
        _overlong,
    ),
    OptionRule("algorithm.temperature", (f"{_ROLLOUT}.temperature",)),
    OptionRule("algorithm.top_p", (f"{_ROLLOUT}.top_p",)),
    OptionRule("algorithm.grad_clip", (f"{_ACTOR}.grad_clip",)),
    OptionRule(
        "algorithm.lora",
        (f"{_MODEL}.lora_rank", f"{_MODEL}.lora_alpha", f"{_MODEL}.target_modules"),
        _lora,
        "`rank` and `alpha`",
    ),
    OptionRule("algorithm.seed", ("data.seed",), lambda o: ... if o["data.seed"] is None else o["data.seed"]),
    OptionRule(
        "evaluation",
        (
            "trainer.test_freq",
            "trainer.val_before_train",
            "data.val_files",
            f"{_VAL}.n",
            f"{_VAL}.do_sample",
            f"{_VAL}.temperature",
            f"{_VAL}.top_p",
        ),
        _evaluation,
        "one for each file, where test_freq is set: `every_steps`, `at_start`, `source`, `samples`; greedy"
        " (`temperature: 0`) unless do_sample; copy the files next to the job file",
    ),
    OptionRule(
        "tracking.wandb",
        ("trainer.logger", "trainer.project_name"),
        _tracking("wandb"),
        "`project`, where logger has wandb",
    ),
    OptionRule("tracking.tensorboard", ("trainer.logger",), _tracking("tensorboard")),
)

DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "critic.cliprange_value": 0.5,
    "critic.loss_agg_mode": "token-mean",
    "critic.model.path": None,
    "critic.optim.lr": 1e-5,
    "critic.ppo_epochs": 1,
    "critic.ppo_mini_batch_size": None,
    "algorithm.filter_groups.enable": False,
    "algorithm.filter_groups.metric": None,
    "algorithm.filter_groups.max_num_gen_batches": 0,
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_penalty": "kl",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    f"{_CORRECTION}.bypass_mode": False,
    f"{_CORRECTION}.rollout_is": None,
    f"{_CORRECTION}.rollout_is_threshold": 2.0,
    f"{_CORRECTION}.rollout_rs": None,
    f"{_ACTOR}.clip_ratio": 0.2,
    f"{_ACTOR}.clip_ratio_c": 3.0,
    f"{_ACTOR}.clip_ratio_high": 0.2,
    f"{_ACTOR}.clip_ratio_low": 0.2,
    f"{_ACTOR}.entropy_coeff": 0,
    f"{_ACTOR}.grad_clip": 1.0,
    f"{_ACTOR}.kl_loss_coef": 0.001,
    f"{_ACTOR}.kl_loss_type": "low_var_kl",
    f"{_ACTOR}.loss_agg_mode": "token-mean",
    f"{_ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{_ACTOR}.ppo_epochs": 1,
    f"{_ACTOR}.ppo_mini_batch_size": 256,
    f"{_ACTOR}.shuffle": False,
    f"{_ACTOR}.use_kl_loss": False,
    f"{_ACTOR}.use_token_level_loss": True,
    f"{_OPTIM}.betas": [0.9, 0.999],
    f"{_OPTIM}.lr": 1e-6,
    f"{_OPTIM}.lr_scheduler_type": "constant",
    f"{_OPTIM}.lr_warmup_steps": -1,
    f"{_OPTIM}.lr_warmup_steps_ratio": 0.0,
    f"{_OPTIM}.min_lr_ratio": 0.0,
    f"{_OPTIM}.num_cycles": 0.5,
    f"{_OPTIM}.optimizer": "AdamW",
    f"{_OPTIM}.total_training_steps": -1,
    f"{_OPTIM}.warmup_style": None,
    f"{_OPTIM}.weight_decay": 0.01,
    f"{_MODEL}.lora_alpha": 16,
    f"{_MODEL}.lora_rank": 0,
    f"{_MODEL}.path": "~/models/deepseek-llm-7b-chat",
    f"{_MODEL}.target_modules": "all-linear",
    f"{_ROLLOUT}.do_sample": True,
    f"{_ROLLOUT}.n": 1,
    f"{_ROLLOUT}.name": "vllm",
    f"{_ROLLOUT}.temperature": 1.0,
    f"{_ROLLOUT}.top_k": -1,
    f"{_ROLLOUT}.top_p": 1,
    "data.apply_chat_template_kwargs": {},
    "data.filter_overlong_prompts": False,
    "data.gen_batch_size": None,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.prompt_key": "prompt",
    "data.reward_fn_key": "data_source",
    "data.seed": None,
    "data.shuffle": True,
    "data.train_batch_size": 1024,
    "data.train_files": "~/data/rlhf/gsm8k/train.parquet",
    "data.truncation": "error",
    "data.val_files": "~/data/rlhf/gsm8k/test.parquet",
    "reward.custom_reward_function.name": "compute_score",
    "reward.custom_reward_function.path": None,
    f"{_LENGTH}.enable": False,
    f"{_LENGTH}.len": 0,
    f"{_LENGTH}.penalty_factor": 1.0,
    "trainer.balance_batch": True,
    "trainer.critic_warmup": 0,
    "trainer.resume_mode": "auto",
    "trainer.save_freq": -1,
    "trainer.experiment_name": "gsm8k",
    "trainer.logger": ["console", "wandb"],
    "trainer.project_name": "verl_examples",
    "trainer.test_freq": -1,
    "trainer.total_epochs": 30,
    "trainer.total_training_steps": None,
    "trainer.val_before_train": True,
    f"{_VAL}.do_sample": False,
    f"{_VAL}.n": 1,
    f"{_VAL}.temperature": 0,
    f"{_VAL}.top_p": 1.0,
}

ELSEWHERE = {
    f"{_ROLLOUT}.name": "rollout.engine: vllm; there is no SGLang and no TensorRT-LLM",
    f"{_ROLLOUT}.top_k": "sampling from the k likeliest tokens biases the probability ratio",
    f"{_VAL}.*": "evaluation has temperature, top_p and max_tokens",
    f"{_ROLLOUT}.tensor_model_parallel_size": "follows from your machines: rollout.tensor_parallel",
    f"{_ROLLOUT}.gpu_memory_utilization": "follows from your machines: rollout.engine_args",
    f"{_ROLLOUT}.enforce_eager": "rollout.engine_args.enforce_eager, where your machines need it",
    f"{_ROLLOUT}.max_num_seqs": "rollout.engine_args.max_running, measured by default",
    f"{_ROLLOUT}.dtype": "rollout.engine_args.dtype",
    f"{_ROLLOUT}.max_num_batched_tokens": "an option of vLLM's: rollout.vllm_args",
    f"{_ROLLOUT}.enable_*": "an option of vLLM's: rollout.vllm_args",
    f"{_ROLLOUT}.engine_kwargs.vllm.*": "an option of vLLM's: rollout.vllm_args",
    f"{_ROLLOUT}.max_model_len": "max_prompt_tokens + max_response_tokens",
    f"{_ROLLOUT}.*_length": "max_prompt_tokens, max_response_tokens",
    f"{_ROLLOUT}.free_cache_engine": "reserved engines always free their memory for the trainer",
    f"{_ROLLOUT}.multi_turn.*": "rollouts of several turns are an environment's: docs/agents.md",
    f"{_ROLLOUT}.agent.*": "rollouts of several turns are an environment's: docs/agents.md",
    f"{_ROLLOUT}.calculate_log_probs": "engines always report them",
    f"{_ROLLOUT}.*parallel_size": "engines are replicated over machines, with tensor parallelism within one",
    f"{_ROLLOUT}.*log_prob_*": _SIZES,
    f"{_ROLLOUT}.mode": "engines stream tokens",
    "actor_rollout_ref.ref.*log_prob_*": _SIZES,
    "actor_rollout_ref.ref.*offload*": "the reference lies in main memory, or is the base under adapters",
    "actor_rollout_ref.ref.*": "the reference is sharded as the policy is",
    f"{_ACTOR}.*micro_batch_size*": _SIZES,
    f"{_ACTOR}.*max_token_len*": _SIZES,
    f"{_ACTOR}.use_dynamic_bsz": _SIZES,
    f"{_ACTOR}.*sequence_parallel_size": "trainer.context_parallel",
    f"{_ACTOR}.router_replay.*": "R2 is algorithm.router_replay: recompute; there is no R3",
    f"{_ACTOR}.*offload*": _MEMORY,
    f"{_ACTOR}.*dtype": "trainer.dtype",
    f"{_ACTOR}.megatron.*": "training is sharded by FSDP2; there is no Megatron",
    f"{_ACTOR}.fsdp_config.*": "FSDP2 over trainer.ranks and trainer.nodes",
    f"{_ACTOR}.strategy": "FSDP2 over trainer.ranks and trainer.nodes",
    f"{_ACTOR}.checkpoint.*": "trainer.checkpoint_every_steps; the last model is written in HF format",
    f"{_MODEL}.enable_gradient_checkpointing": _MEMORY,
    f"{_MODEL}.enable_activation_offload": _MEMORY,
    f"{_MODEL}.use_remove_padding": "responses are always packed without padding",
    f"{_MODEL}.trust_remote_code": "code from a model's repository is not run",
    f"{_MODEL}.custom_chat_template": "write it to a file: data.chat_template",
    "critic.*micro_batch_size*": _SIZES,
    "critic.*max_token_len*": _SIZES,
    "critic.use_dynamic_bsz": _SIZES,
    "critic.*offload*": _MEMORY,
    "critic.*gradient_checkpointing": _MEMORY,
    "critic.model.use_remove_padding": "responses are always packed without padding",
    "critic.optim.*": "the policy's options are also the critic's, but for its learning rate",
    "critic.*": "the critic is sharded, stored and adapted as the policy is",
    "data.filter_overlong_prompts*": "prompts longer than max_prompt_tokens are left out and counted",
    "data.truncation": "prompts longer than max_prompt_tokens are left out and counted, never cut",
    f"{_LENGTH}.log": "metrics.jsonl has the rewards before penalties",
    "data.reward_fn_key": "data.reward, one for each source",
    "data.val_batch_size": "an evaluation is rolled out beside a step, all of it at once",
    "data.*max_samples": "cut the file, or split: train[:N] of a dataset",
    "data.return_*": "the reward function always gets the row",
    "data.*image*": "prompts are text",
    "data.*video*": "prompts are text",
    "reward.reward_model.*": "reward: {http: URL, speaks: pooling} asks a served reward model",
    "reward.reward_manager*": "reward: a function of yours, or built in",
    "trainer.n_gpus_per_node": _MACHINES,
    "trainer.nnodes": _MACHINES,
    "trainer.device": _MACHINES,
    "trainer.save_freq": "trainer.checkpoint_every_steps: as often as the disk keeps up",
    "trainer.max_*_ckpt_to_keep": "trainer.keep_checkpoints",
    "trainer.resume_*": "a run is resumed by rlboost launch NAME",
    "trainer.default_*_dir": "output",
    "trainer.val_only": "training and evaluation go together",
    "trainer.balance_batch": _SIZES,
    "trainer.logger": "tracking",
    "trainer.log_val_generations": "rlboost samples shows responses",
    "ray_*": "there is no Ray",
    "model_engine": "training is sharded by FSDP2; there is no Megatron",
    "hydra.*": "the configuration is read without Hydra",
}

RENAMED = {
    "custom_reward_function.path": "reward.custom_reward_function.path",
    "custom_reward_function.name": "reward.custom_reward_function.name",
    "reward_model.reward_manager": "reward.reward_manager.name",
    f"{_ACTOR}.optim.clip_grad": f"{_ACTOR}.grad_clip",
} | {
    f"{section}.{name}": f"{_LENGTH}.{name}"
    for section in (
        "custom_reward_function.overlong_buffer",
        "reward_model.overlong_buffer",
        "reward_model.reward_kwargs.overlong_buffer_cfg",
        "reward.overlong_buffer",
    )
    for name in ("enable", "len", "penalty_factor", "log")
}

VERL = Framework("veRL", RULES, DEFAULTS, ELSEWHERE, RENAMED)
