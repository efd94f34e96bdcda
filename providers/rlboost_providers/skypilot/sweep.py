"""Machines that SkyPilot remembers, of any run of this home and of others: for `rlboost gc`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlboost_providers.base import Owned
from rlboost_providers.skypilot.session import Session, SkyPilot
from rlboost_providers.tags import MACHINE, OWNER, RUN

STATUS_S = 120.0
DOWN_S = 300.0


class SkyPilotSweeper:
    """`CanSweep` of everything that SkyPilot's own memory has with our labels. `folder` holds its log."""

    def __init__(self, folder: Path, *, skypilot: SkyPilot | None = None) -> None:
        self._session = Session(folder, skypilot)

    def sweep(self) -> list[Owned]:
        """Return the clusters of ours. Raises `NotYet` while SkyPilot starts, and what it says."""
        rows = self._session.sky().ask("clusters", STATUS_S, names=None, force=False)
        return [_owned(row, row["labels"]) for row in rows if MACHINE in row.get("labels", {})]

    def end(self, owned: Owned) -> None:
        """Take down what `sweep` found; succeeds where it is gone."""
        self._session.sky().ask("down", DOWN_S, cluster=owned.handle, request="")

    def close(self) -> None:
        """End SkyPilot's child."""
        self._session.close()


def _place(row: Mapping[str, Any]) -> str:
    return "/".join(str(row[key]) for key in ("cloud", "region", "zone") if row.get(key))


def _owned(row: Mapping[str, Any], labels: Mapping[str, str]) -> Owned:
    owner, run = labels.get(OWNER, ""), labels.get(RUN, "")
    return Owned(
        run, labels[MACHINE], "skypilot", _place(row), owner, row.get("launched_at"), handle=row["name"]
    )
