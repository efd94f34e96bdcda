"""Money in a ledger that no machine's time costs."""

from __future__ import annotations

import itertools

from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.billing.ledger_file import GB

_transfers = itertools.count()


def bill_egress(ledger: Ledger, micro_usd: int, at: float) -> None:
    """Bill a transfer that costs `micro_usd`: as many bytes at a micro-dollar each."""
    ledger.set_egress_price("elsewhere", GB)
    ledger.add_egress(f"transfer-{next(_transfers)}", "elsewhere", "head", micro_usd, at)
