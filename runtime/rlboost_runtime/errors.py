"""Failures that we can explain.

::

    RLBoostError            1  failed
    ├── ConfigError         2  bad input: job file, trace, argument
    ├── NotFound            3  no such run, instance or machine
    ├── ProviderError       7  cloud unreachable
    │   ├── NoCapacity      4  nothing to be had at this price now: later, or elsewhere
    │   ├── QuotaExceeded   6  the account may not have more
    │   ├── CredentialsRejected 6
    │   ├── Throttled       7  asked too often: later
    │   └── NotYet          7  asked too early; ask again
    ├── ProtocolError       1  a peer said something that makes no sense
    └── RuntimeFault        1  one of our processes or a user's function failed
        ├── PortTaken       1  another program has our port
        └── GpuMissing      8  a machine that was bought with GPUs has fewer that can be used

`problem` says what is wrong (where, what was found), `remedy` what to type or change next.
"""

from __future__ import annotations

import errno
from enum import StrEnum

DISK_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
"""Numbers of an `OSError` by which a disk takes no more or fails: it may pass, and no code of ours is to
blame."""

_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FULL_WORDS = (*(f"(os error {number})" for number in _FULL_ERRNOS), "inline_container.cc")
"""How libraries that do not raise `OSError` say it: safetensors, and torch's writer of zip files, which fails
in this way for no other reason."""


def is_disk_full(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, says that a disk is full."""
    if isinstance(error, OSError):
        return error.errno in _FULL_ERRNOS
    if any(words in str(error) for words in _FULL_WORDS):
        return True
    return error.__cause__ is not None and is_disk_full(error.__cause__)


class RLBoostError(Exception):
    """A failure that we can explain; `exit_code` is what the CLI returns for it."""

    exit_code = 1

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy)  # both in args, so that it survives pickling
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.problem}; {self.remedy}"


class ConfigError(RLBoostError):
    """What a person wrote cannot be used."""

    exit_code = 2


class NotFound(RLBoostError):
    """No such run, instance or machine."""

    exit_code = 3


class Retry(StrEnum):
    """Where and when asking a cloud again makes sense."""

    LATER = "later"
    """The same again, after a pause."""
    ELSEWHERE = "elsewhere"
    """Another zone or machine type now; this one after a pause."""
    NEVER = "never"
    """Nothing of this cloud, until a person acts."""


class ProviderError(RLBoostError):
    """A cloud could not be reached or answered something unexpected: try again later."""

    exit_code = 7
    retry = Retry.LATER
    retry_after_s: float | None = None
    """When asking again makes sense, where the cloud says so."""


class NoCapacity(ProviderError):
    """The cloud has no such machine to give at this price now: later, or elsewhere."""

    exit_code = 4
    retry = Retry.ELSEWHERE


class QuotaExceeded(ProviderError):
    """The account may not have more of these here, until a person acts; other places have their own quota."""

    exit_code = 6
    retry = Retry.ELSEWHERE


class CredentialsRejected(ProviderError):
    """Missing, wrong or expired credentials: never, until a person acts."""

    exit_code = 6
    retry = Retry.NEVER


class Throttled(ProviderError):
    """The cloud refuses to be asked so often: later."""


class NotYet(ProviderError):
    """The machine exists but cannot answer this yet: ask again."""


class ProtocolError(RLBoostError):
    """A peer sent something that makes no sense at this point."""


class RuntimeFault(RLBoostError):
    """One of our processes, or a function of the user's, failed."""


class GpuMissing(RuntimeFault):
    """A machine that was bought with GPUs has fewer that can be used."""

    exit_code = 8


class PortTaken(RuntimeFault):
    """Another program listens on a port that the run's machines know: a restart of the run takes new ones."""


def port_taken(port: int, role: str, run: str) -> PortTaken:
    """Return the error of `role`, which cannot listen on the port that it had before."""
    return PortTaken(
        f"port {port} of the {role} of run {run} is taken by another program",
        f"type rlboost launch {run} --resume: it continues from its last checkpoint on a free port;"
        " `ss -ltnp` names the program that uses this one",
    )
