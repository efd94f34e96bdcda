"""Turns what pydantic says about a job into one sentence per mistake: what was found, what to do.

Where a field may have several forms, only the form that the person seems to have meant is talked about,
chosen by the keys that are there.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rlboost_providers.base.traits import known_clouds
from rlboost_runtime.job import Job, Model
from rlboost_runtime.job.file.tree import FieldPath, Mistake, dotted

ABSENT = object()
"""The value of a field that is not there: null is one that is."""

EXAMPLES = {
    "name": "name: my-run",
    "model": "model: {init: tiny}",
    "data": "data: {source: prompts.jsonl}",
    "source": "source: prompts.jsonl",
    "reasoning_gym": "reasoning_gym: [spell_backward]",
    "init": "init: tiny",
    "http": "http: https://HOST/score",
    "infra": "infra: local",
    "webhook": "webhook: ${SLACK_URL}",
    "command": "command: [PROGRAM]",
    "accelerators": 'accelerators: "H100:8"',
    "hosts": "hosts: [ME@MACHINE]",
}
"""What to add where a field without a default is missing."""

FORMS = {
    "name": "lower-case letters, digits and dashes (at most 63), such as my-run",
    "model": "a folder in HF format, a Hugging Face id, or {init: tiny}",
    "data": "{source: FILE}, {dataset: ID}, {reasoning_gym: [NAME, ...]}, or a list of them",
    "data[]": "{source: FILE}, {dataset: ID} or {reasoning_gym: [NAME, ...]}",
    "reward": "FILE.py:FUNCTION, reasoning_gym, math, exact, {http: URL}, or a list of named ones",
    "reward[]": "{name: NAME, python: FILE.py:FUNCTION} or {name: NAME, http: URL}, and a weight",
    "reward[].name": "lower-case letters, digits, - and _ (at most 32), a letter first, such as format",
    "environment": "FILE.py:NAME, {python: FILE.py:NAME}, {command: [...]}, {verifiers: ...}, {openenv: ...}",
    "evaluation": "a section, or a list of sections, each with a name",
    "evaluation[]": "{name: NAME} with source, dataset or reasoning_gym, or without one for held-out prompts",
    "evaluation.name": "lower-case letters, digits, - and _ (at most 32), a letter first, such as aime24",
    "evaluation[].name": "lower-case letters, digits, - and _ (at most 32), a letter first, such as aime24",
    "output": "s3://BUCKET/PREFIX, gs://..., az://..., or a folder by its whole path, such as /mnt/runs",
    "notify[]": "{webhook: URL} or {command: [PROGRAM, ...]}",
    "notify[].webhook": "https://..., or ${NAME} with NAME in secrets",
    "weights.bucket": "s3://BUCKET/PREFIX, gs://... or az://...",
    "trainer.infra": "local, ssh, aws/REGION or gcp/REGION; with via: skypilot also azure, lambda or nebius",
    "trainer.accelerators": "a GPU and how many of them, such as H100:8",
    "trainer.hosts": "exactly one host, such as [ME@MACHINE]",
    "trainer.hosts[]": "USER@HOST, USER@HOST:PORT, or a name from ~/.ssh/config",
    "trainer.address": "a name or an IP address, without scheme and port; or null",
    "trainer.node_address": "HOST:PORT, or null",
    "reward.key_variable": "the name of a variable, such as REWARD_KEY; or null",
    "rollout.spot.any_of[].hosts[]": "USER@HOST, USER@HOST:PORT, or a name from ~/.ssh/config",
    "data.config.": "a number, text, true or false",
    "rollout.spot.any_of[]": "{infra: local, market: ...}, {infra: ssh, hosts: [...]} or"
    " {infra: CLOUD/REGION, accelerators: ...}",
    "rollout.spot.any_of[].infra": "local, ssh, or CLOUD/REGION such as aws/us-east-2",
    "rollout.spot.any_of[].accelerators": "a GPU and how many per machine, such as H100:8",
}
"""What may stand in fields whose types do not say it well."""

YES_NO = {"yes": "true", "on": "true", "true": "true", "no": "false", "off": "false", "false": "false"}

_WITHOUT_HEADS = [name for name, traits in known_clouds().items() if not traits.can_host_head]
NOT_YET_VALUES = {"trainer.infra": rf"({'|'.join(_WITHOUT_HEADS)})(/.*)?", "rollout.engine": r"sglang"}
"""Values of later versions, as patterns."""


def validate(data: Any) -> tuple[Job | None, list[Mistake]]:  # any JSON value
    """Return the job, or None and what is wrong with it."""
    try:
        return Job.model_validate_json(json.dumps(data)), []
    except ValidationError as exc:
        return None, _mistakes(exc.errors(include_url=False), data)


def close_match(word: str, known: list[str]) -> str | None:
    """Return the one of `known` that `word` most likely stands for, if there is any."""
    matches = difflib.get_close_matches(word.lower().replace("-", "_"), known, n=1, cutoff=0.7)
    return matches[0] if matches else None


def shown(value: Any) -> str:  # any JSON value
    """Return `value` as a message shows it: on one line, not too long."""
    if isinstance(value, str):
        return repr(value) if len(value) <= 60 else f"{value[:57]!r}..."
    if isinstance(value, dict | list):
        text = "list" if isinstance(value, list) else "section"
        return f"a {text}" if value else f"an empty {text}"
    return "nothing" if value is None else json.dumps(value).replace("Infinity", "inf").replace("NaN", "nan")


def alternatives(annotation: Any) -> list[Any]:  # any type expression
    """Return the types that `annotation` allows, null left out."""
    if get_origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [each for one in get_args(annotation) if one is not NoneType for each in alternatives(one)]
    return [annotation]


def is_section(annotation: Any) -> bool:  # any type expression
    """Return True if `annotation` is one of our models."""
    return isinstance(annotation, type) and issubclass(annotation, Model)


def sections(model: type[Model] = Job, path: FieldPath = ()) -> Iterator[tuple[FieldPath, type[Model]]]:
    """Yield every section that a job may have with its path, `any_of[]` for an entry of a list."""
    yield path, model
    for name, field in model.model_fields.items():
        for each in alternatives(field.annotation):
            if is_section(each):
                yield from sections(each, (*path, name))
            elif get_origin(each) is list:
                for entry in alternatives(get_args(each)[0]):
                    if is_section(entry) and entry not in alternatives(field.annotation):
                        yield from sections(entry, (*path, f"{name}[]"))


def field_type(pattern: str, field: FieldInfo) -> tuple[str, str]:
    """Return the type and the default of the field at `pattern`, in words."""
    options = alternatives(field.annotation)
    if len(options) == 1 and is_section(options[0]):
        null = NoneType in get_args(field.annotation)
        return ("section, or null", "off" if field.default is None else "on") if null else ("section", "")
    default = "required" if field.is_required() else _plain(field.default)
    return _wanted(field.annotation, field, pattern), default


def _plain(default: Any) -> str:  # any default of a field that is not a section
    if isinstance(default, list):
        default = [{"infra": each.infra} if is_section(type(each)) else each for each in default]
    return default if isinstance(default, str) else json.dumps(default)


@dataclass(slots=True)
class _Place:
    """Where an error points: the field's own path, without the names of forms."""

    path: FieldPath
    value: Any  # any JSON value, or ABSENT
    annotation: Any  # type expression; None for an unknown field
    field: FieldInfo | None = None
    owner: type[Model] | None = None
    is_unclear: bool = False
    """Several forms are possible and the value looks like none of them."""

    @property
    def pattern(self) -> str:
        """The path with every index blanked: the key of the tables above."""
        return re.sub(r"\[\d+\]", "[]", dotted(self.path))


def _mistakes(errors: list[ErrorDetails], data: Any) -> list[Mistake]:  # any JSON value
    found: dict[tuple[FieldPath, str], _Place] = {}
    for error in errors:
        place = _follow(error["loc"], data)
        if place is not None:
            kind = "form_type" if place.is_unclear else error["type"]
            path, problem = _explain(kind, place, error)
            found.setdefault((path, problem), place)
    meant = {(*path[:-1], word) for path, problem in found if (word := _meant(problem))}
    elsewhere = {path[:-1] for path, problem in found if path[-1:] == ("infra",) and "not in this" in problem}
    return [
        Mistake(path, problem)
        for path, problem in found
        if not (problem.startswith("missing") and path in meant)
        and not (path[:-1] in elsewhere and path[-1] != "infra")  # said once, by its infra
    ]


def _meant(problem: str) -> str | None:
    match = re.fullmatch(r"unknown field; did you mean (\w+)\?", problem)
    return match[1] if match else None


def _follow(loc: tuple[int | str, ...], data: Any) -> _Place | None:
    """Return the place of an error; None when it is about a form that was not meant."""
    place = _Place((), data, Job)
    for part in loc:
        options = alternatives(place.annotation)
        if len(options) > 1:  # pydantic puts the form's name here
            chosen = _choose(options, place.value)
            if chosen is None:
                place.is_unclear = True
                return place
            name = r"list\[.*" if get_origin(chosen) is list else chosen.__name__
            if not re.fullmatch(rf"(function-after\[\w+\(\), )*{name}\]*", str(part)):
                return None
            place.annotation = chosen
            continue
        _descend(place, options[0], part)
    return place


def _descend(place: _Place, annotation: Any, part: int | str) -> None:
    place.owner = annotation if is_section(annotation) else None
    if place.owner is not None:
        place.field = place.owner.model_fields.get(str(part))
        place.annotation = place.field.annotation if place.field else None
    else:
        place.field = None
        place.annotation = get_args(annotation)[-1] if get_args(annotation) else None
    place.path = (*place.path, part)
    try:
        place.value = place.value[part]
    except (LookupError, TypeError):
        place.value = ABSENT


def _choose(options: list[Any], value: Any) -> Any:
    """Return the form that `value` was meant to have: None if that cannot be told."""
    if isinstance(value, str):
        return str if str in options else None
    if isinstance(value, list):
        return next((option for option in options if get_origin(option) is list), None)
    if not isinstance(value, dict):
        return None
    models = [option for option in options if is_section(option)]
    models = [model for model in models if _takes_infra(model, value.get("infra"))] or models
    best = max(models, key=lambda model: _num_known(value, model), default=None)
    return best if best is not None and _num_known(value, best) else None


def _takes_infra(model: type[Model], infra: Any) -> bool:  # any JSON value
    """Return True if `infra`, by which kinds of machines differ, is one of the model's."""
    field = model.model_fields.get("infra")
    if field is None or not isinstance(infra, str):
        return False
    known = get_args(field.annotation) if get_origin(field.annotation) is Literal else known_clouds()
    return infra.partition("/")[0] in known


def _num_known(value: dict[str, Any], model: type[Model]) -> int:
    return sum(close_match(key, list(model.model_fields)) is not None for key in value)


def _explain(kind: str, place: _Place, error: ErrorDetails) -> tuple[FieldPath, str]:
    if kind == "missing":
        name = str(place.path[-1])
        return place.path, f"missing; add `{EXAMPLES.get(name, f'{name}: ...')}`"
    if kind == "extra_forbidden":
        return place.path, _unknown(place)
    if kind == "value_error":
        return _disagreement(place, str(error.get("ctx", {}).get("error", error["msg"])))
    allowed = NOT_YET_VALUES.get(place.pattern)
    if allowed and isinstance(place.value, str | int) and re.fullmatch(allowed, str(place.value)):
        wanted = _wanted(place.annotation, place.field, place.pattern)
        return place.path, f"found {place.value}, which is not in this version yet; use {wanted}"
    return place.path, f"found {_found(kind, place.value)}; {_remedy(place)}"


def _unknown(place: _Place) -> str:
    name = str(place.path[-1])
    known = list(place.owner.model_fields) if place.owner else []
    word = name.partition(" ")[0]
    if word != name and word in known:
        return f"a colon is missing after {word}; write {word}: ..."
    if close := close_match(name, known):
        return f"unknown field; did you mean {close}?"
    elsewhere = sorted({dotted((*path, name)) for path, model in sections() if name in model.model_fields})
    if place.pattern in elsewhere:  # of another form of the same section
        section = dotted(place.path[:-1])
        forms = FORMS.get(re.sub(r"\[\d+\]", "[]", section), "one")
        return f"does not go with the other fields of {section}; write either {forms}"
    if 0 < len(elsewhere) <= 3:
        return f"unknown field here; did you mean {' or '.join(elsewhere)}?"
    return f"unknown field; there are {', '.join(known)}"


def _disagreement(place: _Place, problem: str) -> tuple[FieldPath, str]:
    """A validator's sentence starts with the field that it is about."""
    first, _, rest = problem.partition(" ")
    model = place.annotation
    if is_section(model) and first in model.model_fields:
        return (*place.path, first), rest
    return place.path, problem


def _found(kind: str, value: Any) -> str:
    if not kind.endswith("_type") and kind != "int_from_float":
        return shown(value)
    if isinstance(value, str):
        return f"{shown(value)} (text)"
    if isinstance(value, bool) or value is None:
        return shown(value)
    if isinstance(value, float) and math.isfinite(value):
        return f"{shown(value)} (a number with a fraction)"
    return f"{shown(value)} (a number)" if isinstance(value, int) else shown(value)


def _remedy(place: _Place) -> str:
    options = alternatives(place.annotation)
    if place.value is None:
        if len(options) == 1 and is_section(options[0]):
            return "indent its fields below it, or remove the line"
        default = _default(place.field)
        return f"write {_wanted(place.annotation, place.field, place.pattern)}" + (
            f", or remove the line for the default {default}" if default else ""
        )
    if len(options) == 1 and (instead := _same_in_right_type(place.value, options[0])) is not None:
        return f"write {instead}"
    return f"write {_wanted(place.annotation, place.field, place.pattern)}"


def _default(field: FieldInfo | None) -> str | None:
    if field is None or field.is_required() or isinstance(field.default, Model | list | dict):
        return None
    return _plain(field.default)


def _same_in_right_type(value: Any, wanted: Any) -> str | None:
    """Return how to write `value` as a `wanted` where only quotes, brackets or a fraction are wrong."""
    if wanted in (int, float) and isinstance(value, str):
        try:
            number = wanted(value)
        except ValueError:
            return None
        return value.strip() if math.isfinite(number) else None
    if wanted is int and isinstance(value, float) and math.isfinite(value) and value == int(value):
        return str(int(value))
    if wanted is bool and isinstance(value, str):
        return YES_NO.get(value.lower())
    if wanted is str and isinstance(value, bool | int | float):
        return f"'{shown(value)}'"
    if get_origin(wanted) is list and get_args(wanted)[0] is str and isinstance(value, str):
        return f"[{value}]"
    return None


def _wanted(annotation: Any, field: FieldInfo | None, pattern: str = "") -> str:
    for key, text in FORMS.items():
        if pattern == key or (key.endswith(".") and pattern.startswith(key)):
            return text
    options = alternatives(annotation)
    null = NoneType in get_args(annotation)
    texts = [_described(option, field) for option in options]
    return " or ".join(texts) + (", or null" if null else "")


def _described(annotation: Any, field: FieldInfo | None) -> str:
    if get_origin(annotation) is Annotated:
        return _described(*get_args(annotation)[:2])
    if get_origin(annotation) is Literal:
        return " or ".join(str(value) for value in get_args(annotation))
    if is_section(annotation):
        return f"a section with any of {', '.join(annotation.model_fields)}"
    if get_origin(annotation) is list:
        rules = field.metadata if field else []
        some = any(isinstance(rule, annotated_types.MinLen) for rule in rules)
        return "a list with at least one entry" if some else "a list"
    if get_origin(annotation) is dict:
        return "a section"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return names[annotation] + bounds(field)


def bounds(field: FieldInfo | None) -> str:
    """Return the field's range in words, with a leading space; empty where there is none."""
    texts = []
    for rule in field.metadata if field else []:
        match rule:
            case annotated_types.Ge(ge=low):
                texts.append(f"of at least {low}")
            case annotated_types.Gt(gt=low):
                texts.append(f"greater than {low}")
            case annotated_types.Le(le=high):
                texts.append(f"at most {high}")
            case annotated_types.Lt(lt=high):
                texts.append(f"less than {high}")
            case annotated_types.MultipleOf(multiple_of=unit):
                texts.append(f"a multiple of {unit}")
    return f" {', '.join(texts)}" if texts else ""
