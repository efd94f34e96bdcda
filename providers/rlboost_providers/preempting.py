"""Taking a machine away on purpose: how providers refuse what cannot be done."""

from __future__ import annotations

from rlboost_runtime.errors import NotFound, ProviderError


def absent(run: str, machine: str) -> NotFound:
    """Return the error for a machine that is not there, or not any more."""
    return NotFound(f"no machine {machine} in run {run}", "see `rlboost status` for what runs")


def check_is_unannounced(cloud: str, notice_s: float | None) -> None:
    """Raise `ProviderError` where notice is asked for, which `cloud` cannot give."""
    if notice_s is not None:
        raise ProviderError(
            f"{cloud} announces no reclaim on demand", "leave --notice out: the machine goes at once"
        )
