"""Sample job files, shipped as data: `names()` lists them, `text(name)` returns one with its comments.

`laptop` and `quickstart` run as they are, `own-machines` once its hosts are set, the others once
their roles and buckets are.
"""

from __future__ import annotations

from importlib import resources

ALIASES = {"local": "laptop", "ssh": "own-machines"}
"""Other names of templates, as `infra` has them."""


def names() -> list[str]:
    """Return the names of all templates, those first that need no cloud."""
    files = resources.files(__name__).iterdir()
    found = sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))
    return sorted(found, key=needs_cloud)


def needs_cloud(name: str) -> bool:
    """Whether the template's machines are bought from a cloud."""
    return ALIASES.get(name, name) not in (*ALIASES.values(), "quickstart")


def text(name: str) -> str:
    """Return the template `name` as YAML. Raises `KeyError` where there is no such template."""
    name = ALIASES.get(name, name)
    files = resources.files(__name__)
    if name not in (file.name.removesuffix(".yaml") for file in files.iterdir()):
        raise KeyError(name)
    return files.joinpath(f"{name}.yaml").read_text(encoding="utf-8")


def summary(name: str) -> str:
    """Return the template's first line as a sentence."""
    return text(name).partition("\n")[0].removeprefix("# ")
