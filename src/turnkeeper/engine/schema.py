"""JSON Schema of the wire types: of the documents that are written (engine-contract.md 1.1)."""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Any

import msgspec
import msgspec.inspect as shapes

from turnkeeper.engine.wire.base import required_of


def json_schema(kind: type[msgspec.Struct] | UnionType) -> dict[str, Any]:
    """The JSON Schema (2020-12) of a wire type: integers as integers, no null, and all that is always written required.

    A reader accepts more than this (`documents`), and fields that the schema does not name are not forbidden.
    """
    schema = msgspec.json.schema(kind)
    required = {struct.__name__: required_of(struct) for struct in _structs(shapes.type_info(kind), set())}
    for name, described in schema["$defs"].items():
        if name not in required:  # an enum
            continue
        properties: dict[str, Any] = described["properties"]
        demanded = {*required[name], *described["required"]}
        described["required"] = [field for field in properties if field in demanded]
        described["properties"] = {field: _without_null(item) for field, item in properties.items()}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _structs(shape: shapes.Type, seen: set[type[msgspec.Struct]]) -> Iterator[type[msgspec.Struct]]:
    match shape:
        case shapes.UnionType():
            for member in shape.types:
                yield from _structs(member, seen)
        case shapes.ListType():
            yield from _structs(shape.item_type, seen)
        case shapes.StructType() if shape.cls not in seen:
            seen.add(shape.cls)
            yield shape.cls
            for field in shape.fields:
                yield from _structs(field.type, seen)
        case _:
            pass


def _without_null(described: dict[str, Any]) -> dict[str, Any]:
    """A property's schema without the null that stands for "absent" in memory and never in a document."""
    kept = {key: item for key, item in described.items() if not (key == "default" and item is None)}
    members: list[dict[str, Any]] = kept.get("anyOf", [])
    others = [member for member in members if member != {"type": "null"}]
    if len(others) == 1:
        del kept["anyOf"]
        return {**kept, **others[0]}
    return kept
