"""A run's `samples.jsonl`: a few responses per step, as data and as lines for a person."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rlboost_runtime.errors import NotFound
from rlboost_runtime.run_folder import RunFolder


def samples_of(run: RunFolder, step: int | None) -> dict[str, Any]:
    """Return a step's samples, best first; `step` counts from 1, None is the last one. Raises `NotFound`."""
    lines = list(_lines(run))
    steps = sorted({int(line["step"]) + 1 for line in lines})
    if not steps:
        raise NotFound(f"run {run.name} has no samples yet", "its first step is not trained")
    wanted = steps[-1] if step is None else step
    found = [line for line in lines if int(line["step"]) + 1 == wanted]
    if not found:
        raise NotFound(
            f"run {run.name} has no samples of step {wanted}", f"there are steps {steps[0]} to {steps[-1]}"
        )
    return {"run": run.name, "step": wanted, "samples": found}


def sample_lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the samples of a step as a person reads them."""
    prompt = None
    for sample in found["samples"]:
        if sample["prompt"] != prompt:
            prompt = sample["prompt"]
            yield f"step {found['step']}  prompt"
            yield from _indented(prompt)
        ended = f"{sample['tokens']:.0f} tokens, ended by {sample['finish_reason']}"
        yield f"reward {sample['reward']:.3f}  {ended}"
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
