"""What holds for every test."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Take Ctrl-C as a terminal has it: a shell that starts the tests in the background has it ignored, and
    so would every process that they start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
