"""From token ids to text, over a whole response: no seam shows where it went on on another machine.

`Words` is for one response. Guarantees: what it has returned, end to end, is the decoded response up to a
stop string; a character whose bytes are spread over tokens comes once, whole; nothing that may turn out to be
the beginning of a stop string is returned before that is known.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

_UNFINISHED = "\ufffd"
"""What the bytes of an unfinished character decode to."""
_MAX_CHARACTER_TOKENS = 8
"""A character has at most four bytes; what is not one after so many tokens is shown as it is."""


class Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of the ids."""


class Words:
    """Text of one growing response."""

    def __init__(
        self,
        decoder: Decoder,
        stops: Sequence[str] = (),
        *,
        stop_token_ids: Collection[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        """`stop_token_ids`: tokens that end a response; they have no text."""
        self._decoder = decoder
        self._ends = frozenset(stop_token_ids)
        self._num_ends = 0
        self._stops = tuple(stop for stop in stops if stop)
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._context = 0  # first token of the window that is decoded
        self._read = 0  # tokens whose text is out
        self._held = ""  # may begin a stop string
        self.stopped_by: str | None = None
        """The stop string that came; no text follows."""

    @property
    def num_tokens(self) -> int:
        """Tokens taken in, up to the one that completed a stop string."""
        return len(self._ids) + self._num_ends

    @property
    def is_stopped(self) -> bool:
        """True if a stop string came."""
        return self.stopped_by is not None

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the text that is certain with these tokens."""
        pieces = []
        for token_id in token_ids:
            if self.is_stopped:
                break
            if token_id in self._ends:
                self._num_ends += 1
                continue
            self._ids.append(token_id)
            pieces.append(self._held_back(self._next()))
        return "".join(pieces)

    def flush(self) -> str:
        """Return the rest of a response that is over."""
        if self.is_stopped:
            return ""
        text = self._held_back(self._next(is_last=True))
        held, self._held = self._held, ""
        return text if self.is_stopped else text + held

    def _next(self, *, is_last: bool = False) -> str:
        """Return the text of the tokens after `_read`, "" while they end within a character."""
        known = self._decode(self._context, self._read)
        text = self._decode(self._context, len(self._ids))
        waits = text.endswith(_UNFINISHED) and len(self._ids) - self._read < _MAX_CHARACTER_TOKENS
        if len(text) <= len(known) or (waits and not is_last):
            return ""
        self._context, self._read = self._read, len(self._ids)
        return text[len(known) :]

    def _decode(self, start: int, end: int) -> str:
        return (
            self._decoder.decode(self._ids[start:end], skip_special_tokens=self._skip) if start < end else ""
        )

    def _held_back(self, text: str) -> str:
        """Return what of the text so far is certain; note a stop string."""
        if not self._stops:
            return text
        text = self._held + text
        found = min(((at, stop) for stop in self._stops if (at := text.find(stop)) >= 0), default=None)
        if found is not None:
            self.stopped_by, self._held = found[1], ""
            return text[: found[0]]
        longest = max(map(len, self._stops)) - 1
        keep = next(
            (
                n
                for n in range(min(longest, len(text)), 0, -1)
                if any(s.startswith(text[-n:]) for s in self._stops)
            ),
            0,
        )
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
