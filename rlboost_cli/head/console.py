"""What a machine said while it booted, where nobody could ask it, for the error that tells so."""

from __future__ import annotations

from rlboost_providers.base import Provider
from rlboost_providers.tags import head_of
from rlboost_runtime.coordinator.consoles import keep_console
from rlboost_runtime.run_folder import RunFolder

_SHOWN_LINES = 15
_LONGEST_LINE = 200


def last_words(provider: Provider, run: RunFolder, machine: str) -> str:
    """Return the end of the machine's console, to be put behind an error; all of it lies in the run's logs
    then. Empty where its cloud shows none. Raises nothing."""
    found = keep_console(provider, head_of(run.name), machine, run.logs / "machines" / machine)
    if found is None:
        return ""
    if found.refusal:
        return f"; its console cannot be read: {found.refusal}"
    if not found.lines:
        return "; its console is empty yet"
    shown = "\n".join(f"  {line[:_LONGEST_LINE]}" for line in found.lines[-_SHOWN_LINES:])
    return f"; its console ({found.log}) ends with:\n{shown}"
