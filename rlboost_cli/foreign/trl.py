"""TRL: the arguments of its GRPO trainer, in YAML or JSON, and fields of a job file.

Read against TRL 1.x of July 2026 and its `trl grpo --config`. Its batches count responses of one device;
learning rates follow optimizer steps, ours whole steps.
"""

from __future__ import annotations

import math
from typing import Any

from rlboost_cli.foreign.mapping import (
    Framework,
    OptionReader,
    OptionRule,
    Untranslatable,
    lora,
    run_name,
    schedule,
    whole,
)

_LOSSES = {
    ("grpo", "group", "token"): "grpo",
    ("dapo", "group", "token"): "dapo",
    ("dapo", "batch", "token"): "reinforce_pp",
    ("dr_grpo", "none", "token"): "dr_grpo",
    ("cispo", "group", "token"): "cispo",
    ("grpo", "group", "sequence"): "gspo",
}
"""By loss_type, scale_rewards and importance_sampling_level."""
_SCALES = {True: "group", False: "none"}
_SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "warmup_stable_decay",
}
_CORRECTIONS = {"token_truncate": "token", "token_mask": "icepop", "sequence_mask": "sequence_mask"}
_BATCH = (
    "per_device_train_batch_size",
    "num_processes",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
)
_SIZES = "RLBoost packs micro-batches itself: trainer.micro_batch_tokens"
_VLLM = "the fleet serves vLLM: rollout.engine"
_HUB = "output copies the model to a bucket or folder"
_LOGS = "metrics.jsonl has every step; tracking"
_MEMORY = "RLBoost decides by the GPU's memory: trainer.activation_checkpointing"


def _responses(options: OptionReader) -> tuple[int, int]:
    """Return the responses of one generation, and the optimizer steps that use them."""
    micro = options["per_device_train_batch_size"] * options["num_processes"]
    if options["generation_batch_size"]:
        responses = options["generation_batch_size"]
    else:
        responses = micro * (options["steps_per_generation"] or options["gradient_accumulation_steps"])
    per_update = micro * options["gradient_accumulation_steps"]
    return responses, whole(
        max(1, responses / per_update), "responses of a generation / responses of an update"
    )


def _prompts(options: OptionReader) -> int:
    return whole(
        _responses(options)[0] / options["num_generations"], "responses of a generation / num_generations"
    )


def _minibatches(options: OptionReader) -> int:
    if options["num_iterations"] != 1:
        options.leave("num_iterations", "every response is trained on once")
    return _responses(options)[1]


def _steps_of(updates: float, options: OptionReader) -> int:
    """Return our steps that have so many optimizer steps."""
    return math.ceil(updates / _responses(options)[1])


def _steps(options: OptionReader) -> int:
    if options["max_steps"] > 0:
        return _steps_of(options["max_steps"], options)
    raise Untranslatable("write algorithm.steps: epochs x number of prompts / prompts_per_step")


def _warmup(options: OptionReader) -> int:
    steps, share, most = options["warmup_steps"], options["warmup_ratio"], options["max_steps"]
    if 0 < steps < 1:
        steps, share = 0, steps
    if steps:
        return _steps_of(steps, options)
    if not share:
        return 0
    if most < 1:
        raise Untranslatable("write algorithm.learning_rate_warmup_steps: this share of all steps")
    return _steps_of(share * most, options)


def _loss(options: OptionReader) -> str:
    scale = _SCALES.get(options["scale_rewards"], options["scale_rewards"])
    kind, level = options["loss_type"], options["importance_sampling_level"]
    if found := _LOSSES.get((kind, scale, level)):
        return found
    if kind not in ("grpo", "dapo", "dr_grpo", "cispo", "bnpo"):
        options.leave("loss_type", "no such loss; the job has loss: dapo")
        return "dapo"
    nearest = {"bnpo": "dapo", "grpo": "gspo" if level == "sequence" else "grpo"}.get(kind, kind)
    if kind == "bnpo":
        options.leave("loss_type", "dapo is the nearest: the mean is over the tokens of the whole mini-batch")
    if level == "sequence" and kind != "grpo":
        options.leave("importance_sampling_level", "ratios per response are in gspo only")
    wanted = "none" if nearest == "dr_grpo" else "group"
    if scale != wanted:
        options.leave("scale_rewards", f"{nearest} has the equivalent of {wanted}")
    return str(nearest)


def _clip_low(options: OptionReader) -> Any:
    return ... if options["loss_type"] == "cispo" else options["epsilon"]


def _clip_high(options: OptionReader) -> Any:
    high = options["epsilon"] if options["epsilon_high"] is None else options["epsilon_high"]
    return high - 1 if options["loss_type"] == "cispo" else high


def _has_engines(options: OptionReader) -> bool:
    """Whether vLLM generates: a script may say so itself, and leave its options to the file."""
    return bool(options["use_vllm"]) or any(name.startswith("vllm_") for name in options.given)


def _correction(options: OptionReader) -> Any:
    mode = options["vllm_importance_sampling_mode"]
    if not _has_engines(options):
        return ...
    if not options["vllm_importance_sampling_correction"]:
        return "none"
    if mode not in _CORRECTIONS:
        raise Untranslatable(
            "weights per response are masked, not truncated: see algorithm.importance_sampling"
        )
    return _CORRECTIONS[mode]


def _cap(options: OptionReader) -> Any:
    is_on = _has_engines(options) and options["vllm_importance_sampling_correction"]
    cap = options["vllm_importance_sampling_clip_max"]
    return cap if is_on and cap and options["vllm_importance_sampling_mode"] in _CORRECTIONS else ...


def _floor_of_weights(options: OptionReader) -> Any:
    floor = options["vllm_importance_sampling_clip_min"]
    if floor is not None and _correction(options) != "icepop":
        raise Untranslatable("only token_mask (icepop) has a floor here")
    return ... if floor is None else floor


def _data(options: OptionReader) -> Any:
    found = _dataset(options)
    if options["dataset_train_split"] != "train":
        found["split"] = options["dataset_train_split"]
    if options["shuffle_dataset"] is False:
        found["shuffle"] = False
    return found


def _dataset(options: OptionReader) -> dict[str, Any]:
    """Return what training and evaluation have in common."""
    name = options["dataset_name"]
    if name is None:
        raise Untranslatable("write data: no dataset_name")
    found: dict[str, Any] = {"dataset": name}
    if options["dataset_config"] not in (None, "default"):
        found["subset"] = options["dataset_config"]
    if options["dataset_prompt_column"] != "prompt":  # the trainer's own column holds messages or plain text
        found |= {"prompt_field": options["dataset_prompt_column"], "chat_template": "tokenizer"}
    if options["system_prompt"]:
        found["system_prompt"] = options["system_prompt"]
    if options["chat_template_kwargs"]:
        found["template_args"] = options["chat_template_kwargs"]
    return found


def _reward(options: OptionReader) -> str:
    names = options["reward_funcs"] or []
    taken = [name for name in names if str(name).removesuffix("_reward") == "accuracy"]
    if len(taken) != len(names):
        options.leave("reward_funcs", "write those beside accuracy as functions, and reward as a list of all")
    if options["reward_weights"]:
        options.leave("reward_weights", "write reward as a list, each with its weight")
    return "math"


def _tracking(kind: str) -> Any:
    def value(options: OptionReader) -> Any:
        found = options["report_to"]
        names = [found] if isinstance(found, str) else found or []
        if kind not in names and "all" not in names:
            return ...
        return {"project": options["wandb_project"] or "huggingface"} if kind == "wandb" else True

    return value


def _evaluation(options: OptionReader) -> Any:
    if options["eval_strategy"] == "no" or not options["eval_steps"]:
        return ...
    if options["eval_strategy"] != "steps":
        raise Untranslatable("evaluation is every n steps: write evaluation.every_steps")
    found = _dataset(options) | {"split": options["dataset_test_split"]}
    found["every_steps"] = _steps_of(options["eval_steps"], options)
    if options["num_generations_eval"]:
        found["samples"] = whole(options["num_generations_eval"], "num_generations_eval")
    if not options["eval_on_start"]:
        found["at_start"] = False
    return found


def _lora(options: OptionReader) -> Any:
    if not options["use_peft"]:
        return ...
    if options["lora_target_modules"] not in (None, "all-linear", ["all-linear"]):
        options.leave("lora_target_modules", "adapters are on every linear layer")
    return lora(options["lora_r"], options["lora_alpha"])


def _kl(options: OptionReader) -> Any:
    if not options["beta"]:
        return ...
    place = "reward" if _loss(OptionReader(TRL, options.given, options.unknown)) == "reinforce_pp" else "loss"
    if place == "reward":
        options.leave("beta", "reinforce_pp has its KL in the reward, not in the loss")
    return {"coef": options["beta"], "estimator": "k3", "in": place}


def _entropy(options: OptionReader) -> Any:
    if options["entropy_coef"] and _loss(OptionReader(TRL, options.given, options.unknown)) == "reinforce_pp":
        raise Untranslatable("reinforce_pp has no entropy bonus")
    return {"coef": options["entropy_coef"]} if options["entropy_coef"] else ...


def _floor(options: OptionReader) -> float:
    return float((options["lr_scheduler_kwargs"] or {}).get("min_lr_rate", 0.0))


RULES = (
    OptionRule("name", ("run_name",), lambda o: run_name(o["run_name"]), "spelt as a name"),
    OptionRule("model", ("model_name_or_path",)),
    OptionRule(
        "data",
        (
            "dataset_name",
            "dataset_config",
            "dataset_train_split",
            "dataset_prompt_column",
            "system_prompt",
            "chat_template_kwargs",
            "shuffle_dataset",
        ),
        _data,
        "`dataset`, `subset`, `split`, `prompt_field`, `system_prompt`, `template_args`, `shuffle`",
    ),
    OptionRule(
        "reward",
        ("reward_funcs", "reward_weights"),
        _reward,
        "`math` for accuracy_reward: it reads the row's `answer`, or TRL's `solution`; others are yours",
    ),
    OptionRule(
        "algorithm.loss",
        ("loss_type", "scale_rewards", "importance_sampling_level"),
        _loss,
        "grpo, dapo, dr_grpo (scale_rewards: none), cispo: the same; importance_sampling_level sequence:"
        " `gspo`; dapo with scale_rewards batch: `reinforce_pp`; else the nearest, and the difference listed",
    ),
    OptionRule("algorithm.group_size", ("num_generations",)),
    OptionRule(
        "algorithm.prompts_per_step",
        (*_BATCH, "num_generations"),
        _prompts,
        "generation_batch_size / num_generations, where generation_batch_size is per_device_train_batch_size"
        " x devices x steps_per_generation (or gradient_accumulation_steps); devices: num_processes,"
        " or `--devices`",
    ),
    OptionRule(
        "algorithm.minibatches_per_step",
        ("steps_per_generation", "generation_batch_size", "gradient_accumulation_steps", "num_iterations"),
        _minibatches,
        "steps_per_generation / gradient_accumulation_steps",
    ),
    OptionRule(
        "algorithm.steps",
        ("max_steps", "num_train_epochs"),
        _steps,
        "max_steps / minibatches_per_step; epochs x prompts / prompts_per_step is left to you",
    ),
    OptionRule("algorithm.learning_rate", ("learning_rate",)),
    OptionRule(
        "algorithm.learning_rate_warmup_steps",
        ("warmup_steps", "warmup_ratio"),
        _warmup,
        "warmup_steps / minibatches_per_step",
    ),
    OptionRule(
        "algorithm.learning_rate_schedule",
        ("lr_scheduler_type",),
        lambda o: schedule(o["lr_scheduler_type"], _SCHEDULES),
    ),
    OptionRule("algorithm.learning_rate_floor", ("lr_scheduler_kwargs",), _floor, "min_lr_rate"),
    OptionRule("algorithm.weight_decay", ("weight_decay",)),
    OptionRule(
        "algorithm.adam_betas", ("adam_beta1", "adam_beta2"), lambda o: [o["adam_beta1"], o["adam_beta2"]]
    ),
    OptionRule("algorithm.adam_eps", ("adam_epsilon",)),
    OptionRule(
        "algorithm.kl",
        ("beta",),
        _kl,
        "`{coef: beta, estimator: k3, in: loss}`",
    ),
    OptionRule(
        "algorithm.entropy_bonus",
        ("entropy_coef",),
        _entropy,
        "`coef`",
    ),
    OptionRule("algorithm.clip_low", ("epsilon",), _clip_low),
    OptionRule("algorithm.clip_high", ("epsilon_high", "epsilon"), _clip_high, "cispo: epsilon_high - 1"),
    OptionRule("algorithm.dual_clip", (), lambda _: None, "`null`", "it has no dual clip"),
    OptionRule(
        "algorithm.importance_sampling",
        ("vllm_importance_sampling_mode", "vllm_importance_sampling_correction", "use_vllm"),
        _correction,
        "token_truncate: `token`, token_mask: `icepop`, sequence_mask: `sequence_mask`, off: `none`",
    ),
    OptionRule(
        "algorithm.importance_cap",
        ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_mode", "use_vllm"),
        _cap,
    ),
    OptionRule(
        "algorithm.importance_floor",
        ("vllm_importance_sampling_clip_min",),
        _floor_of_weights,
    ),
    OptionRule(
        "algorithm.old_logprobs",
        ("use_vllm",),
        lambda o: "recompute" if _responses(o)[1] > 1 else ...,
        "`recompute` with several mini-batches, as TRL does",
    ),
    OptionRule("algorithm.mask_truncated", ("mask_truncated_completions",)),
    OptionRule(
        "algorithm.max_prompt_tokens", ("max_prompt_length",), None, "longer prompts are left out and counted"
    ),
    OptionRule("algorithm.max_response_tokens", ("max_completion_length",)),
    OptionRule("algorithm.temperature", ("temperature",)),
    OptionRule("algorithm.top_p", ("top_p",)),
    OptionRule("algorithm.grad_clip", ("max_grad_norm",)),
    OptionRule(
        "algorithm.lora",
        ("use_peft", "lora_r", "lora_alpha", "lora_target_modules"),
        _lora,
        "`rank` and `alpha`",
    ),
    OptionRule("algorithm.seed", ("seed",)),
    OptionRule(
        "evaluation",
        ("eval_steps", "eval_strategy", "dataset_test_split", "num_generations_eval", "eval_on_start"),
        _evaluation,
        "`split`, `samples`, `at_start`; `every_steps`: eval_steps / minibatches_per_step",
    ),
    OptionRule("tracking.wandb", ("report_to", "wandb_project"), _tracking("wandb"), "`project`"),
    OptionRule("tracking.tensorboard", ("report_to",), _tracking("tensorboard")),
)

DEFAULTS: dict[str, Any] = {
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "beta": 0.0,
    "chat_template_kwargs": None,
    "dataset_config": None,
    "dataset_name": None,
    "dataset_prompt_column": "prompt",
    "dataset_test_split": "test",
    "dataset_train_split": "train",
    "delta": None,
    "do_eval": False,
    "entropy_coef": 0.0,
    "epsilon": 0.2,
    "epsilon_high": None,
    "eval_on_start": False,
    "eval_steps": None,
    "eval_strategy": "no",
    "generation_batch_size": None,
    "gradient_accumulation_steps": 1,
    "importance_sampling_level": "token",
    "learning_rate": 1e-6,
    "lora_alpha": 32,
    "lora_r": 16,
    "lora_target_modules": None,
    "loss_type": "dapo",
    "lr_scheduler_kwargs": None,
    "lr_scheduler_type": "linear",
    "mask_truncated_completions": False,
    "max_completion_length": 512,
    "max_grad_norm": 1.0,
    "max_prompt_length": 512,
    "max_steps": -1,
    "min_p": None,
    "model_name_or_path": None,
    "num_generations": 8,
    "num_generations_eval": None,
    "num_iterations": 1,
    "num_processes": 1,
    "num_train_epochs": 3.0,
    "off_policy_mask_threshold": None,
    "per_device_train_batch_size": 8,
    "repetition_penalty": 1.0,
    "report_to": "none",
    "reward_funcs": None,
    "reward_weights": None,
    "run_name": None,
    "scale_rewards": "group",
    "seed": 42,
    "shuffle_dataset": True,
    "steps_per_generation": None,
    "sync_ref_model": False,
    "system_prompt": None,
    "temperature": 1.0,
    "top_entropy_quantile": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "use_adaptive_entropy": False,
    "use_peft": False,
    "use_vllm": False,
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "wandb_project": None,
    "warmup_ratio": None,
    "warmup_steps": 0,
    "weight_decay": 0.0,
}

ELSEWHERE = {
    "delta": "two-sided clipping; algorithm.dual_clip bounds negative advantages",
    "top_k": "sampling from the k likeliest tokens biases the probability ratio",
    "min_p": "sampling from likely tokens biases the probability ratio",
    "repetition_penalty": "it biases the probability ratio",
    "generation_kwargs": "temperature and top_p only",
    "multi_objective_aggregation": "one reward",
    "sync_ref_model": "the reference stays the model that the run began with",
    "ref_model_*": "the reference stays the model that the run began with",
    "top_entropy_quantile": "every token is trained on",
    "use_adaptive_entropy": "algorithm.entropy_bonus falls linearly, to final_coef",
    "entropy_coef_*": "algorithm.entropy_bonus falls linearly, to final_coef",
    "entropy_target": "algorithm.entropy_bonus falls linearly, to final_coef",
    "off_policy_mask_threshold": "see sequence_mask of algorithm.importance_sampling",
    "use_bias_correction_kl": "the KL is not multiplied by the ratio",
    "vllm_gpu_memory_utilization": "follows from your machines: rollout.engine_args.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "follows from your machines: rollout.tensor_parallel",
    "vllm_max_model_length": "max_prompt_tokens + max_response_tokens",
    "vllm_max_model_len": "max_prompt_tokens + max_response_tokens",
    "vllm_dtype": "rollout.engine_args.dtype",
    "vllm_*": _VLLM,
    "use_transformers_*": _VLLM,
    "cache_implementation": _VLLM,
    "ds3_*": "FSDP2 over trainer.ranks and trainer.nodes",
    "deepspeed": "FSDP2 over trainer.ranks and trainer.nodes",
    "fsdp*": "FSDP2 over trainer.ranks and trainer.nodes",
    "accelerator_config": "FSDP2 over trainer.ranks and trainer.nodes",
    "ddp_*": "FSDP2 over trainer.ranks and trainer.nodes",
    "gradient_checkpointing*": _MEMORY,
    "bf16": "trainer.dtype",
    "fp16": "trainer.dtype",
    "tf32": "trainer.dtype",
    "torch_dtype": "trainer.dtype; weights are kept in float32",
    "dtype": "trainer.dtype; weights are kept in float32",
    "load_in_*": "the base is not quantised",
    "bnb_*": "the base is not quantised",
    "attn_implementation": "RLBoost chooses the attention",
    "model_revision": "give the folder of that revision as model",
    "model_init_kwargs": "weights are kept in float32; see trainer.dtype",
    "trust_remote_code": "code from a model's repository is not run",
    "optim": "AdamW",
    "optim_args": "AdamW: algorithm.adam_betas, adam_eps, weight_decay",
    "lora_dropout": "adapters have no dropout",
    "lora_modules_to_save": "adapters only are trained",
    "lora_task_type": "adapters on a causal model",
    "dataset_configs": "one data set's configuration: data.subset",
    "dataset_mixture": "data as a list of sources with weights",
    "dataset_streaming": "data sets are read whole",
    "dataset_num_proc": "data sets are read by one process",
    "datasets": "data as a list of sources with weights",
    "chat_template": "write it to a file: data.chat_template",
    "remove_unused_columns": "the reward function gets the row; data.columns",
    "reward_model_name_or_path": "reward: {http: URL, speaks: pooling} asks a served reward model",
    "cosine_*": "write it in rewards.py:score",
    "repetition_*": "write it in rewards.py:score",
    "do_eval": "evaluation",
    "do_train": "a job trains",
    "per_device_eval_batch_size": "an evaluation is rolled out beside a step, all of it at once",
    "eval_*": "evaluation",
    "save_total_limit": "trainer.keep_checkpoints",
    "save_steps": "trainer.checkpoint_every_steps; as often as the disk keeps up by default",
    "save_strategy": "trainer.checkpoint_every_steps; as often as the disk keeps up by default",
    "save_*": "checkpoints are whole",
    "resume_from_checkpoint": "a run is resumed by rlboost launch NAME",
    "output_dir": "output",
    "overwrite_output_dir": "every run has a folder of its own",
    "push_to_hub": _HUB,
    "hub_*": _HUB,
    "log_completions*": "rlboost samples shows responses",
    "log_unique_prompts": "rlboost samples shows responses",
    "num_completions_to_print": "rlboost samples shows responses",
    "wandb_*": "tracking.wandb",
    "log*": _LOGS,
    "disable_tqdm": _LOGS,
    "include_*": _LOGS,
    "data_seed": "algorithm.seed",
    "dataloader_*": "prompts are read by the trainer",
    "auto_find_batch_size": _SIZES,
    "pad_to_multiple_of": _SIZES,
    "use_liger_kernel": _SIZES,
    "disable_dropout": "dropout is off",
    "router_aux_loss_coef": "algorithm.router_aux_loss_coef: about this times experts per token",
    "max_tool_calling_iterations": "responses are a single turn",
}

RENAMED = {
    "model_name": "model_name_or_path",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
    "lr_scheduler": "lr_scheduler_type",
    "evaluation_strategy": "eval_strategy",
    "epsilon_low": "epsilon",
    "max_completion_len": "max_completion_length",
    "dataset_split": "dataset_train_split",
}

TRL = Framework("TRL", RULES, DEFAULTS, ELSEWHERE, RENAMED)
