"""prime-rl: the options of its TOML files, and fields of a job file.

Read against prime-rl of August 2026. `batch_size` counts responses there. Lists of tables are numbered:
`orchestrator.train.source.0.name`.
"""

from __future__ import annotations

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

_SOURCE = "orchestrator.train.source.0"
_TASK = f"{_SOURCE}.env.taskset"
_SAMPLING = "orchestrator.train.sampling"
_OPTIM, _LR = "trainer.optim", "trainer.scheduler"
_SCHEDULES = {"constant": "constant", "linear": "warmup_stable_decay", "cosine": "cosine"}
_ENVIRONMENT = "environments of verifiers have no counterpart: write data and reward"
_MACHINES = "follows from your machines: trainer, rollout.spot"
_FSDP = "FSDP2 over trainer.ranks and trainer.nodes"
_WEIGHTS = "weights"
_VLLM = "an option of vLLM's: rollout.vllm_args"
_CHECKPOINTS = "trainer.checkpoint_every_steps; as often as the disk keeps up by default"


def _loss(options: OptionReader) -> str:
    kind = options["orchestrator.algo.type"]
    if kind != "grpo":
        options.leave("orchestrator.algo.type", "no such algorithm; the job has loss: dr_grpo")
    options.leave(
        "trainer.loss.type",
        "it drops tokens by how far their probability moved and divides by the tokens; dr_grpo, the nearest,"
        " has its advantages (no std), clips the ratio and divides by a constant",
    )
    return "dr_grpo"


def _prompts(options: OptionReader) -> int:
    if not options["orchestrator.batch_size"]:
        raise Untranslatable("a batch of tokens: write algorithm.prompts_per_step")
    return whole(
        options["orchestrator.batch_size"] / max(1, options["orchestrator.group_size"]),
        "batch_size / group_size",
    )


def _response(options: OptionReader) -> int:
    return int(options[f"{_SAMPLING}.max_completion_tokens"] or _context(options))


def _prompt(options: OptionReader) -> Any:
    left = _context(options) - _response(options)
    return left if left > 0 else ...


def _context(options: OptionReader) -> int:
    return int(options["orchestrator.seq_len"] or options["seq_len"] or 2048)


def _staleness(options: OptionReader) -> int:
    most = options["orchestrator.max_off_policy_steps"]
    if most > 1:
        options.leave(
            "orchestrator.max_off_policy_steps",
            "it bounds the age of a response there, and how far the fleet runs ahead here: 1 step; more with"
            " algorithm.max_staleness",
        )
    return int(min(1, most))


def _data(options: OptionReader) -> Any:
    if not options[f"{_TASK}.dataset_name"]:
        raise Untranslatable(_ENVIRONMENT)
    found = {"dataset": options[f"{_TASK}.dataset_name"], "chat_template": "tokenizer"}
    if options[f"{_TASK}.dataset_subset"] not in (None, "default"):
        found["subset"] = options[f"{_TASK}.dataset_subset"]
    if options[f"{_TASK}.dataset_split"] not in (None, "train"):
        found["split"] = options[f"{_TASK}.dataset_split"]
    return found


def _reward(options: OptionReader) -> str:
    if options[f"{_TASK}.id"]:
        options.leave(f"{_TASK}.id", _ENVIRONMENT)
    return "math"


def _warmup(options: OptionReader) -> int:
    return 0 if options[f"{_LR}.type"] == "constant" else int(options[f"{_LR}.warmup_steps"])


def _decay(options: OptionReader) -> Any:
    return options[f"{_LR}.decay_steps"] or ... if options[f"{_LR}.type"] == "linear" else ...


def _floor(options: OptionReader) -> float:
    return (
        float(options[f"{_LR}.min_lr"]) / float(options[f"{_OPTIM}.lr"]) if options[f"{_LR}.min_lr"] else 0.0
    )


def _wandb(options: OptionReader) -> Any:
    wandb = {
        name: options[f"monitors.wandb.{name}"]
        for name in ("project", "entity", "offline")
        if options[f"monitors.wandb.{name}"]
    }
    is_on = any(option.startswith("monitors.wandb") for option in options.given)
    return {"project": "prime-rl"} | wandb if is_on else ...


def _evaluation(options: OptionReader) -> Any:
    if not any(option.startswith("orchestrator.eval.") for option in options.given):
        return ...
    return {"every_steps": options["orchestrator.eval.interval"]}


def _lora(options: OptionReader) -> Any:
    is_on = any(option.startswith("trainer.model.lora") for option in options.given)
    return lora(options["trainer.model.lora.rank"], options["trainer.model.lora.alpha"]) if is_on else ...


def _betas(options: OptionReader) -> list[float]:
    if options[f"{_OPTIM}.type"] != "adamw":
        options.leave(f"{_OPTIM}.type", "AdamW")
    return [options[f"{_OPTIM}.betas1"], options[f"{_OPTIM}.betas2"]]


RULES = (
    OptionRule(
        "name", ("monitors.wandb.name",), lambda o: run_name(o["monitors.wandb.name"]), "spelt as a name"
    ),
    OptionRule("model", ("model.name",)),
    OptionRule(
        "data",
        (f"{_TASK}.dataset_name", f"{_TASK}.dataset_subset", f"{_TASK}.dataset_split"),
        _data,
        "`dataset`, `subset`, `split`, where the environment names a data set; others are yours to write",
    ),
    OptionRule(
        "reward", (f"{_TASK}.id",), _reward, "`math` until you write yours: the environment has the reward"
    ),
    OptionRule(
        "algorithm.loss",
        ("orchestrator.algo.type", "trainer.loss.type"),
        _loss,
        "`dr_grpo`, the nearest to prime-rl's own loss; the difference is listed",
    ),
    OptionRule(
        "algorithm.group_size",
        ("orchestrator.group_size",),
        lambda o: group_size(o["orchestrator.group_size"]),
    ),
    OptionRule(
        "algorithm.prompts_per_step",
        ("orchestrator.batch_size", "orchestrator.group_size"),
        _prompts,
        "batch_size / group_size",
    ),
    OptionRule("algorithm.steps", ("max_steps",), lambda o: o["max_steps"] or ...),
    OptionRule("algorithm.learning_rate", (f"{_OPTIM}.lr",)),
    OptionRule("algorithm.learning_rate_warmup_steps", (f"{_LR}.warmup_steps", f"{_LR}.type"), _warmup),
    OptionRule(
        "algorithm.learning_rate_schedule",
        (f"{_LR}.type",),
        lambda o: schedule(o[f"{_LR}.type"], _SCHEDULES),
        "linear: `warmup_stable_decay`",
    ),
    OptionRule("algorithm.learning_rate_decay_steps", (f"{_LR}.decay_steps", f"{_LR}.type"), _decay),
    OptionRule("algorithm.learning_rate_floor", (f"{_LR}.min_lr",), _floor, "min_lr / lr"),
    OptionRule("algorithm.weight_decay", (f"{_OPTIM}.weight_decay",)),
    OptionRule("algorithm.adam_betas", (f"{_OPTIM}.betas1", f"{_OPTIM}.betas2", f"{_OPTIM}.type"), _betas),
    OptionRule("algorithm.grad_clip", (f"{_OPTIM}.max_norm",)),
    OptionRule("algorithm.dual_clip", (), lambda _: None, "`null`", "it has no dual clip"),
    OptionRule(
        "algorithm.zero_variance_groups",
        ("orchestrator.train.filter_zero_advantages",),
        lambda o: "drop" if o["orchestrator.train.filter_zero_advantages"] else "keep",
        "true: `drop`",
    ),
    OptionRule(
        "algorithm.max_response_tokens",
        (f"{_SAMPLING}.max_completion_tokens", "orchestrator.seq_len", "seq_len"),
        _response,
        "max_completion_tokens, else seq_len",
    ),
    OptionRule(
        "algorithm.max_prompt_tokens",
        ("orchestrator.seq_len", "seq_len", f"{_SAMPLING}.max_completion_tokens"),
        _prompt,
        "seq_len - max_completion_tokens",
    ),
    OptionRule("algorithm.temperature", (f"{_SAMPLING}.temperature",)),
    OptionRule(
        "algorithm.lora", ("trainer.model.lora.rank", "trainer.model.lora.alpha"), _lora, "`rank` and `alpha`"
    ),
    OptionRule(
        "algorithm.max_staleness",
        ("orchestrator.max_off_policy_steps",),
        _staleness,
        "0: 0; else 1, and the bound is listed",
    ),
    OptionRule("evaluation", ("orchestrator.eval.interval",), _evaluation, "`every_steps`"),
    OptionRule(
        "tracking.wandb",
        ("monitors.wandb.project", "monitors.wandb.entity", "monitors.wandb.offline"),
        _wandb,
        "`project`, `entity`, `offline`",
    ),
)

DEFAULTS: dict[str, Any] = {
    "max_steps": None,
    "model.name": "Qwen/Qwen3-0.6B",
    "monitors.wandb.entity": None,
    "monitors.wandb.name": None,
    "monitors.wandb.offline": False,
    "monitors.wandb.project": "prime-rl",
    "orchestrator.algo.type": "grpo",
    "orchestrator.batch_size": None,
    "orchestrator.eval.interval": 100,
    "orchestrator.group_size": 1,
    "orchestrator.max_off_policy_steps": 8,
    "orchestrator.seq_len": None,
    "orchestrator.train.filter_zero_advantages": True,
    f"{_SAMPLING}.max_completion_tokens": None,
    f"{_SAMPLING}.temperature": 1.0,
    f"{_TASK}.dataset_name": None,
    f"{_TASK}.dataset_split": None,
    f"{_TASK}.dataset_subset": None,
    f"{_TASK}.id": None,
    "seq_len": None,
    "trainer.loss.adv_tau": 1.0,
    "trainer.loss.dppo_mask_high": 0.2,
    "trainer.loss.dppo_mask_low": 0.2,
    "trainer.loss.kl_tau": 1e-3,
    "trainer.loss.type": "default",
    "trainer.model.lora.alpha": 32.0,
    "trainer.model.lora.dropout": 0.0,
    "trainer.model.lora.rank": 16,
    f"{_OPTIM}.betas1": 0.9,
    f"{_OPTIM}.betas2": 0.999,
    f"{_OPTIM}.lr": 1e-6,
    f"{_OPTIM}.max_norm": 1.0,
    f"{_OPTIM}.type": "adamw",
    f"{_OPTIM}.weight_decay": 0.01,
    f"{_LR}.decay_steps": 10,
    f"{_LR}.min_lr": 0.0,
    f"{_LR}.type": "constant",
    f"{_LR}.warmup_steps": 10,
}

ELSEWHERE = {
    "orchestrator.train.source.*": _ENVIRONMENT,
    "orchestrator.train.env*": _ENVIRONMENT,
    "orchestrator.env*": _ENVIRONMENT,
    f"{_SAMPLING}.extra_body*": "temperature only; algorithm.top_p",
    f"{_SAMPLING}.*": "algorithm.temperature, top_p, max_response_tokens",
    "orchestrator.eval.*": "evaluation has source, samples and temperature",
    "orchestrator.algo.*": "no such part of an algorithm",
    "orchestrator.renderer*": "the tokenizer's chat template; another with data.chat_template",
    "orchestrator.tokenizer*": "the model's own tokenizer",
    "orchestrator.concurrency*": "RLBoost books what fits into the engines: rollout.engine_args.max_running",
    "orchestrator.token_batch_size": "a step has a number of prompts: algorithm.prompts_per_step",
    "orchestrator.ckpt*": _CHECKPOINTS,
    "orchestrator.model.lora*": "algorithm.lora",
    "orchestrator.*": "RLBoost's coordinator decides",
    "model.vlm*": "prompts are text",
    "tokenizer*": "the model's own tokenizer; its template: data.chat_template",
    "trainer.loss.*": "a part of prime-rl's own loss",
    "trainer.model.lora.*": "adapters are on every linear layer, without dropout",
    "trainer.model.seq_len": "responses are packed: trainer.micro_batch_tokens",
    "trainer.model.ac*": "RLBoost decides by the GPU's memory: trainer.activation_checkpointing",
    "trainer.model.*offload*": "RLBoost decides by the GPU's memory: trainer.optimizer_offload",
    "trainer.model.*dtype": "trainer.dtype",
    "trainer.model.attn": "RLBoost chooses the attention",
    "trainer.model.*": _FSDP,
    "trainer.ckpt*": _CHECKPOINTS,
    "trainer.*": _FSDP,
    "ckpt.keep*": "trainer.keep_checkpoints",
    "ckpt*": _CHECKPOINTS,
    "resume*": "a run is resumed by rlboost launch NAME",
    "weight_broadcast*": _WEIGHTS,
    "rollout_transport*": "engines stream tokens",
    "inference.vllm.tensor_parallel_size": "follows from your machines: rollout.tensor_parallel",
    "inference.vllm.gpu_memory_utilization": "follows from your machines: rollout.engine_args",
    "inference.vllm.max_model_len": "max_prompt_tokens + max_response_tokens",
    "inference.*": _VLLM,
    "inference": "rollout.engine: vllm",
    "deployment*": _MACHINES,
    "slurm*": _MACHINES,
    "monitors.*": "tracking; metrics.jsonl has every step",
    "log*": "rlboost logs",
    "output_dir": "output",
    "clean": "every run has a folder of its own",
    "env_vars*": "env",
    "run*": "name",
    "bench*": "rlboost plan --probe measures",
}

RENAMED = {
    "orchestrator.rollouts_per_example": "orchestrator.group_size",
    "orchestrator.sampling.max_tokens": f"{_SAMPLING}.max_completion_tokens",
    "orchestrator.sampling.temperature": f"{_SAMPLING}.temperature",
    f"{_SAMPLING}.max_tokens": f"{_SAMPLING}.max_completion_tokens",
    "orchestrator.max_async_level": "orchestrator.max_off_policy_steps",
    "max_async_level": "orchestrator.max_off_policy_steps",
    "trainer.model.experimental.lora.rank": "trainer.model.lora.rank",
    "trainer.model.experimental.lora.alpha": "trainer.model.lora.alpha",
} | {f"wandb.{name}": f"monitors.wandb.{name}" for name in ("project", "name", "entity", "offline")}

PRIME_RL = Framework("prime-rl", RULES, DEFAULTS, ELSEWHERE, RENAMED)
