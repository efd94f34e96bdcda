"""What the trainer does before its first step, for whoever watches: one small file, replaced as it goes.

Guarantees: writing it never fails the trainer; it is written at most twice a second unless what is being done
changes; it is gone once training goes on.

A model from the Hugging Face hub into the local cache, told about while it comes.

Only the watching is ours: what is fetched, checked and cached is `huggingface_hub`'s part, and loading the
model afterwards finds it there. Whatever goes wrong here, loading says it better, so it is left to that.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from huggingface_hub import snapshot_download
from tqdm.std import tqdm  # type: ignore[import-untyped] # ships no types

from rlboost_runtime.logs import event
from rlboost_runtime.run.folder import RunFolder, write_json

WRITE_EVERY_S = 0.5

log = logging.getLogger(__name__)


class Preparing:
    """Says what is being done, and how far it is where that is known."""

    def __init__(self, run: RunFolder) -> None:
        self._path = run.preparing
        self._doing = ""
        self._since = 0.0
        self._written_at = 0.0

    def say(self, doing: str, done: float | None = None, of: float | None = None, unit: str = "") -> None:
        """We are `doing` this; `done` of `of` units of it, where `unit` is "B", "s" or what is counted."""
        now = time.time()
        if doing != self._doing:
            self._doing, self._since = doing, now
        elif now - self._written_at < WRITE_EVERY_S:
            return
        self._written_at = now
        try:
            write_json(
                self._path, {"doing": doing, "done": done, "of": of, "unit": unit, "since": self._since}
            )
        except OSError as problem:
            event(log, "preparing.write_failed", problem=str(problem))

    def over(self) -> None:
        """Training goes on from here."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as problem:
            event(log, "preparing.write_failed", problem=str(problem))


PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
"""Files of a model and its tokenizer: not the copies in other formats that some repositories also hold."""


def fetch(model: str, preparing: Preparing) -> None:
    """Fetch the hub's `model` where the cache has it not, saying how far it is."""
    words = f"fetching the model {model}"
    preparing.say(words)
    try:
        snapshot_download(model, allow_patterns=list(PATTERNS), tqdm_class=_bar(words, preparing))
    except (OSError, ValueError) as problem:  # the hub's errors are one or the other
        event(log, "model.not_fetched", model=model, problem=str(problem).splitlines()[0])


def _bar(words: str, preparing: Preparing) -> type[Any]:
    """Return a progress bar that shows nothing and tells `preparing` about bytes."""

    class Bar(tqdm):  # type: ignore[misc] # without types
        """Of several: bytes received, bytes written, files."""

        def display(self, *_: object, **__: object) -> None:
            if self.unit == "B" and self.n:
                preparing.say(words, self.n, self.total or None, "B")

        def close(self) -> None:
            self.display()
            self.disable = True

        @staticmethod
        def status_printer(file: object) -> Any:
            return lambda text: None

    return Bar
