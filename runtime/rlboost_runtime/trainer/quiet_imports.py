"""Libraries that are imported without what Python says of their sources, which it compiles meanwhile."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType


def import_reasoning_gym() -> ModuleType:
    """Return reasoning-gym, whose import takes seconds.

    Where its installer compiled nothing (uv), the first import does, with warnings of a dependency's syntax.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        return importlib.import_module("reasoning_gym")
