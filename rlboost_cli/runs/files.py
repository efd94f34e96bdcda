"""A run's log files: which there are, which belong to an instance, and reading on while they grow.

A run's `samples.jsonl`: a few responses per step, as data and as lines for a person.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlboost_runtime.errors import NotFound
from rlboost_runtime.run.folder import RunFolder

_MACHINES = "machines"
_BLOCK = 1 << 20
_ENDINGS = {"length": "truncated"}


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


def log_names(run: RunFolder) -> list[str]:
    """Return what `log_files` can be asked for: processes of the head, then machines."""
    names = [path.relative_to(run.logs).with_suffix("").as_posix() for path in log_files(run)]
    machines = sorted(path.name for path in (run.logs / _MACHINES).glob("*") if path.is_dir())
    return [*names, *machines]


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
    """Return True if the log `name` (path without suffix) is of `instance`. `s-3` and `s-3/0` are a machine
    and its first instance, whose files are `machines/s-3/*-0`; anything else is a process by its name."""
    if name == instance or name.startswith((f"{_MACHINES}/{instance}/", f"{instance}/")):
        return True
    machine, slash, index = instance.rpartition("/")
    return bool(slash) and name.startswith(f"{_MACHINES}/{machine}/") and name.endswith(f"-{index}")


def _short(name: str) -> str:
    parts = name.split("/")
    return parts[1] if parts[0] == _MACHINES and len(parts) > 1 else name


def samples_of(run: RunFolder, step: int | None) -> dict[str, Any]:
    """Return a step's samples, best first; `step` counts from 1, None is the last one. Raises `NotFound`."""
    lines = list(_lines(run))
    steps = sorted({int(line["step"]) + 1 for line in lines})
    if not steps:
        raise NotFound(f"run {run.name} has no samples", "there are some of each trained step")
    wanted = steps[-1] if step is None else step
    found = [line for line in lines if int(line["step"]) + 1 == wanted]
    if not found:
        raise NotFound(
            f"run {run.name} has no samples of step {wanted}", f"there are steps {steps[0]} to {steps[-1]}"
        )
    counts = [{"step": wanted, "tokens": int(line["tokens"])} for line in found]
    return {
        "run": run.name,
        "step": wanted,
        "samples": [line | each for line, each in zip(found, counts, strict=True)],
    }


def sample_rows(
    run: RunFolder, limit: int | None, text: str = "", step: int | None = None
) -> list[dict[str, Any]]:
    """Return the newest `limit` samples (None: all), oldest first, whose prompt or response contains `text`
    (in any case) and that are of `step`, where given. Steps count from 1."""
    wanted, newest = text.casefold(), deque[dict[str, Any]](maxlen=limit)
    for line in _lines(run):
        row = line | {"step": int(line["step"]) + 1}
        if step not in (None, row["step"]):
            continue
        if not wanted or any(wanted in str(row.get(name, "")).casefold() for name in ("prompt", "response")):
            newest.append(row)
    return list(newest)


def sample_lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the samples of a step as a person reads them."""
    prompt = None
    for sample in found["samples"]:
        if sample["prompt"] != prompt:
            prompt = sample["prompt"]
            yield f"step {found['step']}  prompt"
            yield from _indented(prompt)
        reason = sample["finish_reason"]
        ended = f"{sample['tokens']:.0f} tokens, {_ENDINGS.get(reason, reason)}"
        parts = "".join(f", {name} {value:.3f}" for name, value in sample.get("rewards", {}).items())
        yield f"reward {sample['reward']:.3f}{parts}  {ended}"
        yield from _indented(sample["response"])


def _indented(text: str) -> Iterator[str]:
    for line in text.rstrip("\n").splitlines() or [""]:
        yield "    " + "".join(c if c.isprintable() else "·" for c in line)


def _lines(run: RunFolder) -> Iterator[dict[str, Any]]:
    try:
        written = run.samples.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    for text in written.split("\n"):
        try:
            yield json.loads(text)
        except json.JSONDecodeError:
            continue  # the end, or a line that is being written
