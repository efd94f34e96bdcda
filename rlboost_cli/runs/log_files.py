"""A run's log files: which there are, which belong to an instance, and reading on while they grow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rlboost_runtime.errors import NotFound
from rlboost_runtime.run_folder import RunFolder

_MACHINES = "machines"
_BLOCK = 1 << 20


def log_files(run: RunFolder, instance: str | None = None) -> list[Path]:
    """Return the run's log files, oldest name first, also of machines that are gone.

    `instance` picks those of one instance, machine or process of ours (`coordinator`); without it, those of
    our processes on the head. Raises `NotFound`, naming what there is.
    """
    files = sorted(p for p in run.logs.rglob("*") if p.is_file() and not p.name.startswith("."))
    names = {path: path.relative_to(run.logs).with_suffix("").as_posix() for path in files}
    if instance is None:
        return [p for p in files if not names[p].startswith(f"{_MACHINES}/")]
    found = [p for p in files if _belongs(names[p], instance)]
    if not found:
        known = ", ".join(dict.fromkeys(_short(name) for name in names.values()))
        raise NotFound(
            f"run {run.name} has no logs of {instance}", f"there are logs of: {known or 'nothing yet'}"
        )
    return found


@dataclass(slots=True)
class Tail:
    """Reads log files as they grow; each call returns what is new."""

    run: RunFolder
    instance: str | None
    first_lines: int
    """How many lines of what a file holds at first are returned; 0 means all."""
    _offsets: dict[Path, int] = field(default_factory=dict)

    def read(self) -> Iterator[tuple[Path, str]]:
        """Yield (file, new text) for each file that has any: whole lines, as far as they are written."""
        for path in log_files(self.run, self.instance):
            text = self._first(path) if path not in self._offsets else self._next(path)
            if text:
                yield path, text

    def _first(self, path: Path) -> str:
        self._offsets[path] = 0
        lines = "".join(iter(lambda: self._next(path), "")).splitlines(keepends=True)
        return "".join(lines[-self.first_lines :] if self.first_lines else lines)

    def _next(self, path: Path) -> str:
        with path.open("rb") as file:
            file.seek(self._offsets[path])
            block = file.read(_BLOCK)
        end = block.rfind(b"\n") + 1 or (len(block) if len(block) == _BLOCK else 0)
        self._offsets[path] += end
        return block[:end].decode(errors="replace")


def _belongs(name: str, instance: str) -> bool:
    """Whether the log `name` (path without suffix) is of `instance`: `s-3` and `s-3/0` are a machine and its
    first instance, whose files are `machines/s-3/*-0`; anything else is a process by its name."""
    if name == instance or name.startswith((f"{_MACHINES}/{instance}/", f"{instance}/")):
        return True
    machine, slash, index = instance.rpartition("/")
    return bool(slash) and name.startswith(f"{_MACHINES}/{machine}/") and name.endswith(f"-{index}")


def _short(name: str) -> str:
    parts = name.split("/")
    return parts[1] if parts[0] == _MACHINES and len(parts) > 1 else name
