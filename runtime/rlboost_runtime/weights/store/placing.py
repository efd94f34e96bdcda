"""Where a folder of versions lies: in main memory where it has room, else on local NVMe, else on the disk.

A version is durable through the checkpoint that it can be made from, not through a file of its own. In main
memory a publication waits for no disk, and takes nothing from the disk on which tokens are journalled.

The choice is made before the first version of a process, by its real size and what is free then. Later
versions only check that there is still room; where there is none, the versions move to the disk and stay
there. Each choice is an event that says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from rlboost_runtime.errors import RuntimeFault, is_disk_full
from rlboost_runtime.logs import event
from rlboost_runtime.run import in_memory

log = logging.getLogger(__name__)

AUTO, DISK = "auto", "disk"
"""Of the job's `weights.keep_in`; anything else is the path of a folder on a fast disk."""
SPARE = 1.1
"""Versions have deltas, too."""


def _nothing() -> int:
    return 0


class VersionPlacing:
    """Chooses for one folder of versions; see the module. For one thread."""

    def __init__(
        self,
        folder: Path,
        keep_in: str,
        num_versions: int,
        *,
        others: Callable[[], int] = _nothing,
        retire: Callable[[], None] = lambda: None,
    ) -> None:
        """`num_versions`: there at once, at most. `others`: bytes of main memory that this machine will still
        need for other things. `retire` deletes the versions on the disk, for which there is no use then."""
        self._folder = folder
        roots = {DISK: (), AUTO: (in_memory.MEMORY, in_memory.NVME)}
        self._roots: tuple[Path, ...] = roots.get(keep_in, (Path(keep_in),))
        self._num_versions = num_versions
        self._others = others
        self._retire = retire
        self._is_decided = False

    def prepare(self, version_bytes: int) -> None:
        """Choose, or look whether the choice still holds, before a version of so many bytes is put there.

        Raises `RuntimeFault` where versions have to move to a disk that has no room either.
        """
        if in_memory.drop_dead_link(self._folder):
            self._is_decided = False
        root = in_memory.root_of(self._folder)
        if root is not None:
            self._look_again(root, version_bytes)
        elif not self._is_decided:
            self._choose(version_bytes)
        self._is_decided = True

    def prepare_beside(self, other: Path) -> bool:
        """Lie where the versions in `other` do, whose files can be linked then; return False if they lie
        nowhere else."""
        in_memory.drop_dead_link(self._folder)
        root = in_memory.root_of(other)
        if root is None or not self._roots:
            return False
        if in_memory.root_of(self._folder) is None:
            try:
                self._enter(root)
            except OSError:  # there are versions on the disk
                return False
        return True

    def _choose(self, version_bytes: int) -> None:
        if not self._roots:
            return
        needs = round(SPARE * self._num_versions * version_bytes)
        kept_in, problems = "disk", []
        for root in self._roots:
            problem = self._try(root, needs)
            if problem is None:
                kept_in = str(root)
                break
            problems.append(problem)
        level = logging.WARNING if kept_in == "disk" else logging.INFO
        why = "; ".join(problems) or "it fits"
        event(log, "weights.placed", level=level, kept_in=kept_in, needs_gb=_gb(needs), why=why)

    def _try(self, root: Path, needs: int) -> str | None:
        """Lie below `root`; return why that is not possible."""
        problem = self._why_not(root, needs)
        if problem is None:
            try:
                self._enter(root)
            except OSError as error:
                problem = f"{root} cannot be used: {error}"
        return problem

    def _enter(self, root: Path) -> None:
        if self._folder.is_dir():
            self._retire()
        in_memory.move_out(self._folder, root)

    def _why_not(self, root: Path, needs: int) -> str | None:
        if not root.is_dir():
            return f"{root} does not exist"
        room = in_memory.room_in(root)
        others = self._others() if in_memory.is_memory(root) else 0
        if needs + others <= room:
            return None
        beside = f", beside {_gb(others)} GB for everything else," if others else ""
        return f"{self._num_versions} versions need {_gb(needs)} GB{beside} and {root} has {_gb(room)} GB"

    def _look_again(self, root: Path, version_bytes: int) -> None:
        in_memory.hold(self._folder)
        room = in_memory.room_in(root)
        if self._roots and version_bytes <= room:
            return
        why = (
            "weights.keep_in says so"
            if not self._roots
            else f"the next version needs {_gb(version_bytes)} GB, and {root} has {_gb(room)} GB left"
        )
        event(log, "weights.moved_to_disk", level=logging.WARNING, folder=str(self._folder), why=why)
        try:
            in_memory.move_back(self._folder)
        except OSError as problem:
            if not is_disk_full(problem):
                raise
            raise RuntimeFault(
                f"{why}, and the disk of {self._folder} has no room for the versions either",
                "make room on one of the two",
            ) from problem


def _gb(num_bytes: int) -> float:
    return round(num_bytes / 1e9, 2)
