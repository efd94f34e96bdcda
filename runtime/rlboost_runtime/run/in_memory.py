"""Folders in main memory (tmpfs), or on another fast disk, behind a link at their usual place.

::

    WEIGHTS -> /dev/shm/rlboost-1000/8f14.../    the folder's link
    /dev/shm/rlboost-1000/8f14.../.held          locked shared (flock) by each process that needs the content

The folder /dev/shm/rlboost-1000 is locked by whoever makes or deletes one, and is there as long as one is.

Guarantees: what no process holds is deleted by the user's next `sweep`, so that nothing outlives a killed run
for long; only what lies in a folder of this kind, and is ours, is ever deleted through a link. The content is
gone after a reboot: it must be such that its owner can make it again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from rlboost_runtime.run.folder import RunFolder

MEMORY = Path("/dev/shm")  # noqa: S108
"""Linux mounts a tmpfs there, of half of the memory where nobody says otherwise; Docker one of 64 MB."""
NVME = Path("/mnt/rlboost-nvme")
"""The local NVMe of a machine that we bought, where it has one (`deploy/local_nvme.sh`)."""
_HELD = ".held"
_UNFINISHED = (".building-*", ".scratch-*", "*.part")
"""What a move does not take along."""
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
_holds: dict[Path, int] = {}
"""Locks of this process, by folder: they end with it."""


def room_in(root: Path) -> int:
    """Return how many bytes can be put below `root` now: of a tmpfs at most the memory that is available."""
    try:
        found = os.statvfs(root)
    except OSError:
        return 0
    free = found.f_bavail * found.f_frsize
    return min(free, available_memory()) if is_memory(root) else free


def available_memory() -> int:
    """Return the bytes of main memory that can be had now, within what a container may use."""
    available = int(psutil.virtual_memory().available)
    for limit, used in _CGROUPS:
        with suppress(OSError, ValueError):  # there is none, or "max"
            available = min(available, int(Path(limit).read_text()) - int(Path(used).read_text()))
    return max(0, available)


def is_memory(path: Path) -> bool:
    """Return True if `path` lies on a tmpfs."""
    path = path.resolve()
    mounts = [each for each in psutil.disk_partitions(all=True) if path.is_relative_to(each.mountpoint)]
    return bool(mounts) and max(mounts, key=lambda each: len(each.mountpoint)).fstype in ("tmpfs", "ramfs")


def root_of(folder: Path) -> Path | None:
    """Return the root below which the content of `folder` lies; None where it lies in its usual place."""
    target = _target(folder)
    return None if target is None or not target.is_dir() else target.parents[1]


def move_out(folder: Path, root: Path) -> None:
    """Let `folder`, which is absent or empty, lie below `root` from now on, held by this process.

    Raises `OSError` where it cannot be made, or another user has taken its name.
    """
    folder = folder.absolute()
    target = _ours(root) / hashlib.blake2b(os.fsencode(folder), digest_size=12).hexdigest()
    with _making(root):
        _delete(target)
        target.mkdir(mode=0o700)
        _hold(target)
        if folder.is_symlink():
            folder.unlink()
        elif folder.exists():
            folder.rmdir()
        folder.symlink_to(target)


def move_back(folder: Path) -> None:
    """Let `folder` lie in its usual place again, with its content; blocks for the disk. Raises `OSError`."""
    target = _target(folder)
    if target is None:
        return
    copy = folder.with_name(f".{folder.name}.moving")
    shutil.rmtree(copy, ignore_errors=True)
    if target.is_dir():
        shutil.copytree(target, copy, ignore=shutil.ignore_patterns(_HELD, *_UNFINISHED))
    else:
        copy.mkdir(mode=0o700)
    folder.unlink()
    os.rename(copy, folder)
    _delete_last(target)


def hold(folder: Path) -> None:
    """Keep `folder` from being swept as long as this process lives, where it lies elsewhere; idempotent."""
    target = _target(folder)
    if target is None or (target in _holds and _is_same(_holds[target], target / _HELD)):
        return
    with suppress(FileNotFoundError):  # its content is gone
        _hold(target)


def drop_dead_link(folder: Path) -> bool:
    """Remove the link of a folder whose content is gone, such as after a reboot; return True if it was."""
    if _target(folder) is None or folder.exists():
        return False
    folder.unlink()
    return True


def free(folder: Path) -> None:
    """Delete the content of `folder`, and its link, where it lies elsewhere; else nothing. Never raises for
    what is gone already."""
    target = _target(folder)
    if target is not None:
        _delete_last(target)
        folder.unlink(missing_ok=True)


def free_run(run: RunFolder) -> None:
    """Do the same for a run's store and reserved engines; providers do it for machines that they end."""
    free(run.weights)
    if run.reserved.is_dir():
        for machine in run.reserved.iterdir():
            free_below(machine / "weights")


def roots(keep_in: str) -> tuple[Path, ...]:
    """Return the roots that a job's `weights.keep_in` may have used."""
    return (MEMORY, NVME, Path(keep_in)) if keep_in.startswith("/") else (MEMORY, NVME)


def free_below(parent: Path) -> None:
    """Do the same for each folder in `parent`, which may be absent."""
    if parent.is_dir():
        for folder in parent.iterdir():
            free(folder)


def free_held() -> None:
    """Do the same for all that this process holds; for a process that runs without a supervisor."""
    for target in list(_holds):
        _delete_last(target)


def sweep(roots: Iterable[Path] = (MEMORY, NVME)) -> int:
    """Delete what of ours no process holds; return its bytes."""
    freed = 0
    for root in roots:
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError), _making(root):
            for target in _ours(root).iterdir():
                if not _is_held(target):
                    freed += _size(target)
                    shutil.rmtree(target, ignore_errors=True)
    return freed


def _ours(root: Path) -> Path:
    return root / f"rlboost-{os.getuid()}"


@contextmanager
def _making(root: Path) -> Iterator[None]:
    """Hold the lock on our folder below `root`, made where there is none, and gone afterwards if it is empty.
    Raises `PermissionError` where another user has taken its name."""
    ours = _ours(root)
    while True:
        with suppress(FileExistsError):
            ours.mkdir(mode=0o700)
        fd = os.open(ours, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(fd).st_uid != os.getuid():
                raise PermissionError(f"{ours} belongs to another user")
            fcntl.flock(fd, fcntl.LOCK_EX)
            if not _is_same(fd, ours):  # deleted while we waited
                continue
            yield
            with suppress(OSError):
                ours.rmdir()
            return
        finally:
            os.close(fd)


def _is_same(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _target(folder: Path) -> Path | None:
    """Return where the link of a folder leads, None where it is no link of this kind."""
    if not folder.is_symlink():
        return None
    target = Path(os.readlink(folder))
    return target if target.is_absolute() and target.parent == _ours(target.parents[1]) else None


def _hold(target: Path) -> None:
    fd = os.open(target / _HELD, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_SH)
    former = _holds.pop(target, None)
    _holds[target] = fd
    if former is not None:
        os.close(former)


def _is_held(target: Path) -> bool:
    try:
        fd = os.open(target / _HELD, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _delete(target: Path) -> None:
    fd = _holds.pop(target, None)
    shutil.rmtree(target, ignore_errors=True)
    if fd is not None:
        os.close(fd)


def _delete_last(target: Path) -> None:
    """Delete it, and our folder if it was the last one in there."""
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError), _making(target.parents[1]):
        _delete(target)


def _size(target: Path) -> int:
    looks = {}
    for path in target.rglob("*"):
        with suppress(FileNotFoundError):
            found = path.lstat()
            looks[found.st_ino] = found.st_blocks * 512
    return sum(looks.values())
