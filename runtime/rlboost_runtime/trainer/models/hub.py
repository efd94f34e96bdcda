"""Download of a model from the Hugging Face hub, and the progress of the trainer's start.

`huggingface_hub` downloads, checks and caches; here its progress is reported. Errors of a download are only
logged: loading the model afterwards reports them better.

Progress is one small file, replaced as it goes. Guarantees: a failure to write it never fails the trainer; it
is written at most twice a second unless the task changes; it is deleted once training starts.
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


class StartupProgress:
    """Reports what is being done before the first step, and how far it is where that is known."""

    def __init__(self, run: RunFolder) -> None:
        self._path = run.preparing
        self._task = ""
        self._since = 0.0
        self._written_at = 0.0

    def report(self, task: str, done: float | None = None, of: float | None = None, unit: str = "") -> None:
        """Report `done` of `of` units of a task, where `unit` is "B", "s" or what is counted."""
        now = time.time()
        if task != self._task:
            self._task, self._since = task, now
        elif now - self._written_at < WRITE_EVERY_S:
            return
        self._written_at = now
        try:
            write_json(
                self._path, {"doing": task, "done": done, "of": of, "unit": unit, "since": self._since}
            )
        except OSError as problem:
            event(log, "preparing.write_failed", problem=str(problem))

    def finish(self) -> None:
        """Delete the file: training starts."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as problem:
            event(log, "preparing.write_failed", problem=str(problem))


PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
"""Files of a model and its tokenizer: not the copies in other formats that some repositories also hold."""


def fetch(model: str, progress: StartupProgress) -> None:
    """Download the hub's `model` if it is not cached, reporting progress."""
    task = f"fetching the model {model}"
    progress.report(task)
    try:
        snapshot_download(model, allow_patterns=list(PATTERNS), tqdm_class=_bar(task, progress))
    except (OSError, ValueError) as problem:  # the hub's errors are one or the other
        event(log, "model.not_fetched", model=model, problem=str(problem).splitlines()[0])


def _bar(task: str, progress: StartupProgress) -> type[Any]:
    """Return a progress bar that shows nothing and reports bytes to `progress`."""

    class Bar(tqdm):  # type: ignore[misc] # without types
        """One of several: bytes received, bytes written, files."""

        def display(self, *_: object, **__: object) -> None:
            if self.unit == "B" and self.n:
                progress.report(task, self.n, self.total or None, "B")

        def close(self) -> None:
            self.display()
            self.disable = True

        @staticmethod
        def status_printer(file: object) -> Any:
            return lambda text: None

    return Bar
