"""Checks a report against report.schema.json, the one place that says which fields it has.

The file is ordinary JSON Schema (draft 2020-12) for any validator; this module understands the
keywords that it uses, so that reading a report needs no further dependency.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

SCHEMA_PATH = Path(__file__).with_name("report.schema.json")
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}


class SchemaError(ValueError):
    """A value that the schema does not allow; the message names its place."""


@cache
def report_schema() -> dict[str, Any]:
    """The parsed schema of a report."""
    schema: dict[str, Any] = json.loads(SCHEMA_PATH.read_text(encoding="utf-8"))
    return schema


def validate(value: Any, schema: dict[str, Any], where: str) -> None:
    """Raise `SchemaError` for the first part of `value` that `schema` does not allow.

    where: what to call the value in a message. Any float that JSON cannot hold is refused as well.
    """
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return validate(value, report_schema()["$defs"][name], where)
    if isinstance(value, float) and not math.isfinite(value):
        raise SchemaError(f"{where} is {value}, which is not a number that JSON can hold")
    if "anyOf" in schema:
        return _validate_any(value, schema["anyOf"], where)
    if "const" in schema and value != schema["const"]:
        raise SchemaError(f"{where} is {value!r}; this version reads {schema['const']!r}")
    if "type" in schema:
        _validate_type(value, schema["type"], where)
    if isinstance(value, dict):
        _validate_object(value, schema, where)
    elif isinstance(value, list):
        _validate_array(value, schema, where)
    elif isinstance(value, int | float):
        low, high = schema.get("minimum"), schema.get("maximum")
        if (low is not None and value < low) or (high is not None and value > high):
            raise SchemaError(f"{where} is {value}, but should be {_range(low, high)}")
    return None


def _validate_any(value: Any, options: list[dict[str, Any]], where: str) -> None:
    """One of the options must do; the error is that of the last one, the fullest."""
    for option in options[:-1]:
        try:
            return validate(value, option, where)
        except SchemaError:
            pass  # the next one may allow it
    return validate(value, options[-1], where)


def _validate_type(value: Any, name: str, where: str) -> None:
    # JSON has no booleans among its numbers, Python has
    wrong_bool = isinstance(value, bool) and name != "boolean"
    if wrong_bool or not isinstance(value, _TYPES[name]):
        article = "an" if name[0] in "aio" else "a"
        raise SchemaError(f"{where} should be {article} {name}, not {value!r:.80}")


def _validate_object(value: dict[str, Any], schema: dict[str, Any], where: str) -> None:
    missing = [key for key in schema.get("required", []) if key not in value]
    if missing:
        raise SchemaError(f"{where} lacks {', '.join(missing)}")
    if len(value) < schema.get("minProperties", 0):
        raise SchemaError(f"{where} is empty: {schema['description']}")
    known, other = schema.get("properties", {}), schema.get("additionalProperties", {})
    for key, item in value.items():
        validate(item, known.get(key, other), f"{where}.{key}")


def _validate_array(value: list[Any], schema: dict[str, Any], where: str) -> None:
    low, high = schema.get("minItems", 0), schema.get("maxItems", math.inf)
    if not low <= len(value) <= high:
        raise SchemaError(f"{where} has {len(value)} entries: {schema['description']}")
    for i, item in enumerate(value):
        validate(item, schema.get("items", {}), f"{where}[{i}]")


def _range(low: float | None, high: float | None) -> str:
    if low is None:
        return f"at most {high}"
    return f"at least {low}" if high is None else f"within {low} and {high}"
