"""Check that what was trained of episodes is what was sampled, token by token.

The coordinator's journal of requests has each turn as the engines sampled it: prompt, ids, logprobs, policy
version. The trainer's files of episodes have the samples that it trained. Every sampled token of a sample has
to be part of one turn, after exactly the context of that turn, with the same logprob; no turn may be trained
twice. Turns that no sample has are those of episodes that were played again or left out.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlboost_runtime.coordinator.driver.requests import past_and_open_segments, records_of
from rlboost_runtime.coordinator.storage.journal import SegmentReader
from rlboost_runtime.coordinator.storage.request_tokens import RequestTokens
from rlboost_runtime.inference.episodes import RecordedSample
from rlboost_runtime.trainer.episodes.outcome import EpisodeResult

I32, F32 = 4, 4
"""Bytes of a token id and of a logprob."""


@dataclass(slots=True)
class SampledTurns:
    """The requests of a run's endpoint: turns of episodes, and whatever else was asked."""

    requests: dict[int, RequestTokens] = field(default_factory=dict)
    """By response number."""
    num_trained: int = 0
    """Turns that a trained sample has."""
    problems: list[str] = field(default_factory=list)
    _by_context: dict[tuple[int, bytes], list[RequestTokens]] = field(
        default_factory=lambda: defaultdict(list)
    )

    @classmethod
    def read(cls, folder: Path) -> SampledTurns:
        """Return what the journal of requests in `folder` has."""
        found = cls()
        for path in past_and_open_segments(folder):
            reader = SegmentReader(path)
            for number, request, records in records_of(reader):
                if request is not None:
                    found.requests.setdefault(number, RequestTokens(number, request))
                for record in records:
                    if record.response in found.requests:
                        found.requests[record.response].restore(record)
            if reader.problem and not reader.is_torn:
                found.problems.append(reader.problem)
        for tokens in found.requests.values():
            if tokens.request.episode is not None:
                context = tokens.request.token_ids
                found._by_context[tokens.request.episode, context].append(tokens)
        return found

    def check_lengths(self, said: Counter[int]) -> None:
        """Compare with how many tokens the event log says that finished requests have."""
        for number, num_tokens in said.items():
            tokens = self.requests.get(number)
            if tokens is None:
                self.problems.append(f"request {number} finished, but the journal has nothing of it")
            elif tokens.problem:
                self.problems.append(f"request {number}: {tokens.problem}")
            elif len(tokens.ids) != num_tokens:
                self.problems.append(
                    f"request {number}: {num_tokens} tokens said, {len(tokens.ids)} in the journal"
                )

    def of_episode(
        self, responses: Sequence[int], result: EpisodeResult, policy_version: int
    ) -> tuple[list[RequestTokens], list[str]]:
        """Return the turns that an episode's samples were made of, and what is wrong with them.

        `responses`: the numbers that the episode's response has had; a step that was opened again has others.
        """
        turns: list[RequestTokens] = []
        problems: list[str] = []
        for number, sample in enumerate(result.record.samples):
            for at, found in self._turns_of(responses, sample):
                if found is None:
                    problems.append(f"token {at} of sample {number} was trained, but never sampled there")
                    break
                turns.append(found)
                wrong = {version for _, _, version in found.segments} - {policy_version}
                if wrong:
                    problems.append(
                        f"token {at} of sample {number} is of a turn with versions {sorted(wrong)}"
                    )
        self.num_trained += len(turns)
        return turns, problems

    def _turns_of(
        self, responses: Sequence[int], sample: RecordedSample
    ) -> Iterator[tuple[int, RequestTokens | None]]:
        """Yield where in a sample each turn begins, and the turn; None, at last, where there is none."""
        at, num_tokens = 0, len(sample.sampled)
        while at < num_tokens:
            if not sample.sampled[at]:
                at += 1
                continue
            context = sample.prompt_ids + sample.token_ids[: at * I32]
            end = sample.sampled.find(0, at)
            end = num_tokens if end < 0 else end
            found = self._take(responses, context, sample, at, end)
            yield at, found
            if found is None:
                return
            at = min(end, at + len(found.ids))

    def _take(
        self, responses: Sequence[int], context: bytes, sample: RecordedSample, at: int, end: int
    ) -> RequestTokens | None:
        """Return, once, the turn that gave the sampled tokens from `at` on."""
        for response in responses:
            candidates = self._by_context.get((response, context), [])
            for tokens in sorted(candidates, key=lambda turn: -len(turn.ids)):
                num = min(len(tokens.ids), end - at)
                ids = sample.token_ids[at * I32 : (at + num) * I32]
                logprobs = sample.logprobs[at * F32 : (at + num) * F32]
                if num and _begins(tokens.ids, ids) and _begins(tokens.logprobs, logprobs):
                    candidates.remove(tokens)
                    return tokens
        return None


def _begins(whole: array[int] | array[float], part: bytes) -> bool:
    return whole.tobytes().startswith(part)
