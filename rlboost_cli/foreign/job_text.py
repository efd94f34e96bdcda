"""Writes a job file from a foreign configuration; its machines and budget are those of a template.

Guarantee: what the file does not express is in its last lines, one comment for each option.
"""

from __future__ import annotations

from pathlib import Path

import rlboost_templates
from rlboost_cli.foreign.mapping import FieldLine, NotTaken, Translation, as_yaml, run_name, shown, translate
from rlboost_cli.foreign.reading import read_foreign
from rlboost_cli.foreign.trl import TRL
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import Algorithm

TEMPLATE = "multi-cloud"
"""Where a translated job runs unless another template is asked for."""
_MACHINES = "# --- where -"
_YOURS = {
    "model": FieldLine("Qwen/Qwen3-8B", "yours to write"),
    "data": FieldLine({"source": "prompts.jsonl"}, "yours to write"),
    "reward": FieldLine("math", "yours to write: rewards.py:score"),
    "algorithm.steps": FieldLine(200, "yours to write: epochs x number of prompts / prompts_per_step"),
}


def translated_job(path: Path, template: str, devices: int | None) -> tuple[str, list[NotTaken]]:
    """Return the job file's text, and what it does not express.

    `devices`: GPUs over which TRL trained. Raises `ConfigError`.
    """
    foreign = read_foreign(path)
    given = dict(foreign.options)
    if devices is not None:
        if foreign.framework is not TRL:
            raise ConfigError(
                f"--devices is for TRL, but {path} is of {foreign.framework.name}", "leave it out"
            )
        given["num_processes"] = devices
    found = translate(foreign.framework, given, foreign.unknown)
    if foreign.framework is TRL and "num_processes" not in given:
        found.not_taken.insert(0, NotTaken("num_processes", 1, "1 device is assumed: say --devices N"))
    return _text(path, found, machines_of(template)), found.not_taken


def machines_of(template: str) -> str:
    """Return the part of a template that says where a job runs. Raises `ConfigError`."""
    begin = (text := rlboost_templates.text(template)).find(_MACHINES)
    if begin < 0:
        raise ConfigError(f"template {template} has no machines to take", f"write --template {TEMPLATE}")
    return text[begin:]


def _text(path: Path, found: Translation, machines: str) -> str:
    name = FieldLine(
        run_name(path.stem if path.stem != "rl" else path.absolute().parent.name), "the file's name"
    )
    fields = {"name": name if name.value is not ... else FieldLine("my-run", "yours to write")} | _YOURS
    fields |= found.fields
    algorithm = {name: line for name, line in fields.items() if name.startswith("algorithm.")}
    order = [f"algorithm.{name}" for name in Algorithm.model_fields]
    tracking = {name: line for name, line in fields.items() if name.startswith("tracking.")}
    lines = [
        f"# Translated from {path.name} ({found.framework.name}). What it does not express is at the end.",
        "# `rlboost check FILE` reports mistakes, docs/coming-from.md the whole table of options.",
        "",
        *(_line(name, fields[name]) for name in ("name", "model")),
        *_sources(fields["data"]),
        _line("reward", fields["reward"]),
        "",
        "algorithm:",
        *(_line(name, algorithm[name]) for name in order if name in algorithm),
        "",
    ]
    if "evaluation" in fields:
        lines += [_line("evaluation", fields["evaluation"]), ""]
    if tracking:
        lines += ["tracking:", *(_line(name, line) for name, line in tracking.items()), ""]
    listed = [f"#   {described(each)}" for each in found.not_taken]
    end = ["", f"# Not in this file, of {path.name}:", *listed] if listed else []
    return "\n".join([*lines, machines.rstrip("\n"), *end]) + "\n"


def _line(path: str, line: FieldLine) -> str:
    section, _, name = path.rpartition(".")
    text = f"{'  ' if section else ''}{name}: {as_yaml(line.value)}"
    return f"{text:<36} # {line.comment}"


def _sources(line: FieldLine) -> list[str]:
    if not isinstance(line.value, list):
        return [_line("data", line)]
    return [f"{'data:':<36} # {line.comment}", *(f"  - {as_yaml(source)}" for source in line.value)]


def described(left: NotTaken) -> str:
    """Return option, value and reason."""
    value = "" if left.value is ... else f" = {shown(left.value)}"
    return f"{left.option}{value}: {left.reason}"


def summary(not_taken: list[NotTaken]) -> list[str]:
    """Return what to say of the options that are not in the job file."""
    if not not_taken:
        return ["every option is in the job file"]
    options = "option is" if len(not_taken) == 1 else "options are"
    return [f"{len(not_taken)} {options} not in the job file, or not exactly:", *map(_indented, not_taken)]


def _indented(left: NotTaken) -> str:
    return f"  {described(left)}"
