"""When to start a role again, and when to give up: pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass

EX_CONFIG = 78
"""sysexits.h: how a role says that a restart would not help."""
EX_TEMPFAIL = 75
"""sysexits.h: how a role says that the machine's disk fails it, which is no fault of its own and may pass."""

EX_IOERR = 74
"""sysexits.h: how a role says that the disk has refused for longer than it is worth waiting."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Times in seconds."""

    backoff_s: float = 0.2
    """Pause before the first restart; doubled for each further one."""
    backoff_limit_s: float = 10.0
    """Longest pause; also the one after a role ended of its own accord (exit status 0)."""
    healthy_after_s: float = 30.0
    """A process that lived so long was well: pauses start small again."""
    crashes: int = 6
    """Crashes in a row without progress after which the run has failed."""
    kills: int = 20
    """SIGKILLs in a row without progress after which the run has failed. One is always somebody else's doing
    and says nothing about the role; so many mean that this machine has no room for it (out of memory), and
    that going on only costs money. With the pauses between them they take three minutes at least."""
    disk_patience_s: float = 900.0
    """Time without progress for which a role that the disk refuses is started again before the run has
    failed: time to make room, without paying for an idle fleet until the morning."""
    look_s: float = 0.2
    """Time between two looks for files that other processes write."""
    grace_s: float = 5.0
    """Time between SIGTERM and SIGKILL at the end."""
    stop_timeout_s: float = 30.0
    """How long the coordinator gets to end a failed run in order before that is done for it."""


@dataclass(slots=True)
class Attempts:
    """The lives of one role so far. `measures_progress`: it is seen in its work, not in its life time.

    A crash is an end that speaks against the role itself: not status 0, nor `EX_TEMPFAIL`, nor SIGKILL, which
    is always somebody else's doing; the latter two have bounds of their own.
    """

    tuning: Tuning
    measures_progress: bool
    progress: int = 0
    restarts: int = 0
    crashes: int = 0
    kills: int = 0
    refused_s: float = 0.0
    """Time since the disk began to refuse."""

    def ended(self, status: int | None, lived_s: float, progress: int) -> float:
        """Take note of the end of a life; return the pause before the next."""
        healthy = lived_s >= self.tuning.healthy_after_s
        if progress != self.progress or (healthy and not self.measures_progress):
            self.crashes = self.kills = 0
            self.refused_s = 0.0
        if healthy:
            self.restarts = 0
        self.progress = progress
        self.restarts += 1
        pause_s = self._pause_s(status)
        if status == EX_TEMPFAIL:
            self.refused_s += lived_s + pause_s
        elif status == -signal.SIGKILL:
            self.kills += 1
        else:
            self.crashes += status != 0
        return pause_s

    def _pause_s(self, status: int | None) -> float:
        if status == 0:
            return self.tuning.backoff_limit_s
        exponent = min(self.restarts - 1, 30)  # far beyond any limit, and no overflow
        return float(min(self.tuning.backoff_s * 2**exponent, self.tuning.backoff_limit_s))

    def is_hopeless(self, status: int | None) -> bool:
        """Whether another restart would not help, after a life that ended with `status`."""
        return (
            status in (EX_CONFIG, EX_IOERR)
            or self.crashes >= self.tuning.crashes
            or self.kills >= self.tuning.kills
            or self.refused_s >= self.tuning.disk_patience_s
        )
