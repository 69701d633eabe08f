"""Documents: wire types from and to JSON-like trees, JSON text and YAML text, checked both ways (engine-contract.md 1.1, 1.19).

Reading is strict where a reader of the contract might otherwise take a document for another one: enum values, the kind of a
part, types, numbers, and every field that the contract requires and gives no default. It is lenient where the contract says
so: a field with a default may be absent, `null` in an optional field is the same as absent, an int64 may be a numeric string.
A field that the type does not have is kept in `Loaded.unknown`, or refused.

Writing reads back what it is about to hand out, so that a value built wrongly is refused here and not by the next reader.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, Final, Generic, NoReturn, TypeVar, cast, overload

import msgspec
import msgspec.inspect as shapes

from turnkeeper.engine import yaml_text
from turnkeeper.engine.wire.base import INT64_MIN, fields_of, required_of
from turnkeeper.errors import InvalidInput, ValueTooLarge
from turnkeeper.log import values
from turnkeeper.log.frames import MAX_INFLATED

T = TypeVar("T", bound=msgspec.Struct)

MAX_BYTES: Final = MAX_INFLATED
"""How large a text may be where the caller does not say."""

_NUMERIC: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,18})")
_PLACE: Final = re.compile(r"(?P<reason>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
_MISSING: Final = re.compile(r"Object missing required field `(?P<name>.*)`")


@dataclass(frozen=True)
class Loaded(Generic[T]):
    """A value from a document.

    Attributes:
        value: what the document says.
        unknown: what its type has no field for, by path. It is not written again: whoever wants it keeps it in `metadata`.
    """

    value: T
    unknown: Mapping[str, Any]


@overload
def from_tree(kind: type[T], tree: Any, *, strict: bool = False) -> Loaded[T]: ...
@overload
def from_tree(kind: UnionType, tree: Any, *, strict: bool = False) -> Loaded[Any]: ...
def from_tree(kind: Any, tree: Any, *, strict: bool = False) -> Loaded[Any]:
    """A value of `kind` from a JSON-like tree. It shares nothing with the tree.

    Args:
        kind: a wire type, or a union of them (`ContentPart`, `StreamChunk`).
        tree: dicts with text as keys, lists, text, numbers, bools and None, at most `values.MAX_DEPTH` deep.
        strict: refuse fields that the type does not have.

    Raises:
        InvalidInput: naming the path (`messages[2].parts[0].kind`).
    """
    unknown: dict[str, Any] = {}
    prepared = _prepared(_json_like(tree, _name(kind)), _shape(kind), "", unknown)
    if strict and unknown:
        raise InvalidInput(next(iter(unknown)), f"is not a field that this version of {_name(kind)} has")
    try:
        return Loaded(msgspec.convert(prepared, kind), unknown)
    except msgspec.ValidationError as e:
        _refuse(e, _name(kind))


@overload
def from_json(kind: type[T], text: str | bytes, *, strict: bool = False, max_bytes: int = MAX_BYTES) -> Loaded[T]: ...
@overload
def from_json(
    kind: UnionType, text: str | bytes, *, strict: bool = False, max_bytes: int = MAX_BYTES
) -> Loaded[Any]: ...
def from_json(kind: Any, text: str | bytes, *, strict: bool = False, max_bytes: int = MAX_BYTES) -> Loaded[Any]:
    """A value of `kind` from JSON: RFC 8259 with every key once in its object, so no NaN and no Infinity.

    Raises:
        InvalidInput: naming the path, or `kind` where the text is no such JSON.
        ValueTooLarge: it has more than `max_bytes`.
    """
    name = _name(kind)
    bounded = _bounded(text, name, max_bytes)
    try:
        tree = json.loads(bounded, object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_number)
    except RecursionError as e:
        raise InvalidInput(name, f"nested deeper than {values.MAX_DEPTH} levels") from e
    except ValueError as e:
        raise InvalidInput(name, f"is no JSON: {e}") from e
    return from_tree(kind, tree, strict=strict)


@overload
def from_yaml(kind: type[T], text: str | bytes, *, strict: bool = False, max_bytes: int = MAX_BYTES) -> Loaded[T]: ...
@overload
def from_yaml(
    kind: UnionType, text: str | bytes, *, strict: bool = False, max_bytes: int = MAX_BYTES
) -> Loaded[Any]: ...
def from_yaml(kind: Any, text: str | bytes, *, strict: bool = False, max_bytes: int = MAX_BYTES) -> Loaded[Any]:
    """A value of `kind` from YAML, which needs the extra `yaml`; `yaml_text` tells what is read.

    Raises:
        InvalidInput: naming the path, or `kind` where the text is no such YAML.
        ValueTooLarge: it has more than `max_bytes`.
    """
    name = _name(kind)
    return from_tree(kind, yaml_text.parse(_bounded(text, name, max_bytes), name), strict=strict)


def to_tree(value: msgspec.Struct) -> dict[str, Any]:
    """The JSON-like tree of a wire value, in the contract's order; independent of the value.

    Raises:
        InvalidInput: a field holds what its type does not allow, or what has no form in JSON; names the path.
    """
    kind = type(value)
    tree: dict[str, Any] = _json_like(_tree(value), kind.__name__)
    from_tree(kind, tree, strict=True)
    return tree


def to_json(value: msgspec.Struct, *, max_bytes: int = MAX_BYTES) -> str:
    """The compact JSON of a wire value. Raises what `to_tree` raises, and `ValueTooLarge`."""
    return _bounded(msgspec.json.encode(to_tree(value)), type(value).__name__, max_bytes)


def to_yaml(value: msgspec.Struct, *, max_bytes: int = MAX_BYTES) -> str:
    """The YAML of a wire value; needs the extra `yaml`. Raises what `to_tree` raises, and `ValueTooLarge`."""
    return _bounded(yaml_text.dump(to_tree(value)), type(value).__name__, max_bytes)


# --- texts and trees -----------------------------------------------------------------------------------------


def _bounded(text: str | bytes, name: str, max_bytes: int) -> str:
    encoded = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    if len(encoded) > max_bytes:
        raise ValueTooLarge(name, len(encoded), max_bytes)
    if isinstance(text, str):
        return text
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise InvalidInput(name, f"is no UTF-8: {e}") from e


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"an object has the key {next(key for key in names if names.count(key) > 1)!r} twice")
    return fields


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} has no form in JSON")


def _number(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{text:.40} is larger than any number of 64 bits")
    return number


def _json_like(tree: Any, name: str) -> Any:
    """A copy of a tree that holds nothing but what JSON has."""
    try:
        kept = values.storable(tree, "")
    except InvalidInput as e:
        raise InvalidInput(e.field.removeprefix(".") or name, e.reason) from None
    for path in _bytes_in(kept, ""):
        raise InvalidInput(path.removeprefix(".") or name, "bytes have no form in JSON; store text")
    return kept


def _bytes_in(tree: Any, path: str) -> Iterator[str]:
    if isinstance(tree, bytes):
        yield path
    elif isinstance(tree, dict):
        for key, item in cast("dict[str, Any]", tree).items():
            yield from _bytes_in(item, f"{path}.{key}")
    elif isinstance(tree, list):
        for index, item in enumerate(cast("list[Any]", tree)):
            yield from _bytes_in(item, f"{path}[{index}]")


# --- trees and types -----------------------------------------------------------------------------------------


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", "document")


@cache
def _shape(kind: Any) -> shapes.Type:
    return shapes.type_info(kind)


def _prepared(tree: Any, shape: shapes.Type, path: str, unknown: dict[str, Any]) -> Any:
    """A tree as msgspec converts it strictly: without nulls in optional fields, int64 as numbers, and no unknown fields."""
    match shape:
        case shapes.UnionType():
            members = [member for member in shape.types if not isinstance(member, shapes.NoneType)]
            chosen = members[0] if len(members) == 1 else _tagged(tree, members)
            return tree if chosen is None else _prepared(tree, chosen, path, unknown)
        case shapes.ListType() if isinstance(tree, list):
            items = enumerate(cast("list[Any]", tree))
            return [_prepared(item, shape.item_type, f"{path}[{index}]", unknown) for index, item in items]
        case shapes.StructType() if isinstance(tree, dict):
            return _prepared_fields(cast("dict[str, Any]", tree), shape, path, unknown)
        case shapes.IntType(ge=ge) if ge == INT64_MIN and isinstance(tree, str) and _NUMERIC.fullmatch(tree):
            return int(tree)
        case _:
            return tree


def _tagged(tree: Any, members: list[shapes.Type]) -> shapes.Type | None:
    """The member of a tagged union that a tree is of; None where it is of none, which msgspec then refuses."""
    for member in members:
        if isinstance(member, shapes.StructType) and isinstance(tree, dict) and member.tag_field is not None:
            tag: Any = cast("dict[str, Any]", tree).get(member.tag_field)
            if tag == member.tag:
                return member
    return None


def _prepared_fields(
    tree: dict[str, Any], shape: shapes.StructType, path: str, unknown: dict[str, Any]
) -> dict[str, Any]:
    fields, required = fields_of(shape.cls), required_of(shape.cls)
    prepared: dict[str, Any] = {}
    for key, item in tree.items():
        at = f"{path}.{key}".removeprefix(".")
        if key == shape.tag_field:
            prepared[key] = item
        elif key not in fields:
            unknown[at] = item
        elif item is not None:
            prepared[key] = _prepared(item, fields[key].type, at, unknown)
        elif key in required:
            raise InvalidInput(at, "is required and must not be null")
    return prepared


def _refuse(error: msgspec.ValidationError, name: str) -> NoReturn:
    found = _PLACE.fullmatch(str(error))
    assert found is not None
    path, reason = found["path"] or "", found["reason"]
    missing = _MISSING.fullmatch(reason)
    if missing is not None:
        raise InvalidInput(f"{path}.{missing['name']}".removeprefix("."), "is required and missing") from error
    raise InvalidInput(path or name, reason) from error


def _tree(value: Any) -> Any:
    """A value as a tree. What stands in open fields (`metadata`, `inputs`, …) is taken as it is, for `_json_like` to judge."""
    if isinstance(value, list):
        return [_tree(item) for item in cast("list[Any]", value)]
    if isinstance(value, Enum):
        return value.value
    if not isinstance(value, msgspec.Struct):
        return value
    kind = type(value)
    config = kind.__struct_config__
    tree: dict[str, Any] = {} if config.tag_field is None else {config.tag_field: config.tag}
    required = required_of(kind)
    for name, field in fields_of(kind).items():
        item: Any = getattr(value, field.name)
        omitted = name not in required and (item is None or (item == [] and field.default_factory is list))
        if not omitted:
            tree[name] = item if isinstance(field.type, shapes.AnyType) else _tree(item)
    return tree
