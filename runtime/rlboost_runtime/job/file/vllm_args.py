"""Checks `rollout.vllm_args` against what RLBoost sets itself and what the installed vLLM knows.

vLLM is not imported, which would take seconds: the fields of its EngineArgs are read from its source. Where
the job's engine Python is not on this machine, the engines' vLLM refuses unknown names when it starts.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlboost_runtime.job import Job
from rlboost_runtime.job.file.shape import close_match, shown
from rlboost_runtime.job.file.tree import FieldPath, Mistake
from rlboost_runtime.run.engine_python import engine_python_path

PATH: FieldPath = ("rollout", "vllm_args")
SOURCE = "lib/python3*/site-packages/vllm/engine/arg_utils.py"
_CLASSES = ("EngineArgs", "AsyncEngineArgs")
_ARGS = "rollout.engine_args"
_NOTHING = ""
FIELDS_INSTEAD = {
    **dict.fromkeys(
        ("model", "model_weights", "tokenizer", "revision", "hf_config_path", "load_format"), "model"
    ),
    "max_model_len": "algorithm.max_prompt_tokens and algorithm.max_response_tokens",
    "seed": "algorithm.seed",
    "dtype": f"{_ARGS}.dtype",
    "quantization": f"{_ARGS}.fp8",
    "enforce_eager": f"{_ARGS}.enforce_eager",
    "gpu_memory_utilization": f"{_ARGS}.gpu_memory_utilization",
    "kv_cache_memory_bytes": f"{_ARGS}.kv_cache_mib",
    "num_gpu_blocks_override": f"{_ARGS}.kv_cache_mib",
    "speculative_config": f"{_ARGS}.speculative",
    **dict.fromkeys(("enable_lora", "max_lora_rank", "max_loras", "lora_modules"), "algorithm.lora"),
    **dict.fromkeys(
        ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "nnodes"),
        "rollout.tensor_parallel",
    ),
    **dict.fromkeys(("host", "port", "uds", "api_key", "served_model_name"), _NOTHING),
    **dict.fromkeys(("weight_transfer_config", "worker_extension_cls", "enable_scale_out"), _NOTHING),
    **dict.fromkeys(("skip_tokenizer_init", "generation_config", "logprobs_mode", "max_logprobs"), _NOTHING),
    **dict.fromkeys(("enable_prefix_caching", "scheduling_policy", "distributed_executor_backend"), _NOTHING),
    **dict.fromkeys(("enable_sleep_mode", "disable_log_stats", "config"), _NOTHING),
}
"""Names that RLBoost sets or relies on, each with the job's field to use instead; "": there is none."""


def check_vllm_args(data: dict[str, Any]) -> list[Mistake]:
    """Return the options in the job `data` that RLBoost sets or this machine's vLLM does not know."""
    rollout = data.get("rollout")
    written = rollout.get("vllm_args") if isinstance(rollout, dict) else None
    if not isinstance(written, dict) or not written:
        return []
    options = rollout.get("engine_args") if isinstance(rollout, dict) else None
    options = options if isinstance(options, dict) else {}
    return [Mistake((*PATH, name), problem) for name, problem in _problems(written, options)]


def vllm_args_hint(job: Job) -> Iterator[str]:
    """Say which names could not be checked on this machine."""
    written = job.rollout.vllm_args
    if written and known_names(job.rollout.engine_args.python) is None:
        names = ", ".join(written)
        yield f"rollout.vllm_args: {names}: checked on the machine; no vLLM is found on this one"


def known_names(python: str | None) -> frozenset[str] | None:
    """Return the fields of the EngineArgs of the vLLM installed for `python`; None if it cannot be read."""
    path, _ = engine_python_path(python)
    for source in sorted(path.parent.parent.glob(SOURCE)):
        return _fields(source) or None
    return None


def _fields(source: Path) -> frozenset[str]:
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return frozenset()
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in _CLASSES)
    return frozenset(
        each.target.id
        for node in classes
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    )


def _problems(
    written: dict[str, Any], options: dict[str, Any]
) -> Iterator[tuple[str, str]]:  # any JSON values
    python = options.get("python")
    known = known_names(python if isinstance(python, str) else None)
    for name, value in written.items():
        if (problem := _problem(name, value, options, known)) is not None:
            yield name, problem


def _problem(
    name: str, value: Any, options: dict[str, Any], known: frozenset[str] | None
) -> str | None:  # any JSON values
    found = f"found {shown(value)}, but "
    if name == "max_num_seqs":
        if options.get("max_running", "auto") != "auto":
            return f"{found}{_ARGS}.max_running is {options['max_running']}; remove one of them"
        is_number = isinstance(value, int) and not isinstance(value, bool) and value > 0
        return None if is_number else f"{found}it is a whole number of at least 1; write one"
    instead = FIELDS_INSTEAD.get(name)
    if instead is not None:
        return f"{found}RLBoost sets it; " + (f"use {instead} instead" if instead else "remove it")
    if value is None:
        return f"{found}vLLM's options take a value; write one, or remove it"
    if known is None or name in known:
        return None
    close = close_match(name, sorted(known))
    hint = f"did you mean {close}?" if close else "see `vllm serve --help`, or remove it"
    return f"unknown option of the vLLM on this machine; {hint}"
