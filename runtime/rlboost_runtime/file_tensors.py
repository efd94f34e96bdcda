"""A model's tensors as its files have them: under the names and in the form that `save_pretrained` writes.

`transformers` keeps some tensors in another form than published files do: all experts of a layer are one
tensor in memory and three per expert in the files. Each tensor of the files is a view of a tensor in memory,
so publishing copies no more than it must, a rank reads only its own experts, and an engine fills its model in
place.

The names are the library's own for the model's class, whatever the files were called that it was loaded from.
Where a conversion does arithmetic there is no such view; those tensors keep their names in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of the files, as a view of one of the model's; strides and offset in elements."""

    name: str
    of: str
    """The model's name of the tensor that it is a part of."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def within(self, tensor: Tensor) -> Tensor:
        """Return the view of the model's tensor, which is contiguous."""
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset)

    def rows(self, row_size: int) -> range:
        """Return which rows of the model's tensor it is in; `row_size`: elements of one."""
        last = self.offset + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return range(self.offset // row_size, last // row_size + 1)

    def is_by_row(self, row_size: int) -> bool:
        """Return True if a part of its own rows is all that a part of the model's rows needs."""
        return len(self.rows(row_size)) == 1 or (
            self.strides[0] == row_size and len(self.rows(row_size)) == self.shape[0]
        )


ReadRows = Callable[[str, int | None, int | None], Tensor]
"""Returns rows of a tensor of the files, by name; from None to None: all of it, also of a scalar."""


class FileLayout:
    """The files' tensors of one model."""

    def __init__(self, parts: Sequence[FileTensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """`shapes`: of the model's tensors."""
        self._shapes = shapes
        self._parts: dict[str, list[FileTensor]] = {}
        for part in parts:
            self._parts.setdefault(part.of, []).append(part)

    @classmethod
    def of(cls, model: PreTrainedModel) -> FileLayout:
        """Return the layout of a model without adapters; its weights are not touched."""
        vars(model).pop("_weight_conversions", None)  # what its files were called when it was loaded
        meta = {name: torch.empty(t.shape, device="meta") for name, t in model.state_dict().items()}
        with _Uncopied():
            found = revert_weight_conversion(model, dict(meta))
        owner = {_storage(tensor): name for name, tensor in meta.items()}
        views = {name: tensor for name, tensor in found.items() if _storage(tensor) in owner}
        parts = [
            FileTensor(
                name, owner[_storage(each)], tuple(each.shape), each.stride(), int(each.storage_offset())
            )
            for name, each in views.items()
        ]
        covered: dict[str, int] = {}
        for part in parts:
            covered[part.of] = covered.get(part.of, 0) + torch.Size(part.shape).numel()
        kept = {name for name, tensor in meta.items() if covered.get(name) != tensor.numel()}
        parts = [part for part in parts if part.of not in kept]
        parts += [
            FileTensor(name, name, tuple(tensor.shape), tensor.stride(), 0)
            for name, tensor in meta.items()
            if name in kept
        ]
        return cls(parts, {name: tuple(tensor.shape) for name, tensor in meta.items()})

    def parts(self, name: str) -> list[FileTensor]:
        """Return the files' tensors that the model's tensor `name` becomes; itself if it is unknown."""
        return self._parts.get(name, [])

    def name(self, name: str) -> str:
        """Return what the files call a tensor that they have in one piece; else its own name."""
        found = self.parts(name)
        return found[0].name if len(found) == 1 else name

    def split(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the files' tensors of a whole tensor of the model, by name; they share its memory."""
        found = self.parts(name)
        if not found:  # none of the model without adapters
            yield name, tensor
            return
        tensor = tensor.contiguous()
        for part in found:
            yield part.name, part.within(tensor)

    def can_read_rows(self, name: str) -> bool:
        """Return True if `read_rows` reads no more of the files than it returns."""
        return all(part.is_by_row(self._row_size(name)) for part in self.parts(name))

    def read_rows(self, name: str, start: int, stop: int, read: ReadRows) -> Tensor:
        """Return rows of the model's tensor `name` from the files."""
        found, row_size, rows = self.parts(name), self._row_size(name), None
        for part in found:
            covers = part.rows(row_size)
            first, last = max(start, covers.start), min(stop, covers.stop)
            if len(found) == 1 and part.shape == self._shapes[name]:
                return read(part.name, start, stop)
            if first >= last:
                continue
            single = len(covers) == 1
            piece = read(
                part.name, *((None, None) if single else (first - covers.start, last - covers.start))
            )
            if rows is None:
                rows = torch.empty(stop - start, *self._shapes[name][1:], dtype=piece.dtype)
            offset = part.offset + (0 if single else (first - covers.start) * row_size) - start * row_size
            rows.as_strided(piece.shape, part.strides, offset).copy_(piece)
        return torch.empty(0, *self._shapes[name][1:]) if rows is None else rows

    def _row_size(self, name: str) -> int:
        return max(1, torch.Size(self._shapes[name][1:]).numel())


class _Uncopied(TorchFunctionMode):
    """Within it, `contiguous` copies nothing, so that what the library cuts out of a tensor stays a view."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # whatever torch's functions return
        if func is Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # on the meta device all data pointers are 0
