"""Whether the regions and GPUs that a job names exist, as far as the lists of this version know.

A name that can only be a misspelling is a mistake. One that may be newer than the lists (a region made of a
cloud's usual words, a GPU unlike any known) and a cloud without a list are hints: nobody should have to wait
for a release to use a new region.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import NamedTuple

from rlboost_providers.base.accelerators import KNOWN_ACCELERATORS
from rlboost_providers.base.traits import cloud_traits
from rlboost_runtime.job import CloudOffer, Job
from rlboost_runtime.job.file.tree import FieldPath, Mistake, dotted

_NEAR = 0.8
"""Likeness from which a GPU's name is taken for a misspelling: H1000 is as near to H100, H300 is not."""


class _Doubt(NamedTuple):
    path: FieldPath
    problem: str
    is_mistake: bool


def check_places(job: Job) -> list[Mistake]:
    """Return the regions and GPUs that do not exist."""
    return [Mistake(doubt.path, doubt.problem) for doubt in _doubts(job) if doubt.is_mistake]


def place_hints(job: Job) -> list[str]:
    """Return a sentence for each region and GPU of which it is not known whether it exists."""
    doubts = (doubt for doubt in _doubts(job) if not doubt.is_mistake)
    return [f"{dotted(doubt.path)}: {doubt.problem}" for doubt in doubts]


def _doubts(job: Job) -> Iterator[_Doubt]:
    named: list[tuple[FieldPath, str, str | None]] = []
    if job.trainer.is_bought:
        named.append((("trainer",), job.trainer.infra, job.trainer.accelerators))
    named += [
        (("rollout", "spot", "any_of", number), offer.infra, offer.accelerators)
        for number, offer in enumerate(job.rollout.spot.any_of)
        if isinstance(offer, CloudOffer)
    ]
    for path, infra, accelerators in named:
        yield from _of_region((*path, "infra"), infra)
        yield from _of_accelerator((*path, "accelerators"), accelerators)


def _of_region(path: FieldPath, infra: str) -> Iterator[_Doubt]:
    cloud, region, *_ = [*infra.split("/"), ""]
    known = cloud_traits(cloud).regions
    if not region or region in known:
        return
    if not known:
        yield _Doubt(path, f"the regions of {cloud} are not listed in this version: not checked", False)
        return
    near = difflib.get_close_matches(region.lower(), known, n=3, cutoff=0.6)
    near.sort(key=lambda each: sorted(each) != sorted(region))  # swapped letters before others
    hint = f"did you mean {_or(near)}?" if near else f"write one such as {known[0]}"
    words = {word for each in known for word in _words(each)}
    if set(_words(region)) <= words:
        yield _Doubt(path, f"{cloud} has no region {region} that this version knows; {hint}", False)
    else:
        yield _Doubt(path, f"{cloud} has no region {region}; {hint}", True)


def _of_accelerator(path: FieldPath, accelerators: str | None) -> Iterator[_Doubt]:
    name = (accelerators or "").partition(":")[0]
    known = {each.lower(): each for each in KNOWN_ACCELERATORS}
    if not name or name.lower() in known or name.lower().startswith("tpu-"):
        return
    near = [known[each] for each in difflib.get_close_matches(name.lower(), known, n=3, cutoff=_NEAR)]
    if near:
        yield _Doubt(path, f"no GPU is called {name}; did you mean {_or(near)}?", True)
    else:
        yield _Doubt(path, f"{name} is no GPU that this version knows: not checked", False)


def _words(region: str) -> list[str]:
    """Return the parts of a region's name, every number as 0: `us-east-2` is us, east, 0."""
    return ["".join("0" if c.isdigit() else c for c in part).replace("00", "0") for part in region.split("-")]


def _or(names: list[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
