"""The spot machines of a run without its coordinator: ended by the supervisor, and by `rlboost down`.

Only clouds in which the books have the intent of a launch are asked: credentials for the others may be
absent. Without books all are asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlboost_providers.base.multi import narrowed
from rlboost_providers.base.provider import MachineView, Provider
from rlboost_providers.base.terminate import Terminated, terminate_all
from rlboost_providers.registry import provider_for
from rlboost_runtime.billing.books import launched_in
from rlboost_runtime.job import Job
from rlboost_runtime.run.folder import RunFolder


def end_machines(
    job: Job, run: RunFolder, say: Callable[[str], None] = lambda text: None, owner: str | None = None
) -> Terminated:
    """Terminate all spot machines of the run, like `terminate_all`; with `owner` those that a head of that
    owner launched. Raises `RuntimeFault` where the ledger cannot be used."""
    provider = _provider(job, run, owner)
    return Terminated((), ()) if provider is None else terminate_all(provider, run.name, say=say)


def list_machines(job: Job, run: RunFolder) -> Sequence[MachineView]:
    """Return the run's spot machines. Raises like `end_machines`."""
    provider = _provider(job, run)
    return () if provider is None else provider.describe(run.name)


def _provider(job: Job, run: RunFolder, owner: str | None = None) -> Provider | None:
    clouds = launched_in(run)
    provider = provider_for(job, run, owner)
    return provider if clouds is None else narrowed(provider, clouds)
