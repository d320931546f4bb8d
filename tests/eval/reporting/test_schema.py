"""report.schema.json is plain JSON Schema, describes real reports, and is what readers check by."""

import json

import pytest

from eval.reporting.schema import SCHEMA_PATH, SchemaError, report_schema, validate

KEYWORDS = set(
    "$schema $defs $ref title description type const anyOf required properties minProperties "
    "additionalProperties items minItems maxItems minimum maximum".split()
)


def subschemas(schema):
    """The schema and every one within it."""
    yield schema
    for key in ("$defs", "properties"):
        for part in schema.get(key, {}).values():
            yield from subschemas(part)
    for part in [schema.get("items"), schema.get("additionalProperties"), *schema.get("anyOf", [])]:
        if isinstance(part, dict):
            yield from subschemas(part)


def test_the_schema_uses_only_what_our_reader_understands():
    schema = json.loads(SCHEMA_PATH.read_text(encoding="utf-8"))
    assert schema["$schema"].endswith("draft/2020-12/schema")
    for part in subschemas(schema):
        assert set(part) <= KEYWORDS, part
        if "$ref" in part:
            assert part["$ref"].removeprefix("#/$defs/") in schema["$defs"]
        # a message of too few or too many entries is the description
        if {"minItems", "maxItems", "minProperties"} & set(part):
            assert part["description"]


def test_a_whole_report_is_valid_for_any_validator(sample_report):
    jsonschema = pytest.importorskip("jsonschema", reason="of the test extra, not installed here")
    jsonschema.Draft202012Validator.check_schema(report_schema())
    jsonschema.validate(sample_report, report_schema())
    del sample_report["drafts"]["tuned"]["alpha"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(sample_report, report_schema())


def test_every_field_of_a_report_is_described(sample_report):
    draft = set(report_schema()["$defs"]["draft"]["properties"])
    assert set(sample_report["drafts"]["tuned"]) == draft
    assert set(sample_report) == set(report_schema()["properties"])


@pytest.mark.parametrize(
    ("schema", "good", "bad", "message"),
    [
        ({"type": "integer"}, 3, 3.5, "should be an integer"),
        ({"type": "integer"}, 0, True, "should be an integer"),
        ({"type": "boolean"}, True, 1, "should be a boolean"),
        ({"type": "number"}, 1, None, "should be a number"),
        ({}, 1.5, float("nan"), "not a number that JSON can hold"),
        ({"const": "a"}, "a", "b", "reads 'a'"),
        ({"minimum": 0, "maximum": 1}, 1, 1.1, "within 0 and 1"),
        ({"maximum": 1}, -5, 2, "at most 1"),
        ({"anyOf": [{"type": "null"}, {"type": "number"}]}, None, "x", "should be a number"),
        ({"description": "pairs", "minItems": 2, "maxItems": 2}, [1, 2], [1], "1 entries: pairs"),
        ({"items": {"type": "string"}}, ["a"], ["a", 2], r"it\[1\] should be a string"),
        ({"required": ["a"]}, {"a": 1}, {}, "it lacks a"),
        ({"properties": {"a": {"minimum": 2}}}, {"b": 0}, {"a": 1}, "it.a is 1"),
        ({"additionalProperties": {"type": "null"}}, {"b": None}, {"b": 1}, "it.b should be"),
        (
            {"$ref": "#/$defs/share"},
            {"mean": 0.5, "ci95": [0, 1], "n": 3},
            {"mean": 2},
            "lacks ci95",
        ),
    ],
)
def test_the_reader_by_keyword(schema, good, bad, message):
    validate(good, schema, "it")
    with pytest.raises(SchemaError, match=message):
        validate(bad, schema, "it")
