"""Terminate every machine of a run for certain: at the supervisor's end, and in `rlboost down`.

Guarantee once `terminate_all` returns: the provider lists no living machine of the run. A provider that does
not answer, or is still starting, is asked again until the time is up; machines are terminated concurrently.
Where some clouds do not answer, the machines of the others are terminated before that is raised.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rlboost_providers.base.provider import MachineStatus, MachineView, PartlyListed, Provider
from rlboost_runtime.errors import ProviderError, Retry, RuntimeFault

PATIENCE_S = 240.0
"""How long a cloud is asked: SkyPilot alone may need a minute or two to start."""
_AGAIN_S = 1.0
_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Terminated:
    """`machines` existed and were terminated; `views` is what the provider listed last."""

    machines: tuple[str, ...]
    views: tuple[MachineView, ...]


def terminate_all(
    provider: Provider,
    run: str,
    *,
    timeout_s: float = PATIENCE_S,
    say: Callable[[str], None] = lambda text: None,
) -> Terminated:
    """Terminate all machines of `run`; blocks until its provider reports them gone. Raises the provider's
    error where it does not answer, and `RuntimeFault` naming what is left at the end."""
    deadline = time.monotonic() + timeout_s
    asked: dict[str, None] = {}
    while True:
        is_late = time.monotonic() > deadline
        views, silence = _describe(provider, run)
        alive = [view.machine for view in views if view.state is not MachineStatus.GONE]
        if not alive:
            if silence is None:
                return Terminated(tuple(asked), tuple(views))
            if is_late or silence.retry is not Retry.LATER:
                raise silence
            say(f"waiting for the cloud: {silence.problem}")
        else:
            if is_late and asked:
                raise RuntimeFault(
                    f"machines of {run} are left: {', '.join(alive)}", f"type `rlboost down {run}` again"
                )
            asked |= dict.fromkeys(alive)
            if _terminate(provider, run, alive, say):
                continue  # look at once
        time.sleep(_AGAIN_S)


def _describe(provider: Provider, run: str) -> tuple[Sequence[MachineView], ProviderError | None]:
    """Return the machines that are known, and the error if these may not be all."""
    try:
        return provider.describe(run), None
    except PartlyListed as silence:
        return silence.views, silence
    except ProviderError as silence:
        return (), silence


def _terminate(provider: Provider, run: str, machines: Sequence[str], say: Callable[[str], None]) -> bool:
    """Request the termination of `machines`; return True if every request was accepted."""
    with ThreadPoolExecutor(min(_AT_ONCE, len(machines))) as pool:
        calls = [pool.submit(provider.terminate, run, machine) for machine in machines]
    problems = [problem for call in calls if (problem := call.exception()) is not None]
    for problem in problems:
        if not isinstance(problem, ProviderError):
            raise problem
        say(f"waiting for the cloud: {problem.problem}")
    return not problems
