"""What is sampled in an episode, token by token, as the trainer will train it.

An episode is several requests of one environment. Each is recorded here, on the server's side: ids and
logprobs as the engines gave them, never made from text again. A request continues a sample if its prompt
begins with all of that sample: as text, prompt and response with their special tokens, or as ids. What the
prompt adds is the environment's and is not trained. A prompt that continues none, because the template has
rewritten the history or because two requests continue the same one, begins a sample of its own: its whole
prompt is context. So every sampled token is trained exactly once, and after exactly the tokens that it was
sampled after.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rlboost_runtime.inference.bodies import BadRequest, SamplingBody

SOCKET_NAME = "endpoint.sock"
"""In the run's `sockets`."""
OF_TURNS, OF_TOKENS = "turns", "tokens"
"""Limits of an episode."""


class EpisodeOpening(msgspec.Struct, frozen=True, omit_defaults=True):
    """An episode that is to be recorded. `owner` names the trainer's process: what another one has opened is
    forgotten. `response`: number of the step's response that the episode is."""

    name: str
    owner: str
    key: str
    response: int
    max_turns: int
    temperature: float | None = None
    top_p: float | None = None
    template: str | None = None
    template_args: dict[str, bool | int | float | str] = {}


class RecordedSample(msgspec.Struct, frozen=True, array_like=True):
    """One sample: ids i32, logprobs f32 (0 where the environment wrote), `sampled` u8 per token of
    `token_ids`. `turns`: (number in the episode, first token) of each turn that it has."""

    prompt_ids: bytes
    token_ids: bytes
    logprobs: bytes
    sampled: bytes
    turns: tuple[tuple[int, int], ...] = ()


class EpisodeRecord(msgspec.Struct, frozen=True):
    """What was recorded of an episode."""

    samples: tuple[RecordedSample, ...]
    num_turns: int
    versions: tuple[int, ...]
    """Policy versions that made its tokens."""
    limit: str
    """The limit that it met, "" if none."""
    is_cut: bool
    """Its last response was not ended by the model."""
    problem: str
    """Why a response was lost, "" if none was."""
    last_response: str
    model_s: float = 0.0
    """How long it has waited for the model."""


class EpisodeClock(msgspec.Struct, frozen=True):
    """How long an episode has waited for the model, in seconds, and whether it does now."""

    model_s: float
    is_waiting: bool


@dataclass(slots=True)
class _Sample:
    prompt_ids: array[int]
    ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    sampled: bytearray = field(default_factory=bytearray)
    turns: list[tuple[int, int]] = field(default_factory=list)
    text: str | None = None
    """Prompt and all that follows as text; None: not known."""
    shown: str | None = None
    """The same as its client has seen it, without special tokens in responses."""

    def add(self, ids: Sequence[int], logprobs: Sequence[float], *, is_sampled: bool) -> None:
        self.ids.extend(ids)
        self.logprobs.extend(logprobs)
        self.sampled.extend(bytes([is_sampled]) * len(ids))

    def recorded(self) -> RecordedSample:
        return RecordedSample(
            self.prompt_ids.tobytes(), self.ids.tobytes(), self.logprobs.tobytes(), bytes(self.sampled),
            tuple(self.turns),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """Where in an episode a request belongs. `added`: what its prompt adds to the sample, as ids."""

    prompt_ids: list[int]
    text: str | None
    sample: _Sample | None = None
    length: int = 0
    added: Sequence[int] = ()

    def room(self, most: int) -> int:
        """Return how many tokens may be sampled where a sample has at most `most` after its prompt."""
        return most if self.sample is None else most - self.length - len(self.added)


class Episode:
    """One open episode."""

    def __init__(self, opening: EpisodeOpening) -> None:
        self.opening = opening
        self.raw: dict[str, str] = {}
        """By the id of its first tool call: a response as the model wrote it."""
        self._samples: list[_Sample] = []
        self._num_turns = self._num_recorded = 0
        self._versions: set[int] = set()
        self._limit = self._problem = self._last = ""
        self._is_cut = False
        self._num_waiting, self._since, self._model_s = 0, 0.0, 0.0

    # --- requests -----------------------------------------------------------------------------------------

    def begin_turn(self, body: SamplingBody) -> None:
        """Count a request, and have it sampled as the policy is trained. Raises `BadRequest`."""
        opening = self.opening
        for name, own in (("temperature", opening.temperature), ("top_p", opening.top_p)):
            asked = getattr(body, name)
            if asked is not None and asked != own:
                raise BadRequest(
                    f"{name} is {asked}, but this episode is sampled with {own}",
                    f"leave {name} out, or change it in the job",
                    name,
                )
            setattr(body, name, own)
        if self._num_turns >= opening.max_turns:
            self.meet_limit(OF_TURNS)
            raise BadRequest(
                f"the episode has had environment.max_turns {opening.max_turns} turns", "end it", "max_turns"
            )
        self._num_turns += 1

    def take_back_turn(self) -> None:
        """Count a request no more: nothing was sampled for it, and its client may ask again."""
        self._num_turns -= 1

    def meet_limit(self, limit: str) -> None:
        """Note that the episode asked for more than it may have."""
        self._limit = limit

    def at_rendered(self, text: str, encode: Callable[[str], list[int]]) -> Place:
        """Return the place of a prompt that a chat template has rendered, its special tokens included."""
        return self._at(text, encode, encode, [(sample.text, sample) for sample in self._samples])

    def at_text(
        self, text: str, encode: Callable[[str], list[int]], encode_more: Callable[[str], list[int]]
    ) -> Place:
        """Return the place of a prompt that its client has put together from what it has seen. `encode` is
        for a first prompt, `encode_more` for what follows a response."""
        known = [(begin, sample) for sample in self._samples for begin in (sample.text, sample.shown)]
        return self._at(text, encode, encode_more, known)

    @staticmethod
    def _at(
        text: str,
        encode: Callable[[str], list[int]],
        encode_more: Callable[[str], list[int]],
        known: list[tuple[str | None, _Sample]],
    ) -> Place:
        fitting = [(begin, sample) for begin, sample in known if begin is not None and text.startswith(begin)]
        if not fitting:
            return Place(encode(text), text)
        begin, sample = max(fitting, key=lambda pair: len(pair[0]))
        added = encode_more(text[len(begin) :])
        return Place([*sample.prompt_ids, *sample.ids, *added], text, sample, len(sample.ids), added)

    def at_ids(self, ids: list[int]) -> Place:
        """Return the place of a prompt that is token ids."""
        best, length = None, 0
        for sample in self._samples:
            whole = [*sample.prompt_ids, *sample.ids]
            if length < len(whole) <= len(ids) and ids[: len(whole)] == whole:
                best, length = sample, len(whole)
        if best is None:
            return Place(ids, None)
        return Place(ids, None, best, len(best.ids), ids[length:])

    def record(
        self,
        place: Place,
        ids: Sequence[int],
        logprobs: Sequence[float],
        *,
        text: str,
        shown: str,
        finish_reason: str,
        versions: Sequence[int],
    ) -> None:
        """Add a whole response; `text`: it with its special tokens, `shown`: as its client reads it."""
        sample = place.sample
        if sample is None or len(sample.ids) != place.length:
            sample = _Sample(array("i", place.prompt_ids))
            self._samples.append(sample)
        else:
            sample.add(place.added, [0.0] * len(place.added), is_sampled=False)
        sample.turns.append((self._num_recorded, len(sample.ids)))
        self._num_recorded += 1
        sample.add(ids, logprobs, is_sampled=True)
        sample.text = None if place.text is None else place.text + text
        sample.shown = None if place.text is None else place.text + shown
        self._versions.update(versions)
        self._last, self._is_cut = shown, finish_reason == "length"

    def lose(self, problem: str) -> None:
        """Note that a response was lost; its client may ask for it again."""
        self._problem = problem
        self.take_back_turn()

    def wait(self) -> None:
        """A request begins to wait for the model."""
        if self._num_waiting == 0:
            self._since = time.monotonic()
        self._num_waiting += 1

    def resume(self) -> None:
        """A request has its response, or has ended without."""
        self._num_waiting -= 1
        if self._num_waiting == 0:
            self._model_s += time.monotonic() - self._since

    # --- what is known ------------------------------------------------------------------------------------

    def clock(self) -> EpisodeClock:
        """Return how long it has waited for the model."""
        now = time.monotonic() - self._since if self._num_waiting else 0.0
        return EpisodeClock(self._model_s + now, self._num_waiting > 0)

    def finished(self) -> EpisodeRecord:
        """Return all that was recorded."""
        return EpisodeRecord(
            samples=tuple(sample.recorded() for sample in self._samples),
            num_turns=self._num_turns,
            versions=tuple(sorted(self._versions)),
            limit=self._limit,
            is_cut=self._is_cut,
            problem=self._problem,
            last_response=self._last,
            model_s=self.clock().model_s,
        )

    def as_written(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with the model's tool calls as it wrote them: a template writes calls in its
        own way, which need not be the model's to the letter."""
        found = []
        for message in messages:
            calls = message.get("tool_calls") if message.get("role") == "assistant" else None
            first = (
                calls[0].get("id")
                if isinstance(calls, list) and calls and isinstance(calls[0], dict)
                else None
            )
            raw = self.raw.get(first) if isinstance(first, str) else None
            found.append(message if raw is None else {"role": "assistant", "content": raw})
        return found


class Episodes:
    """The open episodes of one trainer's process."""

    def __init__(self) -> None:
        self._open: dict[str, Episode] = {}
        self._owner = ""

    def open(self, opening: EpisodeOpening) -> None:
        """Record an episode; one of the same name begins anew."""
        if opening.owner != self._owner:
            self._open.clear()
            self._owner = opening.owner
        self._open[opening.name] = Episode(opening)

    def get(self, name: str) -> Episode | None:
        """Return an open episode."""
        return self._open.get(name)

    def close(self, name: str) -> EpisodeRecord | None:
        """Return what was recorded, and forget it; None: nothing is known of it."""
        episode = self._open.pop(name, None)
        return None if episode is None else episode.finished()
