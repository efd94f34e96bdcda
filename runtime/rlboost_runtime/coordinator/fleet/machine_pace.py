"""Which offer gives the most tokens for a dollar: machines of unlike GPUs by price over pace.

The pace of a machine is what its engines decode per second when full. It is measured where the run has had
such machines: the core fits each kind of engine's step times from heartbeats (`StepTimes`). Where it has
not, memory bandwidth stands for it, because decoding reads weights and cache from memory for every token:
the ratio of two GPUs' bandwidths is their expected ratio, and one measurement scales all.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from rlboost_providers.base.accelerators import bandwidth
from rlboost_providers.base.provider import Offer
from rlboost_runtime.core.base.messages import Pool
from rlboost_runtime.core.core import Core
from rlboost_runtime.job.rollout import num_devices


class MachinePace:
    """Tokens per second of spot machines, by accelerators."""

    def __init__(self, core: Callable[[], Core], offer_of: Callable[[str], Offer | None]) -> None:
        """`offer_of`: by which offer a machine was bought; None: not known."""
        self._core = core
        self._offer_of = offer_of

    def usd_per_token(self, offer: Offer) -> float:
        """Return what a token of such a machine costs, in a unit that is the same for all offers."""
        return offer.all_micro_usd_per_hour / self._pace(offer.accelerator)

    def _pace(self, accelerator: str) -> float:
        measured = self._measured()
        if accelerator in measured:
            return measured[accelerator]
        scales = [pace / expected_pace(of) for of, pace in measured.items()]
        return expected_pace(accelerator) * (median(scales) if scales else 1.0)

    def _measured(self) -> dict[str, float]:
        """Return tokens per second of full machines, of the accelerators of which engines have shown it."""
        core = self._core()
        machines: dict[str, dict[str, float]] = {}
        for instance in core.instances.values():
            offer = self._offer_of(instance.machine) if instance.pool is Pool.SPOT else None
            tokens_per_s = core.full_tokens_per_s(instance.kind)
            if offer is not None and tokens_per_s is not None:
                engines = machines.setdefault(offer.accelerator, {}).setdefault(instance.machine, 0.0)
                machines[offer.accelerator][instance.machine] = engines + tokens_per_s
        return {accelerator: max(paces.values()) for accelerator, paces in machines.items()}


def expected_pace(accelerator: str) -> float:
    """Return the memory bandwidth of a machine's devices in bytes per second; without a known bandwidth that
    of the slowest GPU that is listed, so that nobody pays more for what may be slow."""
    return num_devices(accelerator) * bandwidth(accelerator)
