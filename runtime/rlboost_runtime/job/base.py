"""The base of every section of a job: strict, immutable, each field with a docstring of its own."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from rlboost_providers.base.traits import cloud_traits

Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""A seed that every generator takes, torch's too."""


def check_zone(infra: str) -> str:
    """Return `infra`. Raises `ValueError` for a zone that is not in the region before it, where the cloud's
    names tell."""
    cloud, region, zone = (*infra.split("/"), "", "")[:3]
    traits = cloud_traits(cloud)
    pattern = traits.zone_pattern
    if zone and pattern is not None and not re.fullmatch(re.escape(region) + pattern, zone):
        raise ValueError(
            f"infra {infra} names a zone that is not in {region}; write"
            f" {cloud}/{region}/{region}{traits.first_zone}, or {cloud}/{region} for all its zones"
        )
    return infra


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
