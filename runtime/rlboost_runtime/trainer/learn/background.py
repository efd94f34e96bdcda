"""A model as it was at one moment, in main memory: it can be written while training goes on.

What is written is what `Policy.load` reads: HF format, float32, exactly; with LoRA the frozen model and its
adapters beside it. It shares no memory with the model.

Work beside training: one piece at a time, in order, on a thread of its own.

Guarantees: at most one piece is under way, so memory is bounded by what one needs; what goes wrong in it is
raised in the training thread at its next `ready` or `begin`, or at the end, so that no run goes on for long
without what the work was for.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlboost_runtime.trainer.learn import lora as adapters


@dataclass(frozen=True, slots=True)
class ModelSnapshot:
    """Weights by name, whole, tied ones once; and the small files of the folder."""

    state: Mapping[str, Tensor]
    files: Mapping[str, bytes]

    def write(self, folder: Path) -> None:
        """Write everything into `folder`."""
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        if adapters.adapters(self.state):
            adapters.save(self.state, folder)
        model = {name: tensor.contiguous() for name, tensor in adapters.frozen(self.state).items()}
        save_file(model, folder / "model.safetensors", metadata={"format": "pt"})


def small_files(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """Return the files beside the weights: config, generation config, tokenizer. Training changes none."""
    config = copy.deepcopy(model.config)
    config.dtype = "float32"
    config.architectures = [type(model).__name__]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config.save_pretrained(folder)
        if model.generation_config is not None:
            model.generation_config.to_json_file(folder / "generation_config.json")
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


class BackgroundWork:
    """One thread's work; the methods belong to one other thread. `with` waits for the last piece."""

    def __init__(self, name: str) -> None:
        """`name` is the thread's, for debuggers."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._piece: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True)
        if error is None:
            self.ready()

    @property
    def is_busy(self) -> bool:
        """Whether a piece is under way."""
        return self._piece is not None and not self._piece.done()

    def ready(self) -> None:
        """Return once nothing is under way any more. Raises what the last piece raised."""
        if self._piece is not None:
            piece, self._piece = self._piece, None
            piece.result()

    def start(self, work: Callable[[], None]) -> None:
        """Begin `work` once the piece before it is done. Raises what that one raised."""
        self.ready()
        self._piece = self._thread.submit(work)
