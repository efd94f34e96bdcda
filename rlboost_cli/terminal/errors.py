"""From what went wrong to what a person reads and the exit code that a script reads.

A failure that we can explain is shown as `error:`, a blank line and `hint:`. Anything else is one line and
the file that its traceback was written to. Nobody ever sees a traceback on the screen.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec

import typer

from rlboost_cli.terminal.screen import between_words
from rlboost_runtime.errors import RLBoostError

if TYPE_CHECKING:
    from pathlib import Path

P = ParamSpec("P")

INTERRUPTED = 130
"""Exit code after Ctrl-C, where there was no run to detach from."""


def explained(command: Callable[P, None]) -> Callable[P, None]:
    """Wrap a command: whatever it raises is shown as told above and becomes an exit code."""

    @functools.wraps(command)
    def edge(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except typer.Exit:
            raise
        except RLBoostError as error:
            raise typer.Exit(_show(error)) from None
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # `| head` has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except Exception as error:  # noqa: BLE001 - the edge of the process
            known = _known(error)
            raise typer.Exit(_show_unexpected(error) if known is None else _show(known)) from None

    return edge


def render(error: RLBoostError) -> str:
    """Return the lines shown for `error`: one per mistake for a job file with several, and the hint."""
    lines = getattr(error, "lines", None)
    if lines:
        return "\n".join(lines)
    return f"error: {error.problem}\n\nhint: {error.remedy}"


def _known(error: Exception) -> RLBoostError | None:
    if not isinstance(error, OSError):
        return None
    from rlboost_cli.terminal.disk_errors import explain_disk

    return explain_disk(error)


def _show(error: RLBoostError) -> int:
    print(between_words(render(error), sys.stderr), file=sys.stderr)
    return error.exit_code


def _show_unexpected(error: Exception) -> int:
    where = _write_traceback(error)
    text = str(error).strip().splitlines()
    said = f": {text[0]}" if text else ""
    print(f"error: unexpected {type(error).__name__}{said}", file=sys.stderr)
    print(f"\nhint: the traceback is in {where}; please report it", file=sys.stderr)
    return 1


def _write_traceback(error: Exception) -> Path:
    import tempfile
    import time
    import traceback
    from pathlib import Path

    from rlboost_runtime.run_folder import home

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
