"""Writes the pages of docs/ that follow from the code; `--check` fails where one is out of date."""

from __future__ import annotations

import sys
from pathlib import Path

import rlboost_templates
from rlboost_runtime.job.file.load import FieldDoc, describe_fields

DOCS = Path(__file__).resolve().parent
INTRODUCTION = """\
A job is one YAML 1.2 file. It is checked strictly before anything starts: `rlboost check JOB` lists every
mistake as `file:line: field: what was found; what to do` and exits with 2. File names are relative to the
job file and must lie below its folder, because a run keeps copies of them; a model folder may be anywhere. In
YAML 1.2 `yes` is text (write `true`), `8.0` is no whole number, and quotes make text of a number."""
ABOUT = {
    "": "The whole file. Fields without a default must be given.",
    "model": "With `{init: tiny}` instead of a folder.",
    "data": "Either `source` with its fields, or `reasoning_gym` with its fields.",
    "reward": "With `{http: URL}` instead of a function.",
    "rollout.spot.any_of[]": "One entry per kind of machine.",
}


def job_file_page() -> str:
    """Return docs/job-file.md."""
    fields = describe_fields()
    sections = dict.fromkeys(_section(field) for field in fields)
    parts = [
        "# The job file",
        "<!-- Written by docs/generate.py from runtime/rlboost_runtime/job/: do not edit. -->",
        INTRODUCTION,
        "## An example",
        f"```yaml\n{rlboost_templates.text('laptop').rstrip()}\n```",
        "## Fields",
    ]
    for section in sections:
        parts += _section_parts(section, [field for field in fields if _section(field) == section])
    return "\n\n".join(parts) + "\n"


PAGES = {"job-file.md": job_file_page}


def outdated() -> list[str]:
    """Return the names of the pages that differ from what would be written."""
    return [
        name
        for name, page in PAGES.items()
        if not (DOCS / name).exists() or (DOCS / name).read_text(encoding="utf-8") != page()
    ]


def main(arguments: list[str]) -> int:
    """Write all pages, or with `--check` say which are out of date; return the exit code."""
    if arguments == ["--check"]:
        stale = outdated()
        for name in stale:
            print(f"docs/{name} is out of date; run `make docs`", file=sys.stderr)
        return 1 if stale else 0
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
        print(f"docs/{name}")
    return 0


def _section(field: FieldDoc) -> str:
    return field.path.rpartition(".")[0]


def _section_parts(section: str, fields: list[FieldDoc]) -> list[str]:
    rows = [
        f"| `{field.path.rpartition('.')[2]}` | {field.type} | {_code(field.default)} | {_cell(field.doc)} |"
        for field in fields
    ]
    heading = f"### `{section}`" if section else "### Top level"
    table = "\n".join(["| field | value | default | meaning |", "|---|---|---|---|", *rows])
    about = ABOUT.get(section)
    return [heading, about, table] if about else [heading, table]


def _code(default: str) -> str:
    return default if default in {"", "required", "on", "off"} else f"`{default}`"


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
