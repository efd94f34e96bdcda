"""From an exception to the lines that a person reads and the exit code that a script reads.

A failure that we can explain is shown as `error:`, a blank line and `hint:`. Anything else is one line and
the file that its traceback was written to: a traceback is never printed. With RLBOOST_ERRORS=json in the
environment, as a command has it that another machine's `rlboost` runs here, and with `--json`, an error is
one line of JSON on standard error.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec

import typer

from rlboost_cli.terminal.screen import between_words
from rlboost_runtime.errors import ConfigError, RLBoostError, RuntimeFault

_UNUSABLE = {
    errno.EROFS: "its disk is read-only",
    errno.EACCES: "it is not writable",
    errno.EPERM: "it is not writable",
    errno.ENOTDIR: "a part of it is a file, not a folder",
    errno.EEXIST: "a part of it is a file, not a folder",
    errno.ENOENT: "it cannot be created there",
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
    from rlboost_runtime.run.folder import home

    folder = home()
    paths = [Path(str(name)).absolute() for name in (error.filename, error.filename2) if name is not None]
    is_ours = any(path.is_relative_to(folder) or folder.is_relative_to(path) for path in paths)
    if error.errno in _FULL and (is_ours or not paths):
        return RuntimeFault(
            f"the disk of {folder} {_FULL[error.errno]}{_free(folder)}",
            "make room there, or set RLBOOST_HOME to a folder on another disk, then repeat the command:"
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
    usage = _usage(folder)
    is_full = usage is not None and usage[0] < room_bytes
    return f"the disk of {folder} is full{_free(folder)}" if is_full else None


def _free(folder: Path) -> str:
    usage = _usage(folder)
    return "" if usage is None else f" ({usage[0] / 1e9:.2f} of {usage[1] / 1e9:.2f} GB free)"


def _usage(folder: Path) -> tuple[int, int] | None:
    """Return free and total bytes of the disk of `folder`, which need not exist; None where nobody knows."""
    import shutil

    for near in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage(near)
            return usage.free, usage.total
    return None


P = ParamSpec("P")

ERRORS_VARIABLE = "RLBOOST_ERRORS"
"""Environment variable that asks a command for JSON errors; processes that it starts do not inherit it."""
_JSON_MARK = '{"error": '
INTERRUPTED = 130
"""Exit code after Ctrl-C, where there was no run to detach from."""


def explained(command: Callable[P, None]) -> Callable[P, None]:
    """Wrap a command: whatever it raises is shown as described above and becomes an exit code."""

    @functools.wraps(command)
    def edge(*args: P.args, **kwargs: P.kwargs) -> None:
        is_json = os.environ.pop(ERRORS_VARIABLE, "") == "json" or kwargs.get("as_json") or kwargs.get("json")
        show = _show_json if is_json else _show
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except typer.Exit:
            raise
        except RLBoostError as error:
            raise typer.Exit(show(error)) from None
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # `| head` has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except Exception as error:  # noqa: BLE001 - the edge of the process
            raise typer.Exit(show(_explained(error))) from None

    return edge


def render(error: RLBoostError) -> str:
    """Return the lines shown for `error`: one per mistake for a job file with several, and the hint."""
    lines = getattr(error, "lines", None)
    if lines:
        return "\n".join(lines)
    return f"error: {error.problem}\n\nhint: {error.remedy}"


def read_error(printed: str) -> RLBoostError | None:
    """Return the error that a command printed as JSON, with its exit code; None if it printed none."""
    for line in reversed(printed.splitlines()):
        if line.startswith(_JSON_MARK):
            found = json.loads(line)["error"]
            error = RLBoostError(found["problem"], found["remedy"])
            error.exit_code = found["exit_code"]
            return error
    return None


def _show(error: RLBoostError) -> int:
    print(between_words(render(error), sys.stderr), file=sys.stderr)
    return error.exit_code


def _show_json(error: RLBoostError) -> int:
    print(as_json(error), file=sys.stderr)
    return error.exit_code


def as_json(error: RLBoostError) -> str:
    """Return `error` as one line; `lines`: each mistake of a job file, with its place."""
    found: dict[str, object] = {
        "class": type(error).__name__,
        "problem": error.problem,
        "remedy": error.remedy,
        "exit_code": error.exit_code,
    }
    if lines := getattr(error, "lines", None):
        found["lines"] = list(lines)
    return f"{_JSON_MARK}{json.dumps(found)}}}"


def known(error: Exception) -> RLBoostError | None:
    """Return the explanation of a full or unusable disk and of a package that is not installed; else None."""
    if isinstance(error, OSError):
        return explain_disk(error)
    if isinstance(error, ModuleNotFoundError):
        from rlboost_cli.terminal import extras

        return extras.explained(error)
    return None


def _explained(error: Exception) -> RLBoostError:
    if (explanation := known(error)) is not None:
        return explanation
    where = _write_traceback(error)
    text = str(error).strip().splitlines()
    return RuntimeFault(
        f"unexpected {type(error).__name__}{f': {text[0]}' if text else ''}",
        f"the traceback is in {where}; please report it",
    )


def _write_traceback(error: Exception) -> Path:
    import tempfile
    import time
    import traceback

    from rlboost_runtime.run.folder import home

    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    text = "".join(traceback.format_exception(error))
    for folder in (home() / "tracebacks", Path(tempfile.gettempdir())):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = folder / name
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "w") as file:
                file.write(text)
        except OSError:  # a full disk, say: what went wrong first is what matters
            continue
        return path
    return Path(os.devnull)
