"""Who has which weights, who may pull from whom, and what the transfers cost.

Peers are instances that listen for others of their zone. What chunks a peer has, receivers ask the peer
itself; here is only who listens. Guarantees: an instance is given only peers of its own zone, and takes the
slice of a version that is its own among them, so that they fetch about one copy from the head together; a
peer that `STRIKES` others could not reach stays a leaf until it reports again that it listens.

Nothing here is needed for a run to go on: after a restart instances report again that they listen, and until
then all of them pull from the head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from rlboost_runtime.protocol.messages import (
    InstanceReadyMessage,
    LoadVersionMessage,
    Peer,
    PeerListening,
    VersionPublishedMessage,
)

STRIKES = 2
"""One complaint may be due to the complainer's own network."""
MAX_PEERS = 8
"""Peers given to one instance: each takes a connection and a thread there."""
KEEP_VERSIONS = 20
"""Versions whose figures the status shows."""


@dataclass(slots=True)
class VersionFigures:
    """What is known of one version's distribution to the instances."""

    version: int
    digest: str = ""
    full_bytes: int = 0
    delta_bytes: int = 0
    stop_s: float = 0.0
    publish_s: float = 0.0
    wire_bytes: dict[str, int] = field(default_factory=dict)
    """By source: head, peers, bucket."""
    pulls: dict[str, int] = field(default_factory=dict)
    """Instances that got it, by how: full, delta, linked, here."""
    slowest_pull_s: float = 0.0
    longest_pause_s: float = 0.0
    facts: set[tuple[str, float, int]] = field(default_factory=set)
    """Pulls that were counted already: instance, seconds and bytes."""

    def as_json(self) -> dict[str, Any]:
        """Return the figures as plain JSON values."""
        figures = {name: value for name, value in asdict(self).items() if name not in ("digest", "facts")}
        seconds = {name: round(value, 4) for name, value in figures.items() if name.endswith("_s")}
        return figures | seconds


@dataclass(slots=True)
class _Listener:
    zone: str
    machine: str
    peer: Peer
    strikes: set[str] = field(default_factory=set)


class WeightTracker:
    """Knows versions and peers.

    `zone_of` returns the zone of a machine. `on_transfer` is called with (name of the transfer, machine,
    source, bytes); after a restart possibly again for the same transfer.
    """

    def __init__(
        self,
        zone_of: Callable[[str], str] = lambda _: "",
        on_transfer: Callable[[str, str, str, int], None] = lambda *_: None,
    ) -> None:
        self._zone_of = zone_of
        self._on_transfer = on_transfer
        self._versions: dict[int, VersionFigures] = {}
        self._listeners: dict[str, _Listener] = {}

    def published(self, message: VersionPublishedMessage) -> None:
        """Record a published version."""
        figures = self._figures(message.version)
        figures.digest, figures.full_bytes = message.digest, message.num_bytes
        figures.delta_bytes = message.delta_bytes
        figures.stop_s, figures.publish_s = message.stop_s, message.publish_s

    def listening(self, instance: str, machine: str, message: PeerListening) -> None:
        """Record that an instance listens for the others of its zone."""
        peer = Peer(instance, message.url, message.certificate, message.token)
        known = self._listeners.get(instance)
        if known is None or known.peer != peer:
            self._listeners[instance] = _Listener(self._zone_of(machine), machine, peer)

    def forget(self, instance: str) -> None:
        """Forget an instance that is gone."""
        self._listeners.pop(instance, None)

    def load(self, instance: str, machine: str, version: int) -> LoadVersionMessage:
        """Return the command to fetch `version`."""
        zone = self._zone_of(machine)
        near = sorted(
            name
            for name, listener in self._listeners.items()
            if zone and listener.zone == zone and len(listener.strikes) < STRIKES
        )
        digest = self._versions[version].digest if version in self._versions else ""
        machines = list(dict.fromkeys(self._listeners[name].machine for name in near))
        others = [name for name in near if self._listeners[name].machine != machine]  # its own are linked
        if not others:
            return LoadVersionMessage(version, digest)
        if instance not in near:  # a leaf: no peer could get from it what it fetched
            return LoadVersionMessage(version, digest, self._peers(others), (0, 0))
        after = [name for name in _after(near, instance) if name in others]
        return LoadVersionMessage(
            version, digest, self._peers(after), (machines.index(machine), len(machines))
        )

    def ready(self, instance: str, machine: str, message: InstanceReadyMessage) -> None:
        """Record that an instance got a version, or had it; a repeated report counts once."""
        figures = self._figures(message.version)
        fact = (instance, message.pull_s, message.pulled_bytes)
        if fact in figures.facts:
            return
        figures.facts.add(fact)
        how = message.how or "here"
        figures.pulls[how] = figures.pulls.get(how, 0) + 1
        figures.full_bytes = figures.full_bytes or message.full_bytes
        figures.slowest_pull_s = max(figures.slowest_pull_s, message.pull_s)
        figures.longest_pause_s = max(figures.longest_pause_s, message.pause_s or message.apply_s)
        for holder, num_bytes in message.sources.items():
            source = holder if holder in ("head", "bucket") else "peers"
            figures.wire_bytes[source] = figures.wire_bytes.get(source, 0) + num_bytes
            transfer = f"{instance} v{message.version} {holder} {message.pull_s:.6f} {num_bytes}"
            self._on_transfer(transfer, machine, source, num_bytes)
        for holder in message.complaints:
            listener = self._listeners.get(holder)
            if listener is not None:
                listener.strikes.add(instance)

    def as_json(self) -> dict[str, Any]:
        """Return what the status shows."""
        return {
            "peers": sorted(n for n, each in self._listeners.items() if len(each.strikes) < STRIKES),
            "leaves": sorted(n for n, each in self._listeners.items() if len(each.strikes) >= STRIKES),
            "versions": [figures.as_json() for _, figures in sorted(self._versions.items())],
        }

    def _peers(self, names: list[str]) -> tuple[Peer, ...]:
        return tuple(self._listeners[name].peer for name in names[:MAX_PEERS])

    def _figures(self, version: int) -> VersionFigures:
        figures = self._versions.setdefault(version, VersionFigures(version))
        for old in sorted(self._versions)[:-KEEP_VERSIONS]:
            del self._versions[old]
        return figures


def _after(names: list[str], name: str) -> list[str]:
    """Return the others in a ring that begins after `name`: each instance gets different neighbours."""
    at = names.index(name)
    return names[at + 1 :] + names[:at]
