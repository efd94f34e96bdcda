"""Writing a job file, and what to say then.

Guarantee: a file that is there is replaced only when asked for, and whole.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import rlboost_templates
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.run.folder import write_atomically

DEFAULT_NAME = "job.yaml"


def write_job(path: Path, text: str, *, force: bool) -> Path:
    """Write `text` to `path` (in a folder: as job.yaml) and return the file. Raises `ConfigError` for a file
    that is there without `force`, and a place that cannot be written."""
    data = text.encode()
    target = path / DEFAULT_NAME if path.is_dir() else path
    try:
        if force:
            write_atomically(target, data, mode=0o644)
        else:
            with target.open("xb") as file:
                file.write(data)
    except FileExistsError:
        raise ConfigError(
            f"{target} already exists; nothing was written",
            "add --force to replace it, or give another path",
        ) from None
    except OSError as exc:
        raise ConfigError(
            f"{target} cannot be written: {exc.strerror}", "give a path in a folder that you may write to"
        ) from exc
    return target


def template_text(name: str) -> str:
    """Return a template. Raises `ConfigError`, naming those that there are."""
    try:
        return rlboost_templates.text(name)
    except KeyError:
        known = [*rlboost_templates.names(), *rlboost_templates.recipes()]
        close = difflib.get_close_matches(name, [*known, *rlboost_templates.ALIASES], n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
        raise ConfigError(f"no template {name}", hint) from None


def template_rows() -> list[tuple[str, str]]:
    """Return name and summary of every template and recipe."""
    names = [*rlboost_templates.names(), *rlboost_templates.recipes()]
    return [(name, rlboost_templates.summary(name)) for name in names]


def closing_words(path: Path, template: str) -> list[str]:
    """Return what to edit in the new file, and what to type next."""
    if template == "serve":
        return [
            f"wrote {path}",
            "  edit   name, model, machines and budget; it also runs as it is",
            f"  type   rlboost plan {path}     what it costs at several loads",
            f"         rlboost serve {path}    serve it; Ctrl-C only detaches",
        ]
    if rlboost_templates.needs_cloud(template):
        return [
            f"wrote {path}",
            "  edit   name, model, data, reward, role, output, budget and, where you like, infra",
            f"  type   rlboost doctor {path}    credentials, prices, model, data and reward",
            f"         rlboost plan {path}      what it may cost",
            f"         rlboost launch {path}    rents the head, runs there without this machine",
        ]
    if rlboost_templates.ALIASES.get(template, template) not in ("laptop", "quickstart"):
        return [
            f"wrote {path}",
            "  edit   name, model, data, reward, both hosts fields and budget",
            f"  type   rlboost check {path}     every mistake, by line",
            f"         rlboost launch {path}    starts it on its machines and watches it",
        ]
    return [
        f"wrote {path}",
        "  edit   name, data and reward; it also runs as it is",
        f"  type   rlboost doctor {path}    can this machine run it?",
        f"         rlboost launch {path}    run and watch it; Ctrl-C only detaches",
    ]
