"""Sample job files, shipped as data: `names()` lists them, `text(name)` returns one with its comments."""

from __future__ import annotations

from importlib import resources


def names() -> list[str]:
    """Return the names of all templates, sorted."""
    files = resources.files(__name__).iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def text(name: str) -> str:
    """Return the template `name` as YAML. Raises `KeyError` where there is no such template."""
    if name not in names():
        raise KeyError(name)
    return resources.files(__name__).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
