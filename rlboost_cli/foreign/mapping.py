"""Tables that map the options of another framework to fields of a job file, and what applies them.

Guarantees: every option of a file that a rule reads becomes a line of the job file; what does not and differs
from its framework's default is listed with a reason. A default of the framework that differs from ours is a
line as well, so that the job means the same.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import BaseModel

from rlboost_runtime.job import Algorithm, Job

Options = Mapping[str, Any]
"""Options by their dotted names, values as YAML has them."""


_PLAIN = re.compile(r"[A-Za-z_/.][\w./:@+-]*")
_WORDS = {"true", "false", "null"}


class Untranslatable(Exception):
    """A value that no field can express; the text says why."""


class NotTaken(NamedTuple):
    """An option that is not in the job file, or not exactly."""

    option: str
    value: Any
    reason: str


class FieldLine(NamedTuple):
    """A field of the job file."""

    value: Any
    comment: str
    """Where the value comes from."""
    options: tuple[str, ...] = ()
    """The options that set it."""


@dataclass(frozen=True, slots=True)
class OptionRule:
    """How options become a field."""

    field: str
    """Its path in the job file."""
    options: tuple[str, ...]
    """The options that it reads, the most important first."""
    value: Callable[[OptionReader], Any] | None = None
    """None: the first option's value as it is. It returns `...` where the field stays away."""
    note: str = ""
    """How the value is made, for the page."""
    unset: str = ""
    """The comment where the file sets none of the options; empty: that it is the framework's default."""


@dataclass(frozen=True, slots=True)
class Framework:
    """The table of one framework."""

    name: str
    rules: tuple[OptionRule, ...]
    defaults: Options
    """The framework's own defaults, of every option that a rule reads."""
    elsewhere: Mapping[str, str]
    """Options, also as patterns, without a rule: the reason, or where the same thing is set."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Former names of options, and their present ones."""


@dataclass(slots=True)
class Translation:
    """What a job file has of a foreign file."""

    framework: Framework
    fields: dict[str, FieldLine] = field(default_factory=dict)
    not_taken: list[NotTaken] = field(default_factory=list)


class OptionReader:
    """The options of a file, those that it does not set with their defaults."""

    def __init__(self, framework: Framework, given: Options, unknown: Mapping[str, str]) -> None:
        self.given = given
        self.unknown = unknown
        self.not_taken: list[NotTaken] = []
        self._defaults = framework.defaults

    def __getitem__(self, option: str) -> Any:  # any YAML value
        if option in self.unknown:
            raise Untranslatable(self.unknown[option])
        return self.given.get(option, self._defaults.get(option))

    def leave(self, option: str, reason: str) -> None:
        """List `option` with `reason`."""
        self.not_taken.append(NotTaken(option, self[option], reason))

    def is_set(self, option: str) -> bool:
        """Whether the file sets the option to something else than its default."""
        return option in self.given and not same(self.given[option], self._defaults.get(option))


def translate(framework: Framework, given: Options, unknown: Mapping[str, str] | None = None) -> Translation:
    """Return the fields and the list of what they do not express.

    `unknown`: options that the file sets to values that it does not hold, and why.
    """
    unknown = unknown or {}
    present = {framework.renamed.get(option, option): option for option in (*given, *unknown)}
    values = {new: given[old] for new, old in present.items() if old in given}
    options = OptionReader(
        framework, values, {new: unknown[old] for new, old in present.items() if old in unknown}
    )
    found = Translation(framework)
    for rule in framework.rules:
        _apply(rule, options, found)
    read = {option for rule in framework.rules for option in rule.options}
    said = {option for line in found.fields.values() for option in line.options}
    said |= {each.option for each in (*options.not_taken, *found.not_taken)}
    for option, value in options.given.items():
        if option not in said and (option not in framework.defaults or options.is_set(option)):
            reason = (
                "has no effect with the other options" if option in read else reason_for(framework, option)
            )
            found.not_taken.append(NotTaken(option, value, reason))
    found.not_taken[:0] = [NotTaken(option, ..., reason) for option, reason in options.unknown.items()]
    by_name = {each.option: each for each in [*options.not_taken, *found.not_taken]}
    found.not_taken = [each._replace(option=present.get(name, name)) for name, each in by_name.items()]
    return found


def reason_for(framework: Framework, option: str) -> str:
    """Return why no rule reads `option`."""
    for pattern, reason in framework.elsewhere.items():
        if fnmatch.fnmatchcase(option, pattern):
            return reason
    return "no counterpart"


def same(one: Any, other: Any) -> bool:  # any YAML values
    """Whether two values mean the same to a framework: 1 is 1.0, but not true."""
    if isinstance(one, bool) != isinstance(other, bool):
        return False
    return bool(one == other)


def _apply(rule: OptionRule, options: OptionReader, found: Translation) -> None:
    sets = [option for option in rule.options if options.is_set(option)]
    num_left = len(options.not_taken)
    try:
        value = options[rule.options[0]] if rule.value is None else rule.value(options)
    except Untranslatable as problem:
        found.not_taken += _each(sets or rule.options[:1], options, str(problem))
        return
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        found.not_taken += _each(sets or rule.options[:1], options, "no value of this option")
        return
    is_silent = not any(option in options.given for option in rule.options)
    if is_silent and num_left == len(options.not_taken) and same(value, our_default(rule.field)):
        return
    if value is not ...:
        comment = f"{found.framework.name}: {_source(rule, options, value)}"
        found.fields[rule.field] = FieldLine(value, comment, tuple(sets))


def _each(names: Iterable[str], options: OptionReader, reason: str) -> list[NotTaken]:
    known = [option for option in names if option not in options.unknown]
    return [NotTaken(option, options[option], reason) for option in known]


def _source(rule: OptionRule, options: OptionReader, value: Any) -> str:  # any YAML value
    given = [option for option in rule.options if option in options.given]
    if not given:
        return rule.unset or f"{rule.options[0]} by default"
    return ", ".join(
        option if same(options[option], value) else f"{option} {shown(options[option])}" for option in given
    )


def our_default(path: str) -> Any:  # any YAML value; None for sections and what must be given
    """Return the default of a field of the job file."""
    model: type[BaseModel] = Job
    *sections, name = path.split(".")
    if sections == ["algorithm"]:
        model = Algorithm
    found = model.model_fields.get(name) if sections in ([], ["algorithm"]) else None
    return None if found is None or found.is_required() else found.default


# --- values -------------------------------------------------------------------------------------------------


def as_yaml(value: Any) -> str:  # any JSON value
    """Return `value` on one line of YAML 1.2."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {as_yaml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(as_yaml(each) for each in value) + "]"
    is_plain = isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS
    return str(value) if is_plain and not str(value).endswith(":") else json.dumps(value, default=str)


def shown(value: Any) -> str:  # any JSON value
    """Return `value` in a few words."""
    text = as_yaml(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- what several tables use --------------------------------------------------------------------------------


def whole(number: float, what: str) -> int:
    """Return a whole number. Raises `Untranslatable`."""
    if number != int(number) or number < 1:
        raise Untranslatable(f"{what} is {number:g}, not a whole number of at least 1")
    return int(number)


def group_size(size: int) -> int:
    """Return `algorithm.group_size`. Raises `Untranslatable`."""
    if size < 2:
        raise Untranslatable("a group needs two responses: write algorithm.group_size")
    return size


def run_name(text: object) -> Any:  # a name, or ... where there is none
    """Return `text` as a run's name: lower-case letters, digits and dashes."""
    spelt = "".join(c if c.isascii() and c.isalnum() else "-" for c in str(text or "").lower())
    return "-".join(part for part in spelt.split("-") if part)[:63].rstrip("-") or ...


def lora(rank: Any, alpha: Any) -> Any:  # YAML values; ... where there are no adapters
    """Return `algorithm.lora`."""
    return {"rank": int(rank), "alpha": int(alpha)} if rank else ...


def schedule(kind: Any, known: Mapping[str, str]) -> str:
    """Return `algorithm.learning_rate_schedule`. Raises `Untranslatable`."""
    if kind not in known:
        raise Untranslatable(f"no such schedule; there are {', '.join(sorted(set(known.values())))}")
    return known[kind]
