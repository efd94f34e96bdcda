"""What a vLLM server was started for: weights are taken in place only where all of it is the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlboost_runtime.engines.model_folder import (
    CONFIG_FILE,
    Header,
    Unreadable,
    config_text,
    read_config,
    read_header,
)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model's configuration and the form of each of its tensors."""

    config: str
    tensors: Header
    vocabulary: int
    """Token ids are below this."""

    @classmethod
    def of(cls, folder: Path) -> ServedModel:
        """Read the version in `folder`. Raises `Unreadable`."""
        tensors: Header = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= read_header(file)
        if not tensors:
            raise Unreadable("no tensor in any safetensors file")
        vocabulary = read_config(folder).get("vocab_size")
        if not isinstance(vocabulary, int):
            raise Unreadable(f"{CONFIG_FILE} has no vocab_size")
        return cls(config_text(folder), tensors, vocabulary)

    def check_same_tensors(self, served: ServedModel) -> None:
        """Raise `Unreadable` unless every tensor is there as in `served`: vLLM would keep an old one."""
        if self.tensors == served.tensors:
            return
        wrong = sorted({name for name, _ in self.tensors.items() ^ served.tensors.items()})
        raise Unreadable(f"{len(wrong)} tensors are missing, new or of another form, such as {wrong[0]}")
