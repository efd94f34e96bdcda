"""A model from the Hugging Face hub into the local cache, told about while it comes.

Only the watching is ours: what is fetched, checked and cached is `huggingface_hub`'s part, and loading the
model afterwards finds it there. Whatever goes wrong here, loading says it better, so it is left to that.
"""

from __future__ import annotations

import logging
from typing import Any

from huggingface_hub import snapshot_download
from tqdm.std import tqdm  # type: ignore[import-untyped] # ships no types

from rlboost_runtime.logs import event
from rlboost_runtime.trainer.preparing import Preparing

log = logging.getLogger(__name__)

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
