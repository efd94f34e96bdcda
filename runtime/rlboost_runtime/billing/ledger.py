"""The run's books in one file: machines and money, boots, steps, and what happened in words.

One SQLite file (WAL). The coordinator writes it; anybody may read it while it runs and after. `rlboost down`
writes the last ends of machines once it has seen that no coordinator is left.

Guarantees:

- a call that says something of a machine's life, a step or money has committed to stable storage when it
  returns: an intent is on disk before its launch is asked for. Waste and boots survive a killed process, not
  a power cut; notes wait in memory for `write_notes`;
- money and time are integers (micro-dollars, nanoseconds since the Unix epoch), summed exactly;
- saying the same thing about a machine twice changes nothing: the first word holds;
- nothing is removed. A machine stays open (`open_machines`) from its intent until it failed or ended.

Times are given in seconds since the Unix epoch and kept to the microsecond. Safe to use from several threads.
"""

from __future__ import annotations

from rlboost_runtime.billing.ledger_machines import BootLedger, MachineLedger
from rlboost_runtime.billing.ledger_steps import EgressLedger, NoteLedger, StepLedger


class Ledger(MachineLedger, BootLedger, StepLedger, NoteLedger, EgressLedger):
    """All books of a run in `path`; created where they do not exist.

    With `read_only` nothing is created or changed. Raises `NotFound` where there is nothing to read, and
    `RuntimeFault` where the file is not a ledger of this version.
    """
