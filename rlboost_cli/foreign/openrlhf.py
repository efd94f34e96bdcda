"""OpenRLHF: the arguments of its `train_ppo_ray` on the command line of a script, and fields of a job file.

Read against OpenRLHF 0.11, whose arguments are named by sections (`--actor.adam.lr`); the flat names of
versions up to 0.9 are translated as well. Its rollout batch counts prompts, its training batch responses; its
learning rates follow optimizer steps, ours whole steps.
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

PROGRAM = "train_ppo_ray"
REFILLS_WITHOUT_BOUND = 10
_PROMPT_TOKENS = 512
_ESTIMATOR = "algo.advantage.estimator"
_CORRECTION = "algo.advantage.is_correction"
_LOSSES = {
    "gae": "ppo",
    "group_norm": "dapo",
    "dr_grpo": "dr_grpo",
    "rloo": "rloo",
    "reinforce_baseline": "reinforce_pp",
    "reinforce": "reinforce_pp",
}
_SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "warmup_stable_decay",
}
_FILES = (".jsonl", ".json", ".parquet")
_MACHINES = "follows from your machines: trainer, rollout.spot"
_MEMORY = "RLBoost decides by the GPU's memory: trainer.activation_checkpointing, optimizer_offload"
_FSDP = "FSDP2 over trainer.ranks and trainer.nodes"
_SIZES = "RLBoost packs micro-batches itself: trainer.micro_batch_tokens"
_VLLM = "the fleet serves vLLM: rollout.engine"
_LOGS = "metrics.jsonl has every step; tracking"
_TEXT = "prompts are text"


def _loss(options: OptionReader) -> str:
    estimator = options[_ESTIMATOR]
    if estimator not in _LOSSES:
        options.leave(_ESTIMATOR, "no such estimator; the job has loss: dapo")
        return "dapo"
    loss = _LOSSES[estimator]
    if estimator == "reinforce":
        options.leave(_ESTIMATOR, "reinforce_pp is the nearest: it has the group's mean as baseline")
    if estimator in ("dr_grpo", "rloo"):
        options.leave(_ESTIMATOR, f"{loss} has its own divisor, not the mean over the mini-batch's tokens")
    if options["actor.policy_loss_type"] == "gspo":
        if loss == "dapo":
            return "gspo"
        options.leave("actor.policy_loss_type", "gspo has the advantages of group_norm")
    if options["algo.advantage.no_std_norm"] and loss in ("ppo", "reinforce_pp"):
        options.leave("algo.advantage.no_std_norm", f"{loss} divides by the std of the batch")
    return loss


def _is(options: OptionReader, loss: str) -> bool:
    return _loss(OptionReader(OPENRLHF, options.given, options.unknown)) == loss


def _group_size(options: OptionReader) -> int:
    size: int = options["rollout.n_samples_per_prompt"]
    return size if options[_ESTIMATOR] == "gae" else group_size(size)


def _minibatches(options: OptionReader) -> int:
    if options["train.max_epochs"] != 1:
        options.leave("train.max_epochs", "every response is trained on once")
    return _updates(options)


def _updates(options: OptionReader) -> int:
    responses = options["rollout.batch_size"] * options["rollout.n_samples_per_prompt"]
    updates = whole(max(1, responses / options["train.batch_size"]), "responses of a step / train.batch_size")
    whole(options["rollout.batch_size"] / updates, "prompts of a mini-batch")
    return updates


def _steps(options: OptionReader) -> int:
    episodes, batch = options["train.num_episodes"], options["rollout.batch_size"]
    raise Untranslatable(f"write algorithm.steps: {episodes} x number of prompts / {batch}")


def _warmup(options: OptionReader) -> int:
    share = options["actor.lr_warmup_ratio"]
    if not share:
        return 0
    raise Untranslatable(f"write algorithm.learning_rate_warmup_steps: {share:g} of all steps")


def _floor(options: OptionReader) -> Any:
    return options["actor.min_lr_ratio"] if options["actor.lr_scheduler"] == "cosine_with_min_lr" else 0.0


def _optimizer(options: OptionReader) -> float:
    if options["actor.optim"] != "adam":
        options.leave("actor.optim", "AdamW")
    return float(options["actor.adam.lr"])


def _clips(options: OptionReader) -> list[float]:
    low, high = options["actor.eps_clip_low_high"] or [options["actor.eps_clip"]] * 2
    return [float(low), float(high)]


def _correction(options: OptionReader) -> str:
    if not options[f"{_CORRECTION}_enable"]:
        return "none"
    kind, floor = options[f"{_CORRECTION}_type"], _thresholds(options)[0]
    if _is(options, "gspo"):
        options.leave(f"{_CORRECTION}_enable", "its ratio is then to the engine's logprobs; here weights are")
    if kind == "icepop":
        return "icepop"
    if kind == "seq-mask-tis":
        options.leave(f"{_CORRECTION}_type", "sequence_mask masks by the response's ratio, without a floor")
        return "sequence_mask"
    if floor > 0:
        options.leave(f"{_CORRECTION}_threshold", f"weights are at most the cap, not at least {floor:g}")
    return "token"


def _thresholds(options: OptionReader) -> list[float]:
    low, high = options[f"{_CORRECTION}_threshold"]
    return [float(low), float(high)]


def _cap(options: OptionReader) -> Any:
    return _thresholds(options)[1] if options[f"{_CORRECTION}_enable"] else ...


def _weight_floor(options: OptionReader) -> Any:
    is_icepop = options[f"{_CORRECTION}_enable"] and options[f"{_CORRECTION}_type"] == "icepop"
    return _thresholds(options)[0] if is_icepop else ...


def _kl(options: OptionReader) -> Any:
    coef, estimator = options["algo.kl.init_coef"], options["algo.kl.estimator"]
    if not coef:
        return ...
    place = "loss" if options["algo.kl.use_loss"] else "reward"
    if place == "loss" and _is(options, "reinforce_pp"):
        options.leave("algo.kl.use_loss", "reinforce_pp has its KL in the reward")
        place = "reward"
    if options["algo.kl.target"] is not None:
        options.leave("algo.kl.target", "the weight is fixed here")
    return {"coef": coef, "estimator": estimator, "in": place}


def _entropy(options: OptionReader) -> Any:
    if not options["actor.entropy_coef"]:
        return ...
    if _is(options, "reinforce_pp"):
        raise Untranslatable("reinforce_pp has no entropy bonus")
    return {"coef": options["actor.entropy_coef"]}


def _ppo(options: OptionReader) -> Any:
    if options[_ESTIMATOR] != "gae":
        return ...
    found: dict[str, Any] = {}
    critic = options["critic.model_name_or_path"] or _reward_model(options)
    if critic and critic != options["actor.model_name_or_path"]:
        found["critic"] = critic
    if options["critic.freezing_steps"] > 0:
        found["warmup_steps"] = whole(
            max(1, options["critic.freezing_steps"] // _updates(options)), "critic.freezing_steps"
        )
    return found | {
        "learning_rate": options["critic.adam.lr"],
        "gamma": options["algo.advantage.gamma"],
        "gae_lambda": options["algo.advantage.lambd"],
        "value_clip": options["critic.value_clip"],
    }


def _reward_model(options: OptionReader) -> str:
    """Return what the critic begins as where it is not said: the first reward model."""
    is_served = options["reward.remote_url"] or options["train.agent_func_path"]
    return "" if is_served else str(options["reward.model_name_or_path"] or "").partition(",")[0]


def _prompt_tokens(options: OptionReader) -> Any:
    if options["prompt_max_len"]:
        return options["prompt_max_len"]
    most = options["rollout.max_new_tokens"]
    return whole(options["data.max_len"] - most, "max_len - max_new_tokens") if most else ...


def _response_tokens(options: OptionReader) -> int:
    most = options["rollout.max_new_tokens"]
    if most:
        return int(most)
    prompt, both = options["prompt_max_len"] or _PROMPT_TOKENS, options["data.max_len"]
    shared = (
        f"prompt and response share it there; the job gives {prompt} to the prompt, the rest to the response"
    )
    options.leave("data.max_len", shared)
    return whole(both - prompt, "max_len - the prompt's tokens")


def _overlong(options: OptionReader) -> Any:
    tokens = options["reward.overlong_buffer_len"]
    if not tokens:
        return ...
    if options["reward.overlong_penalty_factor"] != 1:
        options.leave("reward.overlong_penalty_factor", "the penalty reaches 1")
    return whole(tokens, "overlong_buffer_len")


def _zero_variance(options: OptionReader) -> Any:
    if not options["algo.dynamic_filtering_enable"]:
        return ...
    if [float(each) for each in options["algo.dynamic_filtering_range"]] != [0.0, 1.0]:
        options.leave("algo.dynamic_filtering_range", "groups whose rewards are all equal are replaced")
    return "replace"


def _refills(options: OptionReader) -> Any:
    if not options["algo.dynamic_filtering_enable"]:
        return ...
    options.leave(
        "algo.dynamic_filtering_enable",
        f"a bound is needed here: max_refills {REFILLS_WITHOUT_BOUND}",
    )
    return REFILLS_WITHOUT_BOUND


def _staleness(options: OptionReader) -> Any:
    if not options["train.async_enable"]:
        return ...
    if options["algo.dynamic_filtering_enable"]:
        raise Untranslatable("steps that are refilled are not rolled out ahead: max_staleness or max_refills")
    return options["train.async_queue_size"]


def _data(options: OptionReader) -> Any:
    if not options["data.prompt_dataset"]:
        raise Untranslatable("write data: no prompt_dataset")
    names = [name.strip() for name in str(options["data.prompt_dataset"]).split(",")]
    shares = options["data.prompt_probs"]  # read as a number where there is one, as several where there are
    weights = [float(each) for each in shares] if isinstance(shares, (list, tuple)) else [float(shares or 1)]
    weights = weights if shares is not None else []
    if weights and len(weights) != len(names):
        raise Untranslatable("write data: as many prompt_probs as data sets")
    rows = _rows(options)
    split = options["data.prompt_split"]
    found = [_source(name, split) | rows for name in names]
    if len(found) == 1:
        return found[0]
    return [
        each | ({"weight": weight} if weights else {})
        for each, weight in zip(found, weights or [1.0] * len(found), strict=True)
    ]


def _source(name: str, split: str) -> dict[str, Any]:
    name, _, part = name.partition("@")
    if part:
        raise Untranslatable(f"write data: {name} with the files of {part}")
    if PurePosixPath(name).suffix in _FILES:
        return {"source": PurePosixPath(name).name}
    return {"dataset": name} | ({} if split == "train" else {"split": split})


def _rows(options: OptionReader) -> dict[str, Any]:
    template = {"chat_template": "tokenizer"} if options["data.apply_chat_template"] else {}
    return {"prompt_field": options["data.input_key"]} | template


def _reward(options: OptionReader) -> str:
    for name, instead in (
        ("reward.remote_url", "functions take response and row here: write rewards.py:score, or {http: URL}"),
        ("reward.model_name_or_path", "reward: {http: URL, speaks: pooling} asks a served reward model"),
        ("data.label_key", "math reads the row's answer or solution: name the column so"),
    ):
        if options[name] and not (name == "data.label_key" and options[name] in ("answer", "solution")):
            options.leave(name, instead)
    return "math"


def _evaluation(options: OptionReader) -> Any:
    name, every = options["eval.dataset"], options["eval.steps"]
    if not name or every < 1:
        return ...
    return _source(str(name), options["eval.split"]) | _rows(options) | {
        "every_steps": every,
        "samples": options["eval.n_samples_per_prompt"],
        "temperature": options["eval.temperature"],
    }  # fmt: skip


def _lora(options: OptionReader) -> Any:
    if options["ds.lora.rank"] and options["ds.lora.target_modules"] not in ("all-linear", ["all-linear"]):
        options.leave("ds.lora.target_modules", "adapters are on every linear layer")
    return lora(options["ds.lora.rank"], options["ds.lora.alpha"])


RULES = (
    OptionRule(
        "name",
        ("logger.wandb.run_name",),
        lambda o: run_name(o.given.get("logger.wandb.run_name")),
        "spelt as a name",
    ),
    OptionRule("model", ("actor.model_name_or_path",)),
    OptionRule(
        "data",
        (
            "data.prompt_dataset",
            "data.input_key",
            "data.apply_chat_template",
            "data.prompt_split",
            "data.prompt_probs",
        ),
        _data,
        "`dataset` or `source`, `prompt_field`, `chat_template: tokenizer`, `split`, `weight`; copy files"
        " next to the job file",
    ),
    OptionRule(
        "reward",
        ("reward.remote_url", "reward.model_name_or_path", "data.label_key"),
        _reward,
        "`math` until you write yours; it reads the row's `answer` or `solution`",
    ),
    OptionRule(
        "algorithm.loss",
        (_ESTIMATOR, "actor.policy_loss_type", "algo.advantage.no_std_norm"),
        _loss,
        "gae: `ppo`, group_norm: `dapo`, with policy_loss_type gspo: `gspo`; reinforce_baseline:"
        " `reinforce_pp`; rloo, dr_grpo: the same, with another divisor",
    ),
    OptionRule(
        "algorithm.ppo",
        (
            "critic.model_name_or_path",
            "critic.adam.lr",
            "algo.advantage.gamma",
            "algo.advantage.lambd",
            "critic.value_clip",
            "critic.freezing_steps",
        ),
        _ppo,
        "with gae: `critic` (else the reward model), `learning_rate`, `gamma`, `gae_lambda`, `value_clip`;"
        " `warmup_steps`: freezing_steps / minibatches_per_step",
    ),
    OptionRule("algorithm.group_size", ("rollout.n_samples_per_prompt",), _group_size),
    OptionRule("algorithm.prompts_per_step", ("rollout.batch_size",), None, "prompts in both"),
    OptionRule(
        "algorithm.minibatches_per_step",
        ("train.batch_size", "rollout.batch_size", "rollout.n_samples_per_prompt", "train.max_epochs"),
        _minibatches,
        "rollout.batch_size x n_samples_per_prompt / train.batch_size, which counts responses",
    ),
    OptionRule(
        "algorithm.steps",
        ("train.num_episodes",),
        _steps,
        "left to you: num_episodes x prompts / prompts_per_step",
    ),
    OptionRule("algorithm.learning_rate", ("actor.adam.lr", "actor.optim"), _optimizer),
    OptionRule(
        "algorithm.learning_rate_warmup_steps",
        ("actor.lr_warmup_ratio",),
        _warmup,
        "left to you, but for 0: a share of all steps",
    ),
    OptionRule(
        "algorithm.learning_rate_schedule",
        ("actor.lr_scheduler",),
        lambda o: schedule(o["actor.lr_scheduler"], _SCHEDULES),
    ),
    OptionRule("algorithm.learning_rate_floor", ("actor.min_lr_ratio", "actor.lr_scheduler"), _floor),
    OptionRule("algorithm.weight_decay", ("actor.adam.weight_decay",)),
    OptionRule(
        "algorithm.adam_betas", ("actor.adam.betas",), lambda o: [float(b) for b in o["actor.adam.betas"]]
    ),
    OptionRule("algorithm.adam_eps", ("actor.adam.eps",)),
    OptionRule("algorithm.grad_clip", ("actor.max_norm",)),
    OptionRule(
        "algorithm.kl",
        ("algo.kl.init_coef", "algo.kl.estimator", "algo.kl.use_loss"),
        _kl,
        "`coef`, `estimator`; `in`: loss with use_loss, else reward",
    ),
    OptionRule("algorithm.entropy_bonus", ("actor.entropy_coef",), _entropy, "`coef`"),
    OptionRule("algorithm.clip_low", ("actor.eps_clip_low_high", "actor.eps_clip"), lambda o: _clips(o)[0]),
    OptionRule("algorithm.clip_high", ("actor.eps_clip_low_high", "actor.eps_clip"), lambda o: _clips(o)[1]),
    OptionRule("algorithm.dual_clip", ("actor.dual_clip",)),
    OptionRule(
        "algorithm.importance_sampling",
        (f"{_CORRECTION}_enable", f"{_CORRECTION}_type", f"{_CORRECTION}_threshold"),
        _correction,
        "tis: `token`, icepop: `icepop`, seq-mask-tis: `sequence_mask`, off: `none`",
    ),
    OptionRule("algorithm.importance_cap", (f"{_CORRECTION}_threshold",), _cap, "the higher one"),
    OptionRule(
        "algorithm.importance_floor", (f"{_CORRECTION}_threshold",), _weight_floor, "icepop: the lower one"
    ),
    OptionRule(
        "algorithm.old_logprobs",
        ("train.batch_size",),
        lambda o: "recompute" if _updates(o) > 1 else ...,
        "`recompute` with several mini-batches, as OpenRLHF does",
    ),
    OptionRule(
        "algorithm.zero_variance_groups",
        ("algo.dynamic_filtering_enable", "algo.dynamic_filtering_range"),
        _zero_variance,
        "true: `replace`",
    ),
    OptionRule(
        "algorithm.max_refills",
        ("algo.dynamic_filtering_enable",),
        _refills,
        f"true: `{REFILLS_WITHOUT_BOUND}`, as a bound is needed here",
    ),
    OptionRule(
        "algorithm.max_staleness",
        ("train.async_queue_size", "train.async_enable"),
        _staleness,
        "with async_enable, and no dynamic filtering",
    ),
    OptionRule(
        "algorithm.max_prompt_tokens",
        ("prompt_max_len", "data.max_len", "rollout.max_new_tokens"),
        _prompt_tokens,
        "max_len - max_new_tokens; longer prompts are left out and counted",
    ),
    OptionRule(
        "algorithm.max_response_tokens",
        ("rollout.max_new_tokens", "data.max_len"),
        _response_tokens,
        f"else max_len - {_PROMPT_TOKENS}",
    ),
    OptionRule(
        "algorithm.overlong_penalty_tokens",
        ("reward.overlong_buffer_len", "reward.overlong_penalty_factor"),
        _overlong,
    ),
    OptionRule("algorithm.temperature", ("rollout.temperature",)),
    OptionRule("algorithm.top_p", ("rollout.top_p",)),
    OptionRule(
        "algorithm.lora",
        ("ds.lora.rank", "ds.lora.alpha", "ds.lora.target_modules"),
        _lora,
        "`rank` and `alpha`",
    ),
    OptionRule("algorithm.seed", ("train.seed",)),
    OptionRule(
        "evaluation",
        ("eval.dataset", "eval.steps", "eval.split", "eval.n_samples_per_prompt", "eval.temperature"),
        _evaluation,
        "`dataset` or `source`, `split`, `every_steps`, `samples`, `temperature`",
    ),
    OptionRule(
        "tracking.wandb",
        ("logger.wandb.project", "logger.wandb.key"),
        lambda o: {"project": o["logger.wandb.project"]} if o["logger.wandb.key"] else ...,
        "`project`, where there is a key: give yours as the secret WANDB_API_KEY",
    ),
    OptionRule(
        "tracking.tensorboard",
        ("logger.tensorboard_dir",),
        lambda o: True if o["logger.tensorboard_dir"] else ...,
    ),
)

DEFAULTS: dict[str, Any] = {
    "actor.adam.betas": [0.9, 0.95],
    "actor.adam.eps": 1e-8,
    "actor.adam.lr": 1e-6,
    "actor.adam.weight_decay": 0.0,
    "actor.dual_clip": None,
    "actor.entropy_coef": None,
    "actor.eps_clip": 0.2,
    "actor.eps_clip_low_high": None,
    "actor.lr_scheduler": "cosine_with_min_lr",
    "actor.lr_warmup_ratio": 0.03,
    "actor.max_norm": 1.0,
    "actor.min_lr_ratio": 0.1,
    "actor.model_name_or_path": None,
    "actor.optim": "adam",
    "actor.policy_loss_type": "ppo",
    _ESTIMATOR: "gae",
    "algo.advantage.gamma": 1.0,
    f"{_CORRECTION}_enable": False,
    f"{_CORRECTION}_threshold": [0.5, 5.0],
    f"{_CORRECTION}_type": "tis",
    "algo.advantage.lambd": 1.0,
    "algo.advantage.no_std_norm": False,
    "algo.dynamic_filtering_enable": False,
    "algo.dynamic_filtering_range": [0, 1],
    "algo.kl.estimator": "k1",
    "algo.kl.init_coef": 0.01,
    "algo.kl.target": None,
    "algo.kl.use_loss": False,
    "critic.adam.lr": 9e-6,
    "critic.freezing_steps": -1,
    "critic.model_name_or_path": None,
    "critic.value_clip": 0.5,
    "data.apply_chat_template": False,
    "data.input_key": "input",
    "data.label_key": None,
    "data.max_len": 2048,
    "data.prompt_dataset": None,
    "data.prompt_probs": None,
    "data.prompt_split": "train",
    "ds.lora.alpha": 16,
    "ds.lora.rank": 0,
    "ds.lora.target_modules": "all-linear",
    "eval.dataset": None,
    "eval.n_samples_per_prompt": 4,
    "eval.split": "train",
    "eval.steps": -1,
    "eval.temperature": 0.6,
    "logger.tensorboard_dir": None,
    "logger.wandb.key": None,
    "logger.wandb.project": "openrlhf_train_ppo",
    "logger.wandb.run_name": None,
    "prompt_max_len": None,
    "reward.model_name_or_path": None,
    "reward.overlong_buffer_len": None,
    "reward.overlong_penalty_factor": 1,
    "reward.remote_url": None,
    "rollout.batch_size": 1024,
    "rollout.max_new_tokens": None,
    "rollout.n_samples_per_prompt": 1,
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "train.agent_func_path": None,
    "train.async_enable": False,
    "train.async_queue_size": 1,
    "train.batch_size": 128,
    "train.max_epochs": 1,
    "train.num_episodes": 1,
    "train.seed": 42,
}

ELSEWHERE = {
    "train.agent_func_path": "rollouts of several turns: environment",
    "train.partial_rollout_enable": "a response is never cut for a newer version",
    "train.colocate_*": _MACHINES,
    "train.micro_batch_size": _SIZES,
    "train.max_tokens_per_gpu": _SIZES,
    "train.dynamic_batch_enable": _SIZES,
    "train.full_determinism_enable": "a run is repeatable with trainer.local_engines alone",
    "train.*ema*": "the model of the last step is kept; no moving average",
    "rollout.micro_batch_size": _SIZES,
    "rollout.max_tokens_per_gpu": _SIZES,
    "rollout.vllm_generate_batch_size": "algorithm.spare_prompts are rolled out beside the step's",
    "vllm.gpu_memory_utilization": "follows from your machines: rollout.engine_args.gpu_memory_utilization",
    "vllm.tensor_parallel_size": "follows from your machines: rollout.tensor_parallel",
    "vllm.num_engines": _MACHINES,
    "vllm.*": _VLLM,
    "*.num_nodes": _MACHINES,
    "*.num_gpus_per_node": _MACHINES,
    "*.offload": _MEMORY,
    "actor.gradient_checkpointing*": _MEMORY,
    "actor.muon.*": "AdamW",
    "critic.muon.*": "AdamW",
    "critic.optim": "AdamW",
    "critic.*": "the critic's schedule, decay and bound are the policy's",
    "actor.aux_loss_coef": "algorithm.router_aux_loss_coef: about this times experts per token",
    "actor.freeze_visual_encoder": _TEXT,
    "data.image_key": _TEXT,
    "data.max_images_per_prompt": _TEXT,
    "data.input_template": "write the whole prompt into the rows, or a Jinja file as data.chat_template",
    "data.max_samples": "cut the file, or data.split: train[:1000]",
    "data.*": "prompts are read by the trainer",
    "algo.kl.horizon": "the weight is fixed here",
    "reward.normalize_enable": "rewards are compared within a group, or whitened; there is no running mean",
    "reward.clip_range": "clip it in rewards.py:score",
    "reward.stop_properly_penalty_coef": "algorithm.mask_truncated, or write it in rewards.py:score",
    "ds.adam_offload": _MEMORY,
    "ds.param_dtype": "trainer.dtype",
    "ds.attn_implementation": "RLBoost chooses the attention",
    "ds.load_in_4bit": "the base is not quantised",
    "ds.lora.dropout": "adapters have no dropout",
    "ds.packing_samples": _SIZES,
    "ds.use_liger_kernel": _SIZES,
    "ds.ring_attn_size": "trainer.context_parallel",
    "ds.*": _FSDP,
    "ckpt.output_dir": "output",
    "ckpt.save_steps": "trainer.checkpoint_every_steps; as often as the disk keeps up by default",
    "ckpt.max_num": "trainer.keep_checkpoints",
    "ckpt.load_enable": "a run is resumed by rlboost launch NAME",
    "ckpt.*": "checkpoints are whole, the final model is in the Hugging Face format",
    "logger.wandb.*": "tracking.wandb",
    "logger.*": _LOGS,
    "use_ms": "data and models are those of the Hugging Face hub, or files",
    "local_rank": _FSDP,
    "zero_stage": _FSDP,
    "bf16": "trainer.dtype",
    "*_num_nodes": _MACHINES,
    "*_num_gpus_per_node": _MACHINES,
    "colocate_*": _MACHINES,
    "ref_reward_offload": _MEMORY,
    "actor_init_on_gpu": _FSDP,
    "ptx_coef": "no pretraining loss beside the policy's",
    "micro_*": _SIZES,
    "vllm_*": _VLLM,
}

RENAMED = {
    "pretrain": "actor.model_name_or_path",
    "reward_pretrain": "reward.model_name_or_path",
    "critic_pretrain": "critic.model_name_or_path",
    "remote_rm_url": "reward.remote_url",
    "agent_func_path": "train.agent_func_path",
    "actor_learning_rate": "actor.adam.lr",
    "critic_learning_rate": "critic.adam.lr",
    "adam_betas": "actor.adam.betas",
    "l2": "actor.adam.weight_decay",
    "lr_scheduler": "actor.lr_scheduler",
    "lr_warmup_ratio": "actor.lr_warmup_ratio",
    "max_norm": "actor.max_norm",
    "advantage_estimator": _ESTIMATOR,
    "gamma": "algo.advantage.gamma",
    "lambd": "algo.advantage.lambd",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "enable_vllm_is_correction": f"{_CORRECTION}_enable",
    "vllm_is_truncated_threshold": f"{_CORRECTION}_threshold",
    "init_kl_coef": "algo.kl.init_coef",
    "kl_estimator": "algo.kl.estimator",
    "kl_target": "algo.kl.target",
    "kl_horizon": "algo.kl.horizon",
    "use_kl_loss": "algo.kl.use_loss",
    "policy_loss_type": "actor.policy_loss_type",
    "entropy_loss_coef": "actor.entropy_coef",
    "aux_loss_coef": "actor.aux_loss_coef",
    "eps_clip": "actor.eps_clip",
    "eps_clip_low_high": "actor.eps_clip_low_high",
    "dual_clip": "actor.dual_clip",
    "value_clip": "critic.value_clip",
    "freezing_actor_steps": "critic.freezing_steps",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    "rollout_batch_size": "rollout.batch_size",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "generate_max_len": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "train_batch_size": "train.batch_size",
    "max_epochs": "train.max_epochs",
    "num_episodes": "train.num_episodes",
    "seed": "train.seed",
    "async_train": "train.async_enable",
    "async_queue_size": "train.async_queue_size",
    "prompt_data": "data.prompt_dataset",
    "prompt_data_probs": "data.prompt_probs",
    "prompt_split": "data.prompt_split",
    "input_key": "data.input_key",
    "label_key": "data.label_key",
    "input_template": "data.input_template",
    "apply_chat_template": "data.apply_chat_template",
    "max_samples": "data.max_samples",
    "normalize_reward": "reward.normalize_enable",
    "reward_clip_range": "reward.clip_range",
    "overlong_buffer_len": "reward.overlong_buffer_len",
    "overlong_penalty_factor": "reward.overlong_penalty_factor",
    "eval_dataset": "eval.dataset",
    "eval_split": "eval.split",
    "eval_steps": "eval.steps",
    "eval_temperature": "eval.temperature",
    "eval_n_samples_per_prompt": "eval.n_samples_per_prompt",
    "lora_rank": "ds.lora.rank",
    "lora_alpha": "ds.lora.alpha",
    "target_modules": "ds.lora.target_modules",
    "lora_dropout": "ds.lora.dropout",
    "load_in_4bit": "ds.load_in_4bit",
    "packing_samples": "ds.packing_samples",
    "adam_offload": "ds.adam_offload",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "save_path": "ckpt.output_dir",
    "ckpt_path": "ckpt.path",
    "save_steps": "ckpt.save_steps",
    "max_ckpt_num": "ckpt.max_num",
    "load_checkpoint": "ckpt.load_enable",
    "logging_steps": "logger.logging_steps",
    "use_wandb": "logger.wandb.key",
    "wandb_project": "logger.wandb.project",
    "wandb_run_name": "logger.wandb.run_name",
    "use_tensorboard": "logger.tensorboard_dir",
    "wandb_group": "logger.wandb.group",
    "wandb_org": "logger.wandb.org",
    "max_len": "data.max_len",
    "max_new_tokens": "rollout.max_new_tokens",
    "disable_fast_tokenizer": "data.disable_fast_tokenizer",
    "stop_properly_penalty_coef": "reward.stop_properly_penalty_coef",
    "partial_rollout": "train.partial_rollout_enable",
    "full_determinism": "train.full_determinism_enable",
    "enable_ema": "train.enable_ema",
    "ema_beta": "train.ema_beta",
    "use_dynamic_batch": "train.dynamic_batch_enable",
    "train_max_tokens_per_gpu": "train.max_tokens_per_gpu",
    "rollout_max_tokens_per_gpu": "rollout.max_tokens_per_gpu",
    "enforce_eager": "vllm.enforce_eager",
    "enable_prefix_caching": "vllm.enable_prefix_caching",
    "attn_implementation": "ds.attn_implementation",
    "param_dtype": "ds.param_dtype",
    "use_liger_kernel": "ds.use_liger_kernel",
    "deepspeed_enable_sleep": "ds.enable_sleep",
    "ds_tensor_parallel_size": "ds.tensor_parallel_size",
    "grad_accum_dtype": "ds.grad_accum_dtype",
    "overlap_comm": "ds.overlap_comm",
    "deepcompile": "ds.deepcompile",
    "zpg": "ds.zpg",
    "ring_attn_size": "ds.ring_attn_size",
    "ring_head_stride": "ds.ring_attn_head_stride",
    "value_head_prefix": "ds.value_head_prefix",
    "use_ds_universal_ckpt": "ds.use_universal_ckpt",
    "gradient_checkpointing_use_reentrant": "actor.gradient_checkpointing_reentrant",
    "save_value_network": "critic.save_value_network",
    "save_hf_ckpt": "ckpt.save_hf",
    "disable_ds_ckpt": "ckpt.disable_ds",
    "max_ckpt_mem": "ckpt.max_mem",
    "best_metric_key": "ckpt.best_metric_key",
}
"""The names of versions before the sections."""

OPENRLHF = Framework("OpenRLHF", RULES, DEFAULTS, ELSEWHERE, RENAMED)
