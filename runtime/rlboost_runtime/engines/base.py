"""The interface between an agent and an inference engine.

Token ids in; token ids, logprobs and the policy version out: text never crosses this seam, so nothing is
ever re-tokenised. The agent owns the engine object on its event loop; the model itself lives in a child
process in a session of its own, so that loading or generating can never starve the agent's heartbeat.

Guarantees an implementation gives:

- every accepted request ends in exactly one `RequestEnded`, or in the engine's `EngineDied`;
- tokens of one request come in order, each once; after `abort` returns, no more tokens of it come;
- logprobs are natural logs under the distribution sampled from (after temperature and top-p);
- tokens in one `EngineOutput` were all sampled under `policy_version`;
- `load` is all-or-nothing: on error the engine serves nothing (version None) rather than a mixture.

`devices_of` divides a machine's GPUs among its engines; nothing here queries a GPU.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rlboost_runtime.errors import ConfigError, RuntimeFault
from rlboost_runtime.protocol.messages import Sampling

ADAPTER_WEIGHTS = "adapter.weights"
"""Low-rank adapters (PEFT's safetensors) beside a version's frozen `model.safetensors`: engines add them. Not
called *.safetensors, or engines would take them for a part of the model."""
ADAPTER_CONFIG = "adapter.json"
"""PEFT's configuration of them; its base model is the folder above."""


class EngineDied(RuntimeFault):
    """The engine's process is gone; everything that it held is lost."""


class LoadFailed(RuntimeFault):
    """The version could not be loaded; the engine serves nothing until another load succeeds."""


class VllmOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """Options of vLLM engines only; the job file documents the fields (`rollout.engine_args`)."""

    python: str | None = None
    enforce_eager: bool = False
    gpu_memory_utilization: float | None = None
    kv_cache_mib: int | None = None
    fp8: bool = False
    speculative: str | None = None
    args: dict[str, Any] = {}  # values of vLLM's own options
    """`rollout.vllm_args`."""
    max_lora_rank: int = 0
    """Largest rank of adapter-only versions; 0: there will be none."""
    may_sleep: bool = False
    """True if the engine will have to free its GPU memory: those on the trainer's own GPUs."""


DEFAULT_VLLM_OPTIONS = VllmOptions()


class EngineSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the head decides about an engine."""

    kind: str
    sampling: Sampling
    max_context_tokens: int
    max_running: int | None
    """Requests that are decoded at once; None: what its measured cache is good for."""
    dtype: str
    seed: int
    threads: int = 1
    tokens_per_s_per_response: float | None = None
    """Paces generation, to stand in for a large model on a laptop; None: full speed."""
    count_tokens: bool = False
    """Diagnostics: let the engine child keep a side file of every token that it generated."""
    tensor_parallel: int = 1
    """GPUs of each engine; the machine's first engine has the first of them."""
    promised_gpus: int = 0
    """GPUs that each engine must see, as they were paid for; 0: it may run on CPUs."""
    vllm: VllmOptions = DEFAULT_VLLM_OPTIONS

    def most_running(self, *, is_cpu: bool = False) -> int:
        """Return the most requests that may be decoded at once, before a cache is measured."""
        return self.max_running or (AUTO_ON_CPU if is_cpu else AUTO_ON_GPU)


class EngineSpec(EngineSettings, frozen=True, kw_only=True):
    """What to start. The model's configuration and weights both come with the first `load`."""

    log: Path
    side_file: Path | None = None
    """Where the engine child appends its own count of every generated token, unbuffered."""
    devices: tuple[str, ...] = ()
    """Its GPUs, as CUDA_VISIBLE_DEVICES names them; empty: all of the machine's."""


class KvCache(msgspec.Struct, frozen=True, array_like=True):
    """The KV cache as the engine allocated it, not as it was asked for."""

    capacity_tokens: int
    block_tokens: int
    """The cache is allocated in blocks of so many tokens."""
    max_running: int = 0
    """Requests decoded at once, as follows from the cache; 0: as the settings say."""


AUTO_ON_CPU = 16
"""Most requests that a CPU decodes at once where the job leaves it open: more share the same few cores."""
AUTO_ON_GPU = 512
"""The same of a GPU: the largest batch that vLLM captures in CUDA graphs by default."""
SHORTEST_SHARE = 16
"""Responses are taken to be at most this many times shorter than their limit. The coordinator books KV cache
for what it sends, so this only bounds a start with far too low an estimate."""


def running_of(capacity_tokens: int, max_context_tokens: int, most: int) -> int:
    """Return the requests to decode at once in a cache of that capacity, at most `most`."""
    return max(1, min(most, SHORTEST_SHARE * capacity_tokens // max_context_tokens))


class Request(msgspec.Struct, frozen=True, array_like=True):
    """One continuation. `request_id` is the assignment; `token_ids` the prompt and what is kept so far."""

    request_id: int
    token_ids: list[int]
    max_new_tokens: int
    priority: int = 0
    """Smaller goes first, and is the last to lose its cache when that is full; engines may ignore it."""
    sampling: Sampling | None = None
    """How to sample it; None: as the engine samples."""

    def sampled(self, by_engine: Sampling) -> Sampling:
        """Return how to sample it, with the engine's stop tokens unless it ignores them."""
        if self.sampling is None:
            return by_engine
        if self.sampling.ignore_eos:
            return self.sampling
        return msgspec.structs.replace(self.sampling, stop_token_ids=by_engine.stop_token_ids)


class RequestEnded(msgspec.Struct, frozen=True, array_like=True):
    """A request is over: "stop", "length", "aborted" or "failed"."""

    request_id: int
    reason: str
    problem: str = ""


class EngineOutput(msgspec.Struct):
    """New tokens of some requests, then the requests that are over.

    Columns, so that a decode step makes no object per token: `counts[i]` tokens belong to `request_ids[i]`;
    `token_ids` and `logprobs` hold those of all requests end to end. A request may occur more than once.
    """

    policy_version: int
    request_ids: list[int] = []
    counts: list[int] = []
    token_ids: list[int] = []
    logprobs: list[float] = []
    ended: list[RequestEnded] = []

    def add(self, request_id: int, token_ids: list[int], logprobs: list[float]) -> None:
        """Append new tokens of one request."""
        self.request_ids.append(request_id)
        self.counts.append(len(token_ids))
        self.token_ids += token_ids
        self.logprobs += logprobs

    def end(self, request_id: int, reason: str, problem: str = "") -> None:
        """Append the end of one request."""
        self.ended.append(RequestEnded(request_id, reason, problem))

    def slices(self) -> Iterator[tuple[int, int, int]]:
        """Yield (request id, start, end): where the tokens of each request lie, in order."""
        end = 0
        for request_id, count in zip(self.request_ids, self.counts, strict=True):
            start, end = end, end + count
            yield request_id, start, end


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """Durations of a load, in seconds."""

    load_s: float
    """Reading and applying the weights."""
    pause_s: float
    """Without tokens; less than `load_s` if something is prepared while the engine serves."""
    start_s: dict[str, float]
    """Phases of the engine's start, if this load started it; else empty."""


@dataclass(frozen=True, slots=True)
class EngineProgress:
    """A snapshot for the heartbeat. `counter` grows whenever the engine does anything at all."""

    counter: int
    running: int
    """Requests that the engine executes: prefill or decode."""
    waiting: int
    """Requests that it has accepted and does not execute: they wait for a slot or for KV cache."""
    tokens_generated: int
    preempted: int = 0
    """Times that it took the KV cache from a running request, to compute it again later."""
    kv_free_tokens: int | None = None
    """Unused KV cache; None: the engine does not report it."""


NO_PROGRESS = EngineProgress(0, 0, 0, 0)


class Engine(Protocol):
    """One inference engine. All methods are called from the agent's event loop."""

    @property
    def kv_cache(self) -> KvCache | None:
        """What the engine measured; known once a `load` returned. None: it cannot report it."""

    @property
    def version(self) -> int | None:
        """Policy version being served; None before the first load, after a failed one and while asleep."""

    async def start(self, timeout_s: float) -> None:
        """Start the child and wait until it can load weights. Raises `EngineDied`."""

    def submit(self, requests: list[Request]) -> None:
        """Queue requests; what cannot be accepted ends as "failed"."""

    async def abort(self, request_ids: list[int]) -> None:
        """Stop these; each that was still held ends as "aborted", after its last tokens."""

    def outputs(self) -> AsyncIterator[EngineOutput]:
        """Yield outputs as they come until the engine stops. Raises `EngineDied`. One consumer."""

    async def load(self, version: int, folder: Path) -> LoadTimes | None:
        """Take the weights of the complete, verified version in `folder`; the engine must hold no request.

        Returns its durations, None if the engine does not measure them. `folder` has the layout of
        `rlboost_runtime.weights.store.store`. Raises `LoadFailed`.
        """

    async def greedy(self, token_ids: list[int], max_new_tokens: int) -> tuple[list[int], list[float]]:
        """Return the greedy continuation and its logprobs at temperature 1: the probe.

        The engine must hold no request.
        """

    async def sleep(self) -> None:
        """Free the GPU memory; the engine must hold no request."""

    async def wake(self) -> None:
        """Take the memory again; weights must be loaded anew (version is None)."""

    def progress(self) -> EngineProgress:
        """Return counters; never waits."""

    async def stop(self) -> None:
        """End the child and everything it started, within 5 s; idempotent."""


def greedy_continuation(
    next_logprobs: Callable[[list[int]], Any],  # a vector of torch or numpy
    token_ids: Sequence[int],
    max_new_tokens: int,
    stop_token_ids: frozenset[int] = frozenset(),
) -> tuple[list[int], list[float]]:
    """Continue `token_ids` by the likeliest tokens, up to and including a stop token: how a probe is made.

    `next_logprobs` returns the logprob of each token of the vocabulary after a sequence.
    """
    sequence, logprobs = list(token_ids), list[float]()
    while len(logprobs) < max_new_tokens:
        logprobs_V = next_logprobs(sequence)
        token = int(logprobs_V.argmax())
        sequence.append(token)
        logprobs.append(float(logprobs_V[token]))
        if token in stop_token_ids:
            break
    return sequence[len(token_ids) :], logprobs


VISIBLE = "CUDA_VISIBLE_DEVICES"


def devices_of(
    index: int, num_engines: int, per_engine: int, inherited: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the GPUs of the `index`-th of a machine's `num_engines` engines, as `VISIBLE` names them.

    () for a single engine, which has all of them. If CUDA_VISIBLE_DEVICES is set, its GPUs are divided;
    raises `ConfigError` if they are too few.
    """
    if num_engines == 1:
        return ()
    start, end = index * per_engine, (index + 1) * per_engine
    visible = inherited.get(VISIBLE, "").strip()
    if not visible:
        return tuple(str(number) for number in range(start, end))
    names = tuple(name.strip() for name in visible.split(","))
    if end > len(names):
        raise ConfigError(
            f"engine {index} of {num_engines} is to have {per_engine} GPUs, but {VISIBLE}={visible} names"
            f" {len(names)} for all of them",
            "name fewer in accelerators, or make more visible",
        )
    return names[start:end]


def device_environment(devices: tuple[str, ...]) -> dict[str, str]:
    """Return the environment variables that give an engine's process its GPUs."""
    return {VISIBLE: ",".join(devices)} if devices else {}
