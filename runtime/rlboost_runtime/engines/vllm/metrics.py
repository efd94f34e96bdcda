"""What a vLLM server reports of itself: the KV cache that it allocated, and its queues, from `/metrics`.

The names are those of vLLM's Prometheus metrics (V1 engine). A server that lacks one is not an error: the
value is None, and whoever asks falls back on what it can count itself.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass

from rlboost_runtime.engines.base import KvCache
from rlboost_runtime.engines.vllm.api import ApiError, VllmApi
from rlboost_runtime.logs import event

log = logging.getLogger(__name__)

PATH = "/metrics"
POLL_S = 1.0
"""As often as a heartbeat."""
_SAMPLE = re.compile(r"^vllm:(\w+)(?:{(.*)})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """A sample of the server's scheduler."""

    running: int
    waiting: int
    preempted: int
    kv_used_fraction: float


def kv_cache(text: str) -> KvCache | None:
    """Return the KV cache of one model replica, as allocated; None if the server does not report it.

    Newer servers report the tokens themselves, which is right for models with several kinds of layers too;
    for others it is blocks times block size.
    """
    for name, labels, _ in _SAMPLE.findall(text):
        if name == "cache_config_info":
            known = {key: int(value) for key, value in _LABEL.findall(labels) if value.isdecimal()}
            block, num_blocks = known.get("block_size", 0), known.get("num_gpu_blocks", 0)
            tokens = known.get("kv_cache_size_tokens", num_blocks * block)
            return KvCache(tokens, block) if tokens and block else None
    return None


def server_load(text: str) -> ServerLoad | None:
    """Return the scheduler's state; None if the server does not report all of it."""
    found: dict[str, float] = {}
    for name, _, value in _SAMPLE.findall(text):
        found[name] = found.get(name, 0.0) + float(value)
    try:
        return ServerLoad(
            round(found["num_requests_running"]),
            round(found["num_requests_waiting"]),
            round(found["num_preemptions_total"]),
            found["kv_cache_usage_perc"],
        )
    except KeyError:
        return None


async def watch_load(
    api: VllmApi, before: Callable[[], None], take: Callable[[ServerLoad | None], None]
) -> None:
    """Report the server's load every `POLL_S` until cancelled; None, and no more, once it is not to be had.

    `before` is called when a sample is about to be taken: what is submitted later is not in it.
    """
    load: ServerLoad | None
    problem = "it lacks metrics of its scheduler"
    while True:
        before()
        try:
            load = server_load(await api.text(PATH))
        except ApiError as exc:
            load, problem = None, exc.problem
        take(load)
        if load is None:
            event(log, "engine.load_unknown", level=logging.WARNING, problem=problem)
            return
        await asyncio.sleep(POLL_S)
