"""Names of the trainer's machines: the head, and its further nodes where the job has several.

A node is called by its number, 1 and up; the machines that follow a lost one have a second number:
`reserved-1`, `reserved-1-2`, `reserved-1-3`.
"""

from __future__ import annotations

import re

from rlboost_runtime.run.folder import RunFolder, read_json

RESERVED_MACHINE = "reserved-0"
"""The head, as status, ledger and agents call it."""
_NODE = re.compile(r"reserved-([1-9][0-9]*)(?:-([1-9][0-9]*))?")


def node_machine(number: int, life: int) -> str:
    """Return the name of the `life`-th machine (1 is the first) of node `number` (at least 1)."""
    return f"reserved-{number}" if life == 1 else f"reserved-{number}-{life}"


def node_of(machine: str) -> tuple[int, int] | None:
    """Return a machine's node and its place among the machines of that node; None for other machines."""
    found = _NODE.fullmatch(machine)
    return None if found is None else (int(found[1]), int(found[2] or 1))


def is_reserved(machine: str) -> bool:
    """Return True for the head and its further nodes."""
    return machine == RESERVED_MACHINE or node_of(machine) is not None


def joined_nodes(run: RunFolder) -> list[str]:
    """Return the machines of further nodes that were there when the coordinator last said so."""
    return list((read_json(run.trainer_nodes) or {}).get("joined", ()))
