"""What a machine said that never came to speak for itself: its serial console, as its cloud keeps it.

Guarantee: whatever the cloud says or refuses here, nothing is raised: whoever asks has something else to do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from rlboost_providers.base import CanShowConsole, Provider
from rlboost_runtime.errors import RLBoostError

_UNPRINTED = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[^\t\n -~\u00a0-\uffff]")
"""Colours, cursor moves and other control characters."""


@dataclass(frozen=True, slots=True)
class Console:
    """What a machine's console has: `lines`, all of which lie in `log`; or why it cannot be read."""

    lines: tuple[str, ...]
    log: Path
    refusal: str = ""


def keep_console(provider: Provider, run: str, machine: str, folder: Path) -> Console | None:
    """Fetch the end of a machine's console into `folder`/console.log; None where its cloud keeps none.

    Blocks for a second, or as long as the cloud's calls are waited for. An empty one leaves no file.
    """
    if not isinstance(provider, CanShowConsole):
        return None
    log = folder / "console.log"
    try:
        text = _UNPRINTED.sub("", provider.console(run, machine).replace("\r", "\n"))
        lines = tuple(line.rstrip() for line in text.splitlines() if line.strip())
        if lines:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            log.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except RLBoostError as refusal:
        return Console((), log, refusal.problem)
    except OSError as refusal:
        return Console((), log, str(refusal))
    return Console(lines, log)
