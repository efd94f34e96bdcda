"""Responses whose log-probabilities are computed before their group is complete.

Under the reference, and under the step's policy where old logprobs are recomputed, the logprobs of a response
depend on nothing but its tokens: of the paper's six forward passes per response (section 6.1) two need no
group. A trainer that has the GPU and waits for groups computes them meanwhile, for the step that it trains.
The group that comes later counts alone: what was computed is used for a response with the very same tokens.
So the loss is the same but for the rounding of another packing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlboost_runtime.protocol.messages import DeliverResponseMessage
from rlboost_runtime.trainer.data.prompts import Prompt
from rlboost_runtime.trainer.learn.sample import Sample

PromptOf = Callable[[int, int], Prompt | None]
"""The prompt of a step's group; None: it is not known."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a response belongs: the `place`-th of a group of a step."""

    step: int
    group: int
    place: int


class EarlyResponses:
    """Finished responses of groups that are not complete. `arrived` is called on the stream's thread, the
    rest on the training thread."""

    def __init__(self, prompt_of: PromptOf) -> None:
        self._prompt_of = prompt_of
        self._lock = threading.Lock()  # guards what follows
        self._waiting: dict[_Place, Sample] = {}
        self._scored: dict[_Place, Sample] = {}
        self.num_used = 0
        """Responses of complete groups that had logprobs from before."""

    def arrived(self, early: DeliverResponseMessage) -> None:
        """Take in a response, unless it is of an evaluation or cannot be trained."""
        prompt = self._prompt_of(early.step, early.group)
        if prompt is None or prompt.evaluation is not None:
            return
        ids = np.frombuffer(early.response.token_ids, "<i4")
        logprobs = np.frombuffer(early.response.logprobs, "<f4")
        if len(ids) != len(logprobs) or not len(ids) or not np.isfinite(logprobs).all():
            return  # what is wrong with it is found, and said, once its group is here
        sample = Sample(np.array(prompt.token_ids, np.int32), ids, logprobs, 0.0)
        with self._lock:
            self._waiting[_Place(early.step, early.group, early.place)] = sample

    def num_waiting(self, step: int) -> int:
        """Return how many responses of a step have no logprobs yet. From any thread."""
        with self._lock:
            return sum(place.step == step for place in self._waiting)

    def score(self, step: int, most: int, score: Callable[[list[Sample]], list[Sample]]) -> None:
        """Have logprobs computed for up to `most` responses of a step; `score` returns samples with them."""
        with self._lock:
            places = [place for place in self._waiting if place.step == step][:most]
            samples = [self._waiting.pop(place) for place in places]
        scored = dict(zip(places, score(samples), strict=True))
        with self._lock:
            self._scored |= scored

    def completed(self, step: int, group: int, samples: Sequence[Sample]) -> Iterator[Sample]:
        """Yield the samples of a complete group, with what was computed of them before; forget it."""
        for number, sample in enumerate(samples):
            place = _Place(step, group, number)
            with self._lock:
                self._waiting.pop(place, None)
                known = self._scored.pop(place, None)
            if known is None or not _is_same(known, sample):
                yield sample
                continue
            self.num_used += 1
            yield replace(
                sample,
                reference_logprobs=known.reference_logprobs,
                old_logprobs=known.old_logprobs,
                routes=known.routes,
            )

    def forget(self, step: int) -> None:
        """Forget a step that is trained, and those before it."""
        with self._lock:
            self._waiting = {place: each for place, each in self._waiting.items() if place.step > step}
            self._scored = {place: each for place, each in self._scored.items() if place.step > step}


def _is_same(one: Sample, other: Sample) -> bool:
    return np.array_equal(one.token_ids, other.token_ids) and np.array_equal(one.prompt_ids, other.prompt_ids)
