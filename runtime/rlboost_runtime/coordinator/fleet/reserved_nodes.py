"""The trainer's further nodes: one machine each beside the head, bought again when it is lost.

A pure value: `FleetController` carries out what `due` returns and reports what became of it.

Guarantees: a node has one machine at a time; a machine that is gone is followed by one of another name; a
machine that nothing was heard of for `JOIN_S` after its launch, or for `SILENT_S` later, is ended; a launch
that was refused, or whose outcome is unknown, is repeated under the same name, so that it is never two. A
node whose engines are away for at most `AWAY_S`, as after a restart of an agent or the coordinator, is there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from rlboost_runtime.core.base.messages import LaunchMachine, TerminateMachine
from rlboost_runtime.run.reserved import RESERVED_MACHINE, node_machine, node_of

JOIN_S = 1500.0
"""Longest time from a node's launch until its engines dial in: it may have to fetch torch and vLLM first."""
SILENT_S = 120.0
"""How long a node may be silent that has dialled in: above what an agent's restart takes."""
AWAY_S = 20.0
"""How long a node's engines may be away until the trainer no longer counts on the node."""
AGAIN_S = 10.0
"""Pause between two requests to end a machine, until it is gone."""


@dataclass(slots=True)
class _Node:
    """Times on the run's clock, in seconds."""

    life: int = 1
    launched_at: float | None = None
    """When its machine was launched; None: it is to be."""
    heard_at: float | None = None
    """When one of its engines was last connected."""
    next_at: float = 0.0
    """No earlier request to launch, or to end."""
    problem: str = ""
    """Why it could not be launched the last time."""


class ReservedNodes:
    """The machines of nodes 1 to `num_nodes`."""

    def __init__(
        self,
        num_nodes: int,
        known: Iterable[str] = (),
        open_machines: Collection[str] = (),
        now: float = 0.0,
        joined: Collection[str] = (),
    ) -> None:
        """`known`: all machines that the books have; those of them that are `open_machines` may be there.
        `joined`: those that were there when this was last noted."""
        self._nodes = {number: _Node() for number in range(1, num_nodes + 1)}
        for machine in known:
            self._recall(machine, machine in open_machines, now)
        for machine in joined:
            if (node := self._node(machine)) is not None and node.launched_at is not None:
                node.heard_at = now

    def _recall(self, machine: str, is_open: bool, now: float) -> None:
        found = node_of(machine)
        if found is None or found[0] not in self._nodes:
            return
        number, life = found
        node = self._nodes[number]
        if life >= node.life:
            self._nodes[number] = _Node(life if is_open else life + 1, now if is_open else None)

    def __contains__(self, machine: object) -> bool:
        """True for the head and the present machine of each node."""
        return machine == RESERVED_MACHINE or (isinstance(machine, str) and self._node(machine) is not None)

    @property
    def machines(self) -> list[str]:
        """The present machine of each node, launched or not, in the nodes' order."""
        return [node_machine(number, node.life) for number, node in self._nodes.items()]

    @property
    def launched(self) -> list[str]:
        """Those of `machines` that were launched."""
        return [node_machine(n, node.life) for n, node in self._nodes.items() if node.launched_at is not None]

    def there(self, now: float) -> list[str]:
        """Those of `machines` whose engines dialled in and were not away for `AWAY_S` since."""
        return [
            node_machine(number, node.life)
            for number, node in self._nodes.items()
            if node.heard_at is not None and now - node.heard_at <= AWAY_S
        ]

    def due(self, now: float, joined: Collection[str]) -> list[LaunchMachine | TerminateMachine]:
        """Return what to launch and end. `joined`: machines with an engine that is connected."""
        commands: list[LaunchMachine | TerminateMachine] = []
        for number, node in self._nodes.items():
            machine = node_machine(number, node.life)
            if machine in joined:
                node.heard_at = now
            if now < node.next_at:
                continue
            if node.launched_at is None:
                node.next_at = now + AGAIN_S
                commands.append(LaunchMachine(machine))
            elif reason := _why_given_up(node, now):
                node.next_at = now + AGAIN_S
                commands.append(TerminateMachine(machine, reason))
        return commands

    def came(self, machine: str, now: float) -> None:
        """The machine was launched."""
        node = self._node(machine)
        if node is not None and node.launched_at is None:
            node.launched_at, node.next_at = now, 0.0

    def failed(self, machine: str, next_at: float, problem: str) -> bool:
        """The launch failed; it is repeated at `next_at`. Returns True where the problem is a new one."""
        node = self._node(machine)
        if node is None or node.launched_at is not None:
            return False
        is_new, node.problem, node.next_at = problem != node.problem, problem, next_at
        return is_new

    def gone(self, machine: str) -> None:
        """The machine is gone: another one follows."""
        node, found = self._node(machine), node_of(machine)
        if node is not None and found is not None:
            self._nodes[found[0]] = _Node(node.life + 1)

    def _node(self, machine: str) -> _Node | None:
        found = node_of(machine)
        node = None if found is None else self._nodes.get(found[0])
        return node if node is not None and found is not None and node.life == found[1] else None


def _why_given_up(node: _Node, now: float) -> str:
    """Return why the node's machine is to be ended; empty: it is not."""
    if node.launched_at is None:
        return ""
    if node.heard_at is None:
        late_s = now - node.launched_at
        return f"its engines did not dial in within {JOIN_S:.0f} s" if late_s > JOIN_S else ""
    return f"silent for {SILENT_S:.0f} s" if now - node.heard_at > SILENT_S else ""
