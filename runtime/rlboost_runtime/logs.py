"""Logs of our processes: one JSON object per line on standard error, which whoever starts a process points at
its log file; on a terminal the same as a readable line.

Every line has `at` (seconds since the Unix epoch), `level`, `role`, `run` and `event`, a dotted past-tense
name such as `machine.launched`; the rest are the event's own fields. Secrets are never fields.

A process calls `setup` once at its edge; libraries only ever do::

    log = logging.getLogger(__name__)
    event(log, "machine.launched", machine="spot-3", price_usd_per_hour=1.2)
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple, TextIO

from rlboost_runtime.errors import RLBoostError

FAILED = "process.failed"
"""Event of a process that ends for a reason it can explain; has `problem` and `remedy`."""

_TAIL_BYTES = 64 * 1024  # of a log file searched for an explanation: hundreds of lines
_context: dict[str, object] = {}


def setup(role: str, *, stream: TextIO | None = None) -> None:
    """Send this process's log, from INFO up, to `stream` (default: standard error); call it once per process.

    `role` is the process: coordinator, agent, trainer. The run's name is taken from RLBOOST_RUN.
    """
    out = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(out)
    run = os.path.basename(os.environ.get("RLBOOST_RUN", ""))
    handler.setFormatter(_ReadableLines() if out.isatty() else _JsonLines(role, run))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    for chatty in (
        "asyncio",
        "websockets",
        "uvicorn.access",
        "httpcore",
        "httpcore2",
        "httpx",
        "httpx2",
        "urllib3",
    ):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def event(
    log: logging.Logger, name: str, *, level: int = logging.INFO, exc_info: bool = False, **fields: object
) -> None:
    """Log the event `name` with `fields`: JSON values; anything else is logged as its `str`.

    `exc_info` adds the traceback of the exception being handled.
    """
    if log.isEnabledFor(level):
        log.log(level, name, extra={"fields": fields}, exc_info=exc_info)


def bind(**fields: object) -> None:
    """Add `fields` (step, policy_version) to every later line of this process; None removes one."""
    _context.update(fields)
    for name in [name for name, value in _context.items() if value is None]:
        del _context[name]


def explain(log: logging.Logger, error: RLBoostError) -> None:
    """Log why this process ends; the supervisor repeats it as the run's outcome if a restart cannot help."""
    event(
        log, FAILED, level=logging.ERROR,
        problem=error.problem, remedy=error.remedy, exit_code=error.exit_code,
    )  # fmt: skip


class Explanation(NamedTuple):
    """Why something ended, and what the CLI returns for it."""

    problem: str
    remedy: str
    exit_code: int = 1


def last_line(path: Path, offset: int = 0) -> str:
    """Return the last line near the end of the log file `path` that a person can read, "" if there is none.

    Of our own JSON lines that is the problem, or the last line of the traceback; others are skipped.
    """
    lines = (_readable(line.decode(errors="replace").strip()) for line in reversed(_tail(path, offset)))
    return next((line for line in lines if line), "")


def _readable(line: str) -> str:
    if not line.startswith("{"):
        return line
    try:
        fields = json.loads(line)
    except ValueError:  # cut off
        return ""
    problem = fields.get("problem") or fields.get("traceback") or ""
    return str(problem).strip().rpartition("\n")[2]


def last_explanation(path: Path, offset: int = 0) -> Explanation | None:
    """Return the last `explain` near the end of the log file `path`, or None.

    What lies before byte `offset` is not looked at.
    """
    for line in reversed(_tail(path, offset)):
        if FAILED.encode() in line:
            try:
                fields = json.loads(line)
                return Explanation(
                    str(fields["problem"]), str(fields["remedy"]), int(fields.get("exit_code", 1))
                )
            except (ValueError, TypeError, KeyError):
                continue
    return None


def _tail(path: Path, offset: int) -> list[bytes]:
    try:
        with path.open("rb") as file:
            file.seek(max(offset, path.stat().st_size - _TAIL_BYTES))
            return file.read().splitlines()
    except FileNotFoundError:
        return []


class _JsonLines(logging.Formatter):
    """One JSON object per line."""

    def __init__(self, role: str, run: str) -> None:
        super().__init__()
        self._fixed = {"role": role, "run": run}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "at": round(record.created, 6),
            "level": record.levelname.lower(),
            **self._fixed,
            "event": record.getMessage(),
            **_context,
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _ReadableLines(logging.Formatter):
    """`12:04:31 machine.launched machine=spot-3`."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = {**_context, **getattr(record, "fields", {})}
        text = " ".join([clock, record.getMessage(), *(f"{name}={value}" for name, value in fields.items())])
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text
