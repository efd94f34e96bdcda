"""What each machine was bought as, on disk: a coordinator that was restarted still knows where its machines
are and what bytes to them cost."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rlboost_providers.base import Offer
from rlboost_runtime.run_folder import write_atomically

_FILE = msgspec.json.Decoder(dict[str, Offer])


class Bought:
    """Offers by machine, in `path`; None: in memory only. One thread at a time."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._offers: dict[str, Offer] = {}
        if path is not None and path.exists():
            try:
                self._offers = _FILE.decode(path.read_bytes())
            except msgspec.DecodeError:  # another version's: then nothing is known, as before
                self._offers = {}

    def get(self, machine: str) -> Offer | None:
        """Return what the machine was bought as; None where nobody knows."""
        return self._offers.get(machine)

    def offers(self) -> dict[str, Offer]:
        """Return all, by machine."""
        return dict(self._offers)

    def add(self, machine: str, offer: Offer) -> None:
        """Keep it, also through a power cut, before its launch is asked for. Raises `OSError`."""
        if self._offers.get(machine) == offer:
            return
        self._offers[machine] = offer
        if self._path is not None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(self._path, msgspec.json.encode(self._offers), durably=True)
