"""A sign of life while a command waits for something: one line painted over on a terminal, else plain lines.

What is over within a second shows nothing. The line is gone when the wait is over; plain lines come after
two seconds, then every fifteen. Whatever else is printed meanwhile is printed while it is `aside`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TextIO

SHOWN_AFTER_S = 1.0
PLAIN_AFTER_S = 2.0
PLAIN_EVERY_S = 15.0
_TICK_S = 0.5


class Working:
    """Say what is being waited for by calling it; `with` it, so that what it shows is cleared.

    A thread shows it, since what is waited for may block; it ends with the block.
    """

    def __init__(self, stream: TextIO, words: str = "", *, can_redraw: bool, width: int = 80) -> None:
        self._stream = stream
        self._can_redraw = can_redraw
        self._width = width
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._words, self._since = words, time.monotonic()
        self._said_at: float | None = None
        self._is_shown = False
        self._thread = threading.Thread(target=self._show_on, name="working")

    def __call__(self, words: str) -> None:
        """From here on we wait for this."""
        with self._lock:
            self._words, self._since, self._said_at = words, time.monotonic(), None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if self._is_shown:
            self._write("\r\x1b[K")

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Meanwhile the painted line is gone, and none is painted."""
        with self._lock:
            if self._is_shown:
                self._write("\r\x1b[K")
            yield

    def _show_on(self) -> None:
        while not self._over.wait(_TICK_S):
            with self._lock:
                words, waited_s = self._words, time.monotonic() - self._since
                if words and self._can_redraw:
                    self._redraw(words, waited_s)
                elif words:
                    self._say(words, waited_s)

    def _redraw(self, words: str, waited_s: float) -> None:
        if waited_s >= SHOWN_AFTER_S or self._is_shown:
            self._is_shown = True
            self._write(f"\r{f'{words}, {waited_s:.0f} s'[: self._width - 1]}\x1b[K")

    def _say(self, words: str, waited_s: float) -> None:
        due = PLAIN_AFTER_S if self._said_at is None else self._said_at + PLAIN_EVERY_S
        if waited_s >= due:
            so_far = "" if self._said_at is None else f", {waited_s:.0f} s so far"
            self._said_at = waited_s
            self._write(f"{words}{so_far}\n")

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # nobody reads it any more
            self._over.set()
