"""What holds for every test."""

from __future__ import annotations

import signal

from rlboost_runtime.run import in_memory


def pytest_configure() -> None:
    """Take Ctrl-C as a terminal has it: a shell that starts the tests in the background has it ignored, and
    so would every process that they start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionfinish() -> None:
    """Free the main memory that trainers within tests have put versions into: no supervisor does."""
    in_memory.free_held()
