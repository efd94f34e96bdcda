"""Sample job files, shipped as data: `names()` lists them, `text(name)` returns one with its comments;
`shipped(path)` returns what lies beside them: scripts, pinned versions, policies.

`laptop`, `quickstart` and `serve` run as they are, `own-machines` once its hosts are set, the others once
their roles and buckets are. `recipes/` has those of papers and other frameworks.
"""

from __future__ import annotations

from importlib import resources

ALIASES = {"local": "laptop", "ssh": "own-machines"}
"""Other names of templates, as `infra` has them."""


def names() -> list[str]:
    """Return the names of all templates but the recipes, those first that need no cloud."""
    return sorted(_found("."), key=needs_cloud)


def recipes() -> list[str]:
    """Return the names of the recipes: whole jobs of papers and other frameworks, each with its source."""
    return _found("recipes")


def needs_cloud(name: str) -> bool:
    """Whether the template's machines are bought from a cloud."""
    return ALIASES.get(name, name) not in (*ALIASES.values(), "quickstart", "serve")


def text(name: str) -> str:
    """Return the template or recipe `name` as YAML. Raises `KeyError` where there is none."""
    name = ALIASES.get(name, name)
    for folder in (".", "recipes"):
        if name in _found(folder):
            return shipped(f"{folder}/{name}.yaml")
    raise KeyError(name)


def shipped(path: str) -> str:
    """Return a file that lies beside the job files, such as `startup/worker.sh`, as it is."""
    return resources.files(__name__).joinpath(path).read_text(encoding="utf-8")


def summary(name: str) -> str:
    """Return the template's first line as a sentence."""
    return text(name).partition("\n")[0].removeprefix("# ")


def _found(folder: str) -> list[str]:
    files = resources.files(__name__).joinpath(folder).iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))
