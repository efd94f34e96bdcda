"""The command line and environment of a vLLM server, from the job's options. Pure.

What we rely on: token ids in and out without a tokenizer, logprobs of the distribution sampled from, prefix
caching, no defaults from the model's generation configuration, and an admin interface that only this user can
reach (a socket in a folder of mode 700).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from rlboost_runtime.engines.base import EngineSpec, device_environment
from rlboost_runtime.engines.model_folder import kv_bytes_per_token, read_config
from rlboost_runtime.run.engine_python import EnginePython

MODEL = "policy"
"""The served model's name."""
MODULE = "vllm.entrypoints.openai.api_server"
WORKER_FOLDER = Path(__file__).with_name("worker")
"""Holds the one module of ours that vLLM imports."""
WORKER_EXTENSION = "rlboost_vllm_worker.WorkerExtension"
BACKEND = "rlboost"
CPU_BLOCK_TOKENS = 32
"""Tokens of a KV cache block on CPUs. Prompts share whole blocks only: the default, 128, is too coarse."""
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
LORA_SLOTS = 2
"""Adapters that may be in flight at once: the version being left and the one being entered."""
NUM_DRAFT_TOKENS = 4
"""Tokens that a speculative step proposes: above this, acceptance at temperature 1 no longer pays."""
MIN_FP8_CAPABILITY = (8, 9)
"""The first GPUs (Ada, Hopper) that multiply fp8."""

_DRAFTERS: dict[str, dict[str, object]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": NUM_DRAFT_TOKENS, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": NUM_DRAFT_TOKENS},
}
_UNKNOWN_FLAGS = re.compile(r"error: unrecognized arguments: (.+)")
_PYTHON_VARIABLES = re.compile(r"PYTHON\w*|VIRTUAL_ENV|__PYVENV_LAUNCHER__")


Flag = tuple[str, ...]
"""The words of one option on the command line."""


def flags(spec: EngineSpec, is_cpu: bool, folder: Path, socket: Path) -> list[Flag]:
    """Return the server's options for the model in `folder`. Raises `Unreadable`."""
    return [
        ("--model", str(folder)),
        ("--served-model-name", MODEL),
        ("--uds", str(socket)),
        ("--skip-tokenizer-init",),
        ("--generation-config", "vllm"),
        ("--logprobs-mode", "processed_logprobs"),
        ("--enable-prefix-caching",),
        ("--scheduling-policy", "priority"),
        ("--enable-scale-out",),
        ("--disable-uvicorn-access-log",),
        ("--dtype", spec.dtype),
        ("--seed", str(spec.seed % 2**31)),
        ("--max-model-len", str(spec.max_context_tokens)),
        ("--max-num-seqs", str(most_running(spec, is_cpu))),
        ("--worker-extension-cls", WORKER_EXTENSION),
        ("--weight-transfer-config", json.dumps({"backend": BACKEND})),
        *_optional(spec),
        *(_for_cpu(spec, folder) if is_cpu else _for_gpu(spec)),
        *(_passed_through(name, value) for name, value in spec.vllm.args.items() if name != MOST_RUNNING),
    ]


MOST_RUNNING = "max_num_seqs"
"""The one option of vLLM that bounds what we choose ourselves."""


def most_running(spec: EngineSpec, is_cpu: bool) -> int:
    """Return the most requests that the server decodes at once."""
    return int(spec.vllm.args.get(MOST_RUNNING) or spec.most_running(is_cpu=is_cpu))


def _passed_through(name: str, value: Any) -> Flag:  # any JSON value
    """Return an option of vLLM as its command line takes it; of two the last one holds."""
    match value:
        case bool():
            return (option(name, is_on=value),)
        case dict():
            return (option(name), json.dumps(value))
        case list():
            return (option(name), *map(str, value))
        case _:
            return (option(name), str(value))


def option(name: str, *, is_on: bool = True) -> str:
    """Return the word on vLLM's command line for a field of its EngineArgs."""
    return f"--{'' if is_on else 'no-'}{name.replace('_', '-')}"


def _optional(spec: EngineSpec) -> list[Flag]:
    options = spec.vllm
    found: list[Flag] = []
    if spec.tensor_parallel > 1:
        found.append(("--tensor-parallel-size", str(spec.tensor_parallel)))
    if options.enforce_eager:
        found.append(("--enforce-eager",))
    if options.fp8:
        found.append(("--quantization", "fp8"))
    if options.speculative is not None:
        found.append(("--speculative-config", json.dumps(_DRAFTERS[options.speculative])))
    if options.max_lora_rank:
        found += [
            ("--enable-lora",),
            ("--max-lora-rank", str(options.max_lora_rank)),
            ("--max-loras", str(LORA_SLOTS)),
        ]
    return found


def _for_gpu(spec: EngineSpec) -> list[Flag]:
    options = spec.vllm
    found: list[Flag] = []
    if options.gpu_memory_utilization is not None:
        found.append(("--gpu-memory-utilization", str(options.gpu_memory_utilization)))
    if options.kv_cache_mib is not None:
        found.append(("--kv-cache-memory-bytes", str(options.kv_cache_mib << 20)))
    if options.may_sleep:
        found.append(("--enable-sleep-mode",))
    return found


def _for_cpu(spec: EngineSpec, folder: Path) -> list[Flag]:
    """Memory for what may run at once; alone one process less: the platform would turn "uni" into "mp"."""
    num_bytes = (spec.vllm.kv_cache_mib or 0) << 20 or cpu_cache_bytes(spec, folder)
    found: list[Flag] = [
        ("--kv-cache-memory-bytes", str(num_bytes)),
        ("--block-size", str(CPU_BLOCK_TOKENS)),
        ("--distributed-executor-backend", UNIPROC if spec.tensor_parallel == 1 else "mp"),
    ]
    return found if spec.vllm.enforce_eager else [*found, ("--enforce-eager",)]


def cpu_cache_bytes(spec: EngineSpec, folder: Path) -> int:
    """Return the bytes of one full context for each running response and one more for the probe."""
    blocks = -(-spec.max_context_tokens // CPU_BLOCK_TOKENS) * (most_running(spec, is_cpu=True) + 1)
    return blocks * CPU_BLOCK_TOKENS * kv_bytes_per_token(read_config(folder), spec.dtype)


_ON_LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""An engine is on one machine: what its processes say to one another stays there."""


def environment(
    inherited: Mapping[str, str], spec: EngineSpec, is_cpu: bool, key: str, cache: Path
) -> dict[str, str]:
    """Return the server's environment: ours without our Python's variables, and what vLLM reads.

    `cache` keeps compiled graphs across restarts.
    """
    found = {name: value for name, value in inherited.items() if not _PYTHON_VARIABLES.fullmatch(name)}
    found |= {
        "PYTHONPATH": str(WORKER_FOLDER),
        "VLLM_API_KEY": key,
        "VLLM_SERVER_DEV_MODE": "1",  # pause, weight updates, sleep
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CACHE_ROOT": inherited.get("VLLM_CACHE_ROOT", str(cache)),
        "HF_HUB_OFFLINE": "1",  # everything comes in the version's folder
        "TOKENIZERS_PARALLELISM": "false",
        "SPT_NOENV": "1",  # or a process's title is written over its environment, by whose tags we end it
        **{name: inherited.get(name, value) for name, value in _ON_LOOPBACK.items()},
        **device_environment(spec.devices),
    }
    if is_cpu:
        found |= {
            "OMP_NUM_THREADS": str(spec.threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCHDYNAMO_DISABLE": "1",  # else the first logprobs wait 18 s for a C++ compiler
        }
    return found


def command(python: EnginePython, options: Sequence[Flag]) -> list[str]:
    """Return the whole command line."""
    return [str(python.path), "-m", MODULE, *chain.from_iterable(options)]


def unknown_flags(log_text: str) -> set[str]:
    """Return the options that an older vLLM refused, from what it printed at its end."""
    match = _UNKNOWN_FLAGS.search(log_text)
    return set() if match is None else {word for word in match[1].split() if word.startswith("--")}


def fp8_refusal(capabilities: str) -> str | None:
    """Return why the GPUs cannot serve fp8, from lines such as "8.9"; None if they can."""
    found = re.findall(r"^([0-9]+)\.([0-9]+)$", capabilities, re.MULTILINE)
    lowest = min(((int(major), int(minor)) for major, minor in found), default=(0, 0))
    if lowest >= MIN_FP8_CAPABILITY:
        return None
    wanted, has = (".".join(map(str, pair)) for pair in (MIN_FP8_CAPABILITY, lowest))
    return f"fp8 needs GPUs of compute capability {wanted}, here is one of {has}"
