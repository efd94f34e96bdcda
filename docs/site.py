"""Which files the site has; a hook of MkDocs (mkdocs.yml).

Pages keep their places in the repository, so that one link serves both, and MkDocs checks all of them.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import rlboost

ROOT = Path(__file__).resolve().parents[1]
SHOWN = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"),
    *("docs/*.md", "docs/*.json", "docs/screens/*", "docs/vendor/*", "examples/**/*"),
    "templates/rlboost_templates/recipes/*.yaml",
    *(f"benchmarks/**/*.{kind}" for kind in ("md", "svg", "json")),
)
FIRST = ("launch", "runs", "Run", "Outcome", "Status", "CostReport")
"""Of the Python package; its errors follow."""


def api_page() -> str:
    """Return the page of the Python package, with what it exports."""
    names = [*FIRST, *(name for name in rlboost.__all__ if name not in FIRST)]
    intro = "# Python\n\n[Python and notebooks](python.md) shows these at work.\n\n"
    return intro + "\n\n".join(f"::: rlboost.{name}" for name in names) + "\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the files of the site, with the page of the Python package, in place of those of docs/."""
    own = {file.src_uri for file in files if not str(file.abs_src_path).startswith(str(ROOT / "docs"))}
    found = Files([file for file in files if file.src_uri in own])  # of the theme and the plugins
    for path in sorted({each for pattern in SHOWN for each in ROOT.glob(pattern) if each.is_file()}):
        if "__pycache__" not in path.parts:
            name = path.relative_to(ROOT).as_posix()
            found.append(File.generated(config, name, abs_src_path=str(path)))
    found.append(File.generated(config, "docs/python-api.md", content=api_page()))
    return found
