"""Each field of each event that simulated agents fill, live ones fill too; the lists come from the code."""

from __future__ import annotations

import ast
import dataclasses
from collections import defaultdict
from pathlib import Path
from typing import get_args

import pytest

import rlboost_runtime
from rlboost_runtime.core.base.messages import Event

PACKAGE = Path(rlboost_runtime.__file__).parent
EVENTS = {kind.__name__: kind for kind in get_args(Event)}
CONSTANTS = (ast.Constant, ast.Tuple)


def filled(*paths: Path) -> dict[str, set[str]]:
    """The fields of events that the code fills with something that is no constant."""
    found: dict[str, set[str]] = defaultdict(set)
    for node in (node for path in paths for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in EVENTS:
            names = [field.name for field in dataclasses.fields(EVENTS[node.func.id])]
            given = dict(zip(names, node.args, strict=False)) | {
                k.arg: k.value for k in node.keywords if k.arg
            }
            starred = any(isinstance(value, ast.Starred) for value in node.args)
            found[node.func.id] |= {name for name, value in given.items() if not isinstance(value, CONSTANTS)}
            found[node.func.id] |= set(names[len(node.args) :]) if starred else set()
    return found


SIMULATED = filled(PACKAGE / "sim" / "agents.py")
LIVE = filled(*(PACKAGE / "coordinator").rglob("*.py"))


@pytest.mark.parametrize("kind", sorted(SIMULATED))
def test_the_coordinator_fills_what_simulated_agents_fill(kind: str) -> None:
    missing = SIMULATED[kind] - LIVE[kind]
    assert not missing, f"no live agent fills {sorted(missing)} of {kind}"


def test_simulated_agents_report_progress_lengths_and_queues() -> None:
    assert {"InstanceJoined", "InstanceReady", "Heartbeat", "Slept", "Released"} <= SIMULATED.keys()
    assert {"engine_progress", "tokens", "num_queued"} <= SIMULATED["Heartbeat"]
