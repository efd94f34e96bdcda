"""From an `OSError` about the folder of runs to what a person can do about it."""

from __future__ import annotations

import errno
from pathlib import Path

from rlboost_runtime.errors import ConfigError, RLBoostError, RuntimeFault
from rlboost_runtime.run_folder import home

_UNUSABLE = {
    errno.EROFS: "its disk is read-only",
    errno.EACCES: "it may not be written",
    errno.EPERM: "it may not be written",
    errno.ENOTDIR: "a part of it is a file, not a folder",
    errno.EEXIST: "a part of it is a file, not a folder",
    errno.ENOENT: "it cannot be made there",
    errno.ENAMETOOLONG: "its name is too long",
}
_FULL = {
    errno.ENOSPC: "is full",
    errno.EDQUOT: "is full: your quota is used up",
    errno.EIO: "fails (input/output error)",
}

MIN_ROOM_BYTES = 4 << 20
"""Room for a run's books, logs and reserve to begin with."""


def explain_disk(error: OSError) -> RLBoostError | None:
    """Return the explanation where `error` is about `$RLBOOST_HOME` or its disk; None for any other."""
    folder = home()
    paths = [Path(str(name)).absolute() for name in (error.filename, error.filename2) if name is not None]
    is_ours = any(path.is_relative_to(folder) or folder.is_relative_to(path) for path in paths)
    if error.errno in _FULL and (is_ours or not paths):
        return RuntimeFault(
            f"the disk of {folder} {_FULL[error.errno]}{_free(folder)}",
            "make room there, or set RLBOOST_HOME to a folder on another disk, then type the same again:"
            " what was trained is kept",
        )
    if error.errno in _UNUSABLE and is_ours:
        return ConfigError(
            f"RLBOOST_HOME: runs cannot be kept in {folder}: {_UNUSABLE[error.errno]}",
            "set RLBOOST_HOME to a folder that can be written; the default is ~/.rlboost",
        )
    return None


def require_room(folder: Path) -> None:
    """Raise `RuntimeFault` where the disk of `folder` has no room for a run to start."""
    if full := full_disk(folder, MIN_ROOM_BYTES):
        raise RuntimeFault(
            f"{full}: nothing was started",
            f"make room there: a run needs {MIN_ROOM_BYTES >> 20} MiB besides its weights and checkpoints;"
            " or set RLBOOST_HOME to a folder on another disk",
        )


def full_disk(folder: Path, room_bytes: int = 64 * 1024) -> str | None:
    """Return the words for it where the disk of `folder` has less room than that; the default is what a
    coordinator needs to note at least what happens."""
    import shutil

    for near in (folder, *folder.parents):
        try:
            usage = shutil.disk_usage(near)
        except OSError:
            continue
        return None if usage.free >= room_bytes else f"the disk of {folder} is full{_free(folder)}"
    return None


def _free(folder: Path) -> str:
    import shutil

    for near in (folder, *folder.parents):
        try:
            usage = shutil.disk_usage(near)
        except OSError:
            continue
        return f" ({usage.free / 1e9:.2f} of {usage.total / 1e9:.2f} GB free)"
    return ""
