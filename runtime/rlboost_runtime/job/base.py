"""The base of every section of a job: strict, immutable, each field with a docstring of its own."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""A seed that every generator takes, torch's too."""


MAX_USD = 1_000_000_000
"""Largest amount or rate: books count whole micro-dollars in 64 bits."""
_PORT = r"([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
Host = Annotated[
    str, Field(pattern=rf"^([^@\s:-][^@\s:]*@)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_][A-Za-z0-9_.-]*)(:{_PORT})?$")
]
"""USER@HOST, USER@HOST:PORT, or a name from ~/.ssh/config; an IPv6 address in brackets."""


class Model(BaseModel):
    """Strict, immutable base: unknown keys and wrong types are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
