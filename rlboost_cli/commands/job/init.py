"""`rlboost init`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def _templates(incomplete: str) -> list[tuple[str, str]]:
    """Return what the shell offers for --template."""
    from rlboost_cli.runs.new_job import template_rows

    return [row for row in template_rows() if row[0].startswith(incomplete)]


def init(
    path: Annotated[Path, typer.Argument(help="The file to write, or a folder for it")] = Path("job.yaml"),
    template: Annotated[
        str, typer.Option("--template", help="Which one; --list shows them", autocompletion=_templates)
    ] = "laptop",
    list_templates: Annotated[
        bool, typer.Option("--list", help="List the templates and write nothing")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there")] = False,
) -> None:
    """Write a commented job file to start from

    Example: rlboost init job.yaml --template laptop
    """
    from rlboost_cli.runs import new_job
    from rlboost_cli.terminal import output, text

    if list_templates:
        output.show(text.table(("template", "what it is"), new_job.template_rows()))
        return
    written = new_job.write_job(path, template, force=force)
    for line in new_job.closing_words(written, template):
        output.progress(line)
