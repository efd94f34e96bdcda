"""The continuous batching of transformers, one decode step at a time.

`init_continuous_batching` gives a manager: it schedules, keeps the paged cache, prefills in chunks, samples,
and returns logprobs; requests enter by `add_request`, leave by `cancel_request`, and their tokens come from
`get_result`. Here the manager's own thread is not started: `run_step` makes its step when the owner says so.

Why not its thread: a thread cannot be held between two steps. Pacing must keep steps apart, an abort must end
a request without a further token, and tokens must be counted before the next ones are made. `pause` comes
close, but the loop reads its queues before it waits (`ContinuousBatchProcessor._update_tp_group_state`): what
is cancelled or added in a pause takes effect a step late. The price is one private method of the library,
called in `run_step` alone.

Measured on a shared two-core machine, one thread (Qwen2, hidden 128, 2 layers; 32-token prompts, 128 new
tokens, 16 running): 0.54 times the tokens per second of the hand-written loop that this replaced, the
manager's own thread 0.55; from sampled to handed over a median of 0.5 ms, the thread 0.8. Without flash
attention the library reads the keys of all requests under one mask. Larger models and GPUs were not measured.

Guarantees: the tokens and logprobs of a request do not depend on which others share its batch, but for the
rounding of floating-point sums; no key or value outlives its request (blocks are never shared), so new
weights in the same model meet no stale cache; after `drop` no token of a request is sampled; one step samples
one token for each running request whose prompt is through. Requests are admitted first come, first served.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import (
    ContinuousBatchingManager,
    ContinuousMixin,
    RequestStatus,
)
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from rlboost_runtime.engines.base import EngineOutput, EngineSpec, KvCache, Request
from rlboost_runtime.engines.model_folder import Unreadable, kv_bytes_per_token, read_config
from rlboost_runtime.engines.transformers.per_request import sample_per_request
from rlboost_runtime.protocol.messages import Sampling

PAGE_TOKENS = 32
"""Cache is allocated in pages of so many tokens: what a response wastes at most."""
GPU_MEMORY_SHARE = 0.7
"""Of the GPU's free memory, once the model is there; the rest is for activations and what is fragmented."""
CPU_MEMORY_SHARE = 0.1
"""Of the machine's free memory: engines on CPUs share it with each other and with the trainer."""
PREFILL_TOKENS = 512
"""Prompt tokens per step, of all requests together: bounds a step's time, and the mask at so many rows."""


@dataclass(slots=True)
class _Held:
    """A request and how many of its tokens have been passed on; results are cumulative."""

    request_id: int
    stop_ids: frozenset[int]
    num_passed_on: int = 0


class ContinuousBatch:
    """Waiting and running requests on one model, whose weights may be changed while it is empty."""

    def __init__(
        self,
        model: PreTrainedModel,
        sampling: Sampling,
        max_running: int,
        max_context_tokens: int,
        *,
        is_measured: bool = False,
    ) -> None:
        self._is_measured = is_measured
        self._sampling = sampling
        self._vocabulary = model.config.get_text_config().vocab_size
        self._max_running = max_running
        self._max_context_tokens = max_context_tokens
        generating = cast(ContinuousMixin, model)  # what a model that generates is
        self._manager = generating.init_continuous_batching(
            generation_config(sampling), batching_config(max_running, max_context_tokens)
        )
        if sampling.temperature > 0:
            sample_per_request(self._manager, sampling)
        self._manager.warmup()  # allocates the cache
        self._keys = itertools.count()
        self._held: dict[str, _Held] = {}  # by the library's name for it: never the same twice
        self._key_of: dict[int, str] = {}

    @property
    def is_empty(self) -> bool:
        """True if no request is held."""
        return not self._held

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""
        return min(len(self._held), self._max_running)

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._held) - self.num_running

    @property
    def kv_cache(self) -> KvCache:
        """The paged cache, as the library allocated it."""
        running = self._max_running if self._is_measured else 0
        return KvCache(self._cache.num_blocks * PAGE_TOKENS, PAGE_TOKENS, running)

    @property
    def kv_free_tokens(self) -> int:
        """Tokens in pages that no request holds."""
        return round(self._cache.compute_free_capacity() * self.kv_cache.capacity_tokens)

    @property
    def _cache(self) -> PagedAttentionCache:
        processor = self._manager.batch_processor
        assert processor is not None  # since `warmup`
        return processor.cache

    def seed(self, seed: int) -> None:
        """Start the random sequence that samples; the library draws from torch's global generator."""
        torch.manual_seed(seed)

    def refusal(self, request: Request) -> str | None:
        """Return why the request cannot be accepted, or None."""
        if not request.token_ids:
            return "no tokens to continue"
        if min(request.token_ids) < 0 or max(request.token_ids) >= self._vocabulary:
            return f"token id outside the vocabulary of {self._vocabulary}"
        if request.max_new_tokens < 1:
            return f"max_new_tokens is {request.max_new_tokens}"
        total = len(request.token_ids) + request.max_new_tokens
        if total > self._max_context_tokens:
            return f"{total} tokens with the new ones exceed the context of {self._max_context_tokens}"
        if self._sampling.temperature == 0 and request.sampled(self._sampling).temperature > 0:
            return "it is to be sampled, but this engine takes the likeliest tokens (temperature 0)"
        if request.request_id in self._key_of:
            return f"request {request.request_id} is already held"
        return None

    def add(self, request: Request) -> None:
        """Queue a request for which `refusal` is None."""
        key = str(next(self._keys))
        how = request.sampled(self._sampling)
        self._held[key] = _Held(request.request_id, frozenset(how.stop_token_ids))
        self._key_of[request.request_id] = key
        options: dict[str, Any] = {}
        if request.sampling is not None:
            options["eos_token_id"] = sorted(how.stop_token_ids) or -1
        if request.sampling is not None and self._sampling.temperature > 0:
            options |= {"temperature": how.temperature, "top_p": how.top_p}
        self._manager.add_request(
            request.token_ids,
            request_id=key,
            max_new_tokens=request.max_new_tokens,
            streaming=True,
            **options,
        )

    def drop(self, request_ids: Sequence[int]) -> list[int]:
        """Forget these; return those that were held."""
        gone = sorted(self._key_of.keys() & set(request_ids))
        for request_id in gone:
            self._manager.cancel_request(self._key_of[request_id])
            self._forget(request_id)
        return gone

    def step(self, policy_version: int) -> EngineOutput:
        """Admit what fits, then sample one token for each running request; the batch must not be empty."""
        run_step(self._manager)
        result = EngineOutput(policy_version)
        while (output := self._manager.get_result(timeout=0)) is not None:
            held = self._held[output.request_id]
            new = slice(held.num_passed_on, None)
            token_ids, logprobs = output.generated_tokens[new], output.logprobs[new]
            if output.status == RequestStatus.FAILED:
                self._end(held.request_id, "failed", result, output.error or "the library gives no reason")
            elif not all(map(math.isfinite, logprobs)):
                self._manager.cancel_request(output.request_id)
                self._end(held.request_id, "failed", result, "the logits are not finite")
            else:
                held.num_passed_on += len(token_ids)
                result.add(held.request_id, token_ids, logprobs)
                if output.is_finished():
                    reason = "stop" if output.generated_tokens[-1] in held.stop_ids else "length"
                    self._end(held.request_id, reason, result)
        return result

    def _end(self, request_id: int, reason: str, result: EngineOutput, problem: str = "") -> None:
        self._forget(request_id)
        result.end(request_id, reason, problem)

    def _forget(self, request_id: int) -> None:
        del self._held[self._key_of.pop(request_id)]


def running_in_memory(model: PreTrainedModel, spec: EngineSpec, folder: Path) -> int:
    """Return how many whole contexts the free memory holds, with room for activations and neighbours.

    The memory of the GPU that `model` is on, else of the machine; at most `EngineSpec.most_running`. Of a
    model whose cache cannot be computed, what a CPU runs at most.
    """
    is_cpu = model.device.type == "cpu"
    free = psutil.virtual_memory().available if is_cpu else torch.cuda.mem_get_info(model.device)[0]
    share = CPU_MEMORY_SHARE if is_cpu else GPU_MEMORY_SHARE
    pages = math.ceil(spec.max_context_tokens / PAGE_TOKENS)
    try:
        context = pages * PAGE_TOKENS * kv_bytes_per_token(read_config(folder), spec.dtype)
    except Unreadable:
        return spec.most_running(is_cpu=True)
    return max(1, min(spec.most_running(is_cpu=is_cpu), int(share * free / context)))


def run_step(manager: ContinuousBatchingManager) -> None:
    """Make one step of a manager whose thread is not running, as its own loop would.

    `_generation_step` is private to the library (5.19); `test_stepping_equals_the_librarys_own_thread` in
    tests/integration/engines/test_continuous_batch.py fails when it changes. What sampling refuses (logits
    that are not finite) fails the requests of this step, as in the library's loop; an accelerator's error
    is raised.
    """
    processor = manager.batch_processor
    assert processor is not None  # since `warmup`
    if not processor.prepare_next_batch():
        return
    try:
        processor._generation_step(manager.model)
    except torch.AcceleratorError:
        raise
    except RuntimeError as exc:
        processor.handle_batch_error(exc)  # type: ignore[no-untyped-call] # theirs
    else:
        processor.update_batch()


def generation_config(sampling: Sampling) -> GenerationConfig:
    """Return the library's configuration; temperature 0 takes the likeliest token, any other is left to
    `sample_per_request`."""
    stop: list[int] | int = list(sampling.stop_token_ids) or -1  # -1: none
    is_sampled = sampling.temperature > 0
    return GenerationConfig(do_sample=is_sampled, top_k=0 if is_sampled else None, eos_token_id=stop)  # type: ignore[no-untyped-call] # theirs


def batching_config(max_running: int, max_context_tokens: int) -> ContinuousBatchingConfig:
    """Return a cache with room for the whole context of every running request: nothing is ever evicted."""
    return ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=max_running * math.ceil(max_context_tokens / PAGE_TOKENS),
        max_batch_tokens=max(PREFILL_TOKENS, max_running),
        max_requests_per_batch=max_running,
        safety_margin=0.0,  # keep no blocks back: there are enough
        allow_block_sharing=False,  # a shared block would outlive its request, and the weights that made it
        use_async_batching=False,
        use_cuda_graph=False,
        auto_switch_to_flash=False,  # would fetch kernels
        return_logprobs=True,
    )
