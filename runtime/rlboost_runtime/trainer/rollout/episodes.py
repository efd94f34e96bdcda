"""The episodes of the step that was requested last: begun when it is open, reported as they end, handed over
group by group."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate, pairwise

from rlboost_runtime.core.base.messages import FinishReason
from rlboost_runtime.job import Algorithm
from rlboost_runtime.protocol.messages import DeliverGroupMessage, EpisodeEnded, FinishedResponse
from rlboost_runtime.trainer.data.prompts import Prompt
from rlboost_runtime.trainer.episodes.outcome import EpisodeResult
from rlboost_runtime.trainer.episodes.runner import EpisodeRunner, StepOfEpisodes
from rlboost_runtime.trainer.rollout.step_stream import StepStream


class StepEpisodes:
    """Between the stream, which knows steps and groups, and the runner, which knows episodes."""

    def __init__(
        self, runner: EpisodeRunner, stream: StepStream[DeliverGroupMessage], algorithm: Algorithm
    ) -> None:
        self.name = runner.name
        self._runner = runner
        self._stream = stream
        self._group_size = algorithm.group_size
        self._lock = threading.Lock()
        self._expected: tuple[int, int, list[Prompt]] = (-1, -1, [])
        self._groups: list[range] = []
        """The episodes of each group."""
        self._left: dict[int, set[int]] = {}
        """Those of each group that are not over."""
        stream.on_opened(self._opened)
        runner.on_end(self._ended, stream.fail)

    def expect(self, step: int, policy_version: int, prompts: Sequence[Prompt]) -> None:
        """Expect the episodes of a step that is about to be requested."""
        counts = [prompt.num_responses(self._group_size) for prompt in prompts]
        ends = list(accumulate(counts, initial=0))
        with self._lock:
            self._expected = step, policy_version, list(prompts)
            self._groups = [range(first, end) for first, end in pairwise(ends)]
            self._left = {group: set(numbers) for group, numbers in enumerate(self._groups)}

    def of_group(self, group: int) -> list[EpisodeResult]:
        """Return the episodes of a group that is over."""
        return self._runner.results(self._expected[0], self._groups[group])

    def trained(self, step: int) -> None:
        """A step is trained."""
        self._runner.trained(step)

    def saved(self, step: int) -> None:
        """A step is in a checkpoint."""
        self._runner.saved(step)

    def _opened(self, first_response: int) -> None:
        with self._lock:
            step, version, prompts = self._expected
            counts = list(map(len, self._groups))
        self._runner.play(StepOfEpisodes(step, version, first_response, prompts, counts))

    def _ended(self, step: int, number: int, num_tokens: int) -> None:
        self._stream.episode_ended(EpisodeEnded(step, number, num_tokens))
        with self._lock:
            if step != self._expected[0]:
                return
            group = next(i for i, numbers in enumerate(self._groups) if number in numbers)
            was_open = bool(self._left[group])
            self._left[group].discard(number)
            if self._left[group] or not was_open:
                return
        nothing = FinishedResponse(0, b"", b"", (), str(FinishReason.STOP))
        self._stream.group_ended(DeliverGroupMessage(step, group, (nothing,) * len(self._groups[group])))
