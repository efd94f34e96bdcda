"""Sampling that differs from request to request within one batch of transformers' continuous batching.

The library has processors of its own for that, but makes them only where the engine's temperature or top-p
differs from 1, applies top-p (a sort of the vocabulary) to all requests once one engine option asks for it,
and knows no greedy request beside sampled ones. The log-probability of a greedy request's token is that of
the distribution it is sampled from: 0.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import FloatTensor, Tensor
from transformers import LogitsProcessorList, TopPLogitsWarper
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
    ContinuousBatchingTopPLogitsWarper,
)
from transformers.generation.continuous_batching.requests import FutureRequestState

from rlboost_runtime.protocol.messages import Sampling


def sample_per_request(manager: ContinuousBatchingManager, sampling: Sampling) -> None:
    """Have `manager`, which samples and is not warmed up, take `temperature` and `top_p` of each request from
    `add_request`; those of `sampling` where it names none."""
    processors = ContinuousBatchingLogitsProcessorList(LogitsProcessorList())
    processors.logits_processor.append(_PerRequest(sampling))
    processors.supported_keys = dict(_PerRequest.supported_kwargs)
    processors.tensors_required, processors.do_processing = 1, True
    manager.logit_processor = processors


class _PerRequest(ContinuousBatchingLogitsProcessor):
    """Divides by temperatures, then cuts by top-p; does nothing for rows that have 1 of both.

    Rows are kept from `prepare_tensor_args` to the call that follows it: without asynchronous batching, both
    are of the same step.
    """

    supported_kwargs = dict(temperature=float, top_p=float)  # noqa: C408, RUF012 - as the library declares it
    ignored_kwargs = ()

    def __init__(self, sampling: Sampling) -> None:
        self._default = sampling
        self._cut = ContinuousBatchingTopPLogitsWarper(TopPLogitsWarper(top_p=sampling.top_p))
        self._temperatures: list[float] = []
        self._top_ps: list[float] = []

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[FutureRequestState]) -> Tensor:
        asked: list[dict[str, Any]] = [each.state.logit_processor_kwargs for each in requests_with_new_token]
        self._temperatures = [each.get("temperature", self._default.temperature) for each in asked]
        self._top_ps = [each.get("top_p", self._default.top_p) for each in asked]
        return torch.zeros(len(asked), dtype=torch.int32)

    def __call__(self, scores: FloatTensor, tensor_arg: Tensor) -> FloatTensor:
        """Return the scores_BV to sample from."""
        kept: Tensor = scores
        others = [1.0] * (len(scores) - len(self._temperatures))  # rows of prompts that are not through yet
        temperatures_B = torch.tensor(self._temperatures + others, device=scores.device)
        if any(each == 0 for each in self._temperatures):
            beaten_BV = (temperatures_B == 0)[:, None] & (kept < kept.amax(-1, keepdim=True))
            kept = kept.masked_fill(beaten_BV, -torch.inf)
            temperatures_B = temperatures_B.where(temperatures_B != 0, 1.0)
        if any(each not in (0, 1) for each in self._temperatures):
            kept = kept / temperatures_B[:, None]
        if any(each < 1 for each in self._top_ps):
            top_ps_B = torch.tensor(self._top_ps + others, dtype=torch.float32, device=scores.device)
            kept = self._cut(cast("FloatTensor", kept), top_ps_B.view(torch.int32))
        return cast("FloatTensor", kept)
