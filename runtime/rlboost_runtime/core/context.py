"""What the parts of a core share: the time, the tunables, deadlines, counters and the commands of this
event."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlboost_runtime.core.counters import Counters
from rlboost_runtime.core.messages import Command, CoreConfig
from rlboost_runtime.core.timers import Timers


@dataclass(slots=True)
class Context:
    """Shared by reference; only `Core.handle` sets `now` and takes `commands`."""

    now: float = 0.0
    config: CoreConfig = field(default_factory=lambda: CoreConfig(max_spot_instances=0, reserved_instances=0))
    is_ending: bool = False
    timers: Timers = field(default_factory=Timers)
    counters: Counters = field(default_factory=Counters)
    commands: list[Command] = field(default_factory=list)

    def emit(self, command: Command) -> None:
        """Ask the shell for something."""
        self.commands.append(command)
