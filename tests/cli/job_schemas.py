"""Checks a document against a published schema: the few words of JSON Schema that these use."""

from __future__ import annotations

import json
import re
from pathlib import Path

FOLDER = Path(__file__).parent / "schemas"
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


def problems(document, name):
    """Return what is wrong with a document: a list of places and words."""
    schema = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return list(_problems(document, schema, schema.get("$defs", {}), name))


def _problems(value, schema, definitions, where):
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    choices = schema.get("anyOf", ())
    tried = [list(_problems(value, each, definitions, where)) for each in choices]
    if tried and all(tried):
        yield from tried[0]
    if "type" in schema and not _is_of(value, schema["type"]):
        yield f"{where}: {value!r} is no {schema['type']}"
    elif isinstance(value, dict):
        yield from _problems_of_mapping(value, schema, definitions, where)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _problems(each, schema.get("items", {}), definitions, f"{where}[{number}]")
    elif "minimum" in schema and value < schema["minimum"]:
        yield f"{where}: {value!r} is too small"


def _is_of(value, kinds):
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return any(
        isinstance(value, TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))
        for kind in kinds
    )


def _problems_of_mapping(value, schema, definitions, where):
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{where}: {name} is missing"
    rest = schema.get("additionalProperties", True)
    patterns = schema.get("patternProperties", {})
    for name, each in value.items():
        inner = schema.get("properties", {}).get(name)
        if inner is None:
            inner = next((patterns[text] for text in patterns if re.search(text, name)), rest)
        if inner is False:
            yield f"{where}: {name} is unknown"
        elif inner is not True:
            yield from _problems(each, inner, definitions, f"{where}.{name}")
