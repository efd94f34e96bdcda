"""The JSON Schema of job files, for editors: made from the models that `check` validates with.

It has the shape of a job: fields, types, bounds and choices, with the words of docs/job-file.md. What fields
ask of one another, and of the disk, only `rlboost check` knows. JSON Schema takes 8.0 for a whole number.
"""

from __future__ import annotations

from typing import Any

from rlboost_runtime.job import Job

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_HAS_DATA = {"required": ["data"]}
_ONLY_SERVES = {
    "properties": {"endpoint": {"properties": {"trains": {"const": False}}, "required": ["trains"]}},
    "required": ["endpoint"],
}
"""A model that is only served needs no data."""


def job_schema() -> dict[str, Any]:
    """Return the schema as JSON values."""
    tidy: dict[str, Any] = _tidied(Job.model_json_schema())
    tidy["required"].remove("data")
    return {"$schema": DIALECT, "title": "RLBoost job file"} | tidy | {"anyOf": [_HAS_DATA, _ONLY_SERVES]}


def _tidied(schema: Any) -> Any:  # any JSON value
    """Return a schema without titles, which repeat the names, and without the defaults of whole sections."""
    if isinstance(schema, list):
        return [_tidied(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    tidy: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "$defs"):
            tidy[key] = {name: _tidied(inner) for name, inner in value.items()}
        elif key == "description":
            tidy[key] = " ".join(value.split())
        elif key in ("default", "enum", "const"):
            if not _has_section(value):
                tidy[key] = value
        elif key != "title":
            tidy[key] = _tidied(value)
    return tidy


def _has_section(value: Any) -> bool:  # any JSON value
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_has_section, value)))
