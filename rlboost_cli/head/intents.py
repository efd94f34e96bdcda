"""What a lost head had begun to launch, for the books here: as last mirrored, and as at the job's output."""

from __future__ import annotations

import time

from rlboost_runtime.coordinator.bought import Bought
from rlboost_runtime.coordinator.ledger import Ledger
from rlboost_runtime.core.messages import Pool
from rlboost_runtime.intent_copy import IntentCopy
from rlboost_runtime.run_create import stored_job
from rlboost_runtime.run_folder import RunFolder, write_atomically


def learn_intents(run: RunFolder) -> None:
    """Enter into the books here every machine that the run's head was about to launch, and what for.

    Which of them there are, and since when, their clouds say. Doing it again changes nothing.
    """
    path = run.cloud / "bought.json"
    copy = IntentCopy.of(run, stored_job(run)).read()
    if copy is not None and (not path.exists() or len(copy) > path.stat().st_size):  # it only grows
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomically(path, copy)
    offers = Bought(path).offers()
    if not offers:
        return
    ledger = Ledger(run.ledger)
    try:
        for machine, offer in offers.items():
            ledger.intend(
                machine,
                pool=Pool.SPOT,
                provider=offer.provider,
                zone=offer.zone,
                accelerator=offer.accelerator,
                price_micro_usd_per_hour=offer.most_micro_usd_per_hour,
                price_source=offer.source,
                at=time.time(),
            )
    finally:
        ledger.close()
