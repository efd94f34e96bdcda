"""The episodes of the step that was requested last: begun when it is open, reported as they end, handed over
group by group."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from rlboost_runtime.core.base.messages import FinishReason
from rlboost_runtime.job import Algorithm
from rlboost_runtime.protocol.messages import DeliverGroupMessage, EpisodeEnded, FinishedResponse
from rlboost_runtime.trainer.data.prompts import Prompt
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
        self._open: list[set[int]] = []  # episodes of each group that are not over
        stream.on_opened(self._opened)
        runner.on_end(self._ended, stream.fail)

    def expect(self, step: int, policy_version: int, prompts: Sequence[Prompt]) -> None:
        """Expect the episodes of a step that is about to be requested."""
        with self._lock:
            self._expected = step, policy_version, list(prompts)
            self._open, first = [], 0
            for count in self._counts(prompts):
                self._open.append(set(range(first, first + count)))
                first += count

    def trained(self, step: int) -> None:
        """A step is trained."""
        self._runner.trained(step)

    def saved(self, step: int) -> None:
        """A step is in a checkpoint."""
        self._runner.saved(step)

    def _counts(self, prompts: Sequence[Prompt]) -> list[int]:
        return [prompt.num_responses(self._group_size) for prompt in prompts]

    def _opened(self, first_response: int) -> None:
        with self._lock:
            step, version, prompts = self._expected
        self._runner.play(StepOfEpisodes(step, version, first_response, prompts, self._counts(prompts)))

    def _ended(self, step: int, number: int, num_tokens: int) -> None:
        self._stream.episode_ended(EpisodeEnded(step, number, num_tokens))
        with self._lock:
            if step != self._expected[0]:
                return
            group = next((i for i, numbers in enumerate(self._open) if number in numbers), None)
            if group is None:
                return
            self._open[group].discard(number)
            if self._open[group]:
                return
            count = self._counts(self._expected[2])[group]
        nothing = FinishedResponse(0, b"", b"", (), str(FinishReason.STOP))
        self._stream.group_ended(DeliverGroupMessage(step, group, (nothing,) * count))
