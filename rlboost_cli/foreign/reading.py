"""Reads configuration files of other frameworks, and recognises whose they are."""

from __future__ import annotations

import ast
import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from rlboost_cli.foreign.mapping import Framework
from rlboost_cli.foreign.openrlhf import OPENRLHF, PROGRAM
from rlboost_cli.foreign.prime_rl import PRIME_RL
from rlboost_cli.foreign.shell import ScriptOptions, read_script
from rlboost_cli.foreign.trl import TRL
from rlboost_cli.foreign.verl import VERL
from rlboost_runtime.errors import ConfigError

FRAMEWORKS = (VERL, TRL, PRIME_RL, OPENRLHF)
_WHOLE = {"lr_scheduler_kwargs", "chat_template_kwargs", "data.apply_chat_template_kwargs"}
"""Options whose value is a section."""
_WORDS = {"true": True, "false": False, "null": None, "none": None}


@dataclass(frozen=True, slots=True)
class ForeignFile:
    """A file's options by dotted names, and those whose values it does not hold."""

    framework: Framework
    options: dict[str, Any]
    unknown: dict[str, str] = field(default_factory=dict)
    """Options without a value, and what it depends on."""


def read_foreign(path: Path, environment: Mapping[str, str] = os.environ) -> ForeignFile:
    """Return the options of `path`; `environment` is what a shell script would see. Raises `ConfigError`."""
    try:
        text = path.read_text(encoding="utf-8")
        found = _read(path, text, environment)
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} cannot be read: {exc}", "give a configuration file") from exc
    except (YAMLError, tomllib.TOMLDecodeError, json.JSONDecodeError) as exc:
        line = " ".join(str(exc).split())
        raise ConfigError(
            f"{path} is no {path.suffix.removeprefix('.')}: {line}", "correct the file"
        ) from exc
    if not found.options and not found.unknown:
        raise ConfigError(
            f"{path} has no options of veRL, TRL, prime-rl or OpenRLHF",
            "give veRL's YAML or script with a.b=value, TRL's arguments as YAML or JSON, prime-rl's TOML,"
            f" or a script that runs OpenRLHF's {PROGRAM}",
        )
    return found


def _read(path: Path, text: str, environment: Mapping[str, str]) -> ForeignFile:
    match path.suffix:
        case ".toml":
            return ForeignFile(PRIME_RL, _flat(tomllib.loads(text)))
        case ".json":
            data = json.loads(text)
        case ".yaml" | ".yml":
            data = YAML(typ="safe").load(text)
        case _:
            script = read_script(text, environment)
            unknown = {name: f"depends on {reason}" for name, reason in script.open.items()}
            if script.program:
                return ForeignFile(OPENRLHF, _flags(path, script), unknown)
            values = {name: _value(raw) for name, raw in script.options.items()}
            return ForeignFile(VERL, _without_interpolations(values), unknown if values else {})
    options = _flat(data) if isinstance(data, dict) else {}
    if any(name.partition(".")[0] in ("actor_rollout_ref", "data", "algorithm") for name in options):
        return ForeignFile(VERL, _without_interpolations(options))
    known = {*TRL.defaults, *TRL.renamed}
    return ForeignFile(TRL, options if known & set(options) else {})


def _flags(path: Path, script: ScriptOptions) -> dict[str, Any]:
    """Return the options of OpenRLHF's trainer; those with several values are lists."""
    if script.program != PROGRAM:
        raise ConfigError(
            f"{path} runs OpenRLHF's {script.program}, and only {PROGRAM} is translated",
            "SFT, rejection sampling and online DPO are in docs/stages.md",
        )
    found: dict[str, Any] = {}
    for name, words in script.flags.items():
        if name not in script.open:
            values = [_value(word) for word in words]
            found[name] = True if not values else values[0] if len(values) == 1 else values
    return found


def _flat(data: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return the leaves of `data` by their dotted names; lists of sections are numbered."""
    return dict(_leaves(data, before))


def _leaves(data: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(data, dict) and (data or not name) and name not in _WHOLE:
        for key, value in data.items():
            yield from _leaves(value, f"{name}.{key}" if name else str(key))
    elif isinstance(data, list) and data and isinstance(data[0], dict):
        for number, value in enumerate(data):
            yield from _leaves(value, f"{name}.{number}")
    else:
        yield name, data


def _without_interpolations(options: dict[str, Any]) -> dict[str, Any]:
    """Leave out what Hydra would fill in from other options, and its own notes."""
    return {
        name: value
        for name, value in options.items()
        if not (isinstance(value, str) and value.startswith("${")) and not name.endswith("._target_")
    }


def _value(raw: str) -> Any:
    """Return what Hydra would make of a value on a command line."""
    text = raw.strip()
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        pass
    if text.startswith("[") and text.endswith("]"):
        return [_value(part) for part in text[1:-1].split(",") if part.strip()]
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text
