"""What a run leaves on a head elsewhere, fetched into the run's folder here: final model, newest checkpoint.

Guarantee: a file that is there under its name is whole; one that was cut off goes on where it stopped.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path, PurePosixPath

from rlboost_cli.head.connection import Head, Say
from rlboost_runtime.errors import ProtocolError, RuntimeFault
from rlboost_runtime.run_folder import RunFolder

_PART = ".part"


def fetch_results(run: RunFolder, head: Head, say: Say) -> int:
    """Fetch what is not here yet; return the bytes that were moved.

    Raises `HeadUnreachable`, and `RuntimeFault` where the disk here has no room.
    """
    answer, _ = head.ask("results")
    wanted = [
        (_path(run, str(name)), str(name), int(size), int(changed_ns))
        for name, size, changed_ns in answer["files"]
    ]
    missing = [one for one in wanted if not _is_here(one[0], one[2], one[3])]
    total = sum(size for _, _, size, _ in missing)
    free = shutil.disk_usage(run.path).free
    if total > free:
        raise RuntimeFault(
            f"what {run.name} leaves has {total / 1e9:.2f} GB, the disk here has {free / 1e9:.2f} GB",
            f"make room, then type the same again; it stays on {head.place.host} until then",
        )
    moved = 0
    for path, name, size, changed_ns in missing:
        part = path.with_name(f"{path.name}.{changed_ns}{_PART}")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with part.open("ab") as file:
            while (offset := file.tell()) < size:
                say(
                    f"fetching {name} from {head.place.host}: {(moved + 1) / 1e6:.1f} of {total / 1e6:.1f} MB"
                )
                _, block = head.ask("fetch", name=name, offset=offset)
                if not block:
                    raise RuntimeFault(f"{name} became shorter on {head.place.host}", "type the same again")
                file.write(block)
                moved += len(block)
        os.utime(part, ns=(changed_ns, changed_ns))
        os.replace(part, path)
    return moved


def _is_here(path: Path, size: int, changed_ns: int) -> bool:
    try:
        facts = path.stat()
    except FileNotFoundError:
        return False
    return (facts.st_size, facts.st_mtime_ns) == (size, changed_ns)


def _path(run: RunFolder, name: str) -> Path:
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or pure.parts[:1] != ("checkpoints",):
        raise ProtocolError(
            f"the head of {run.name} offers {name!r}, which is no checkpoint",
            "see that it is the right machine",
        )
    return run.path / pure
