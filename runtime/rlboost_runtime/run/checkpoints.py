"""Which checkpoints a run has, and a new run that goes on from one of them.

`checkpoints/step-000012/` is what follows the 13th step: folders count from 0, people from 1. The files of a
checkpoint never change, so that a fork holds links to them: they stay where the parent is deleted, and take
no room twice.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from rlboost_runtime.errors import DISK_ERRNOS, ConfigError, NotFound
from rlboost_runtime.run.folder import RunFolder, read_json, write_json
from rlboost_runtime.run.index import find_run

_NAME = re.compile(r"step-([0-9]{6,})")


def step_folder(checkpoints: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step`, counted from 0; it need not exist."""
    return checkpoints / f"step-{step:06d}"


def saved_steps(checkpoints: Path) -> list[int]:
    """Return the steps, counted from 0, after which there is a checkpoint, ascending."""
    if not checkpoints.is_dir():
        return []
    matches = (_NAME.fullmatch(path.name) for path in checkpoints.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def ancestors_of(run: RunFolder) -> list[str]:
    """Return the checkpoints that the run goes back to, each as RUN@STEP, its own first; none unless it is a
    fork."""
    return list((read_json(run.forked) or {}).get("ancestors", []))


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """A checkpoint that a new run is to start from; `step` is the number of trained steps."""

    parent: RunFolder
    step: int

    @classmethod
    def find(cls, text: str) -> ForkPoint:
        """Return the checkpoint that RUN@STEP means; RUN alone: its newest. Raises `NotFound`, naming those
        that there are, and `ConfigError` where the step is no number."""
        name, at, number = text.partition("@")
        parent = find_run(name)
        if at and not number.isdecimal():
            raise ConfigError(f"--from {text}: no step after @", f"write {name}@STEP, such as {name}@10")
        steps = [step + 1 for step in saved_steps(parent.checkpoints)]
        if not steps or (at and int(number) not in steps):
            kept = ", ".join(f"{name}@{step}" for step in steps)
            where = "; they are on its head" if parent.head.exists() else ""
            raise NotFound(
                f"{name} has no checkpoint {f'after step {int(number)}' if at else 'yet'} here{where}",
                f"take one of {kept}; trainer.keep_checkpoints says how many of the newest are kept"
                if steps
                else f"rlboost status {name} shows how far it is",
            )
        return cls(parent, int(number) if at else steps[-1])

    def __str__(self) -> str:
        return f"{self.parent.name}@{self.step}"

    def plant(self, draft: RunFolder) -> None:
        """Give a new run the checkpoint, the metrics, samples and evaluations up to it, and its ancestry.

        Raises `NotFound` where the parent, which may be training, has deleted it meanwhile.
        """
        source = step_folder(self.parent.checkpoints, self.step - 1)
        try:
            shutil.copytree(source, draft.checkpoints / source.name, copy_function=_link)
            for path in (self.parent.metrics, self.parent.samples, self.parent.evaluations):
                if path.exists():  # the trainer drops the lines of later steps
                    shutil.copyfile(path, draft.path / path.name)
        except (OSError, shutil.Error) as problem:
            if isinstance(problem, OSError) and problem.errno in DISK_ERRNOS:
                raise
            raise NotFound(
                f"the checkpoint {self} cannot be read: {problem}", "take a later one, or add --from again"
            ) from problem
        write_json(draft.forked, {"ancestors": [str(self), *ancestors_of(self.parent)]})


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        shutil.copyfile(source, target)
