"""What every wire type is made of: the base, the integers of the contract, and fields that are always written (1.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, Final, Generic, TypeVar, cast

import msgspec
import msgspec.inspect

T = TypeVar("T")

INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
"""The contract's `int32`."""
Int64 = Annotated[int, msgspec.Meta(ge=INT64_MIN, le=INT64_MAX)]
"""The contract's `int64`: a JSON number; documents may also bring it as a numeric string."""


class Wire(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Base of the wire types: an optional field that is not set is absent, never null (1.1)."""


class Written(Generic[T]):
    """The default of a field that is written also where it has it.

    msgspec omits plain defaults, and what `list` and `dict` make where it is empty; what any other factory makes it never does.
    """

    def __init__(self, default: Callable[[], T], *, required: bool) -> None:
        self.default = default
        self.required = required

    def __call__(self) -> T:
        return self.default()


def written(default: Callable[[], T]) -> T:
    """A field that the contract requires, with the default that it takes where a document lacks it (1.1)."""
    value: T = msgspec.field(default_factory=Written(default, required=True))
    return value


def listed(default: Callable[[], list[T]]) -> list[T]:
    """An optional list that is written also where it is empty, as the engines in Rust and Java do (1.1)."""
    value: list[T] = msgspec.field(default_factory=Written(default, required=False))
    return value


@cache
def fields_of(kind: type[msgspec.Struct]) -> Mapping[str, msgspec.inspect.Field]:
    """The fields of a wire type by their names on the wire, in the contract's order."""
    found = msgspec.inspect.type_info(kind)
    assert isinstance(found, msgspec.inspect.StructType)
    return {field.encode_name: field for field in found.fields}


@cache
def required_of(kind: type[msgspec.Struct]) -> frozenset[str]:
    """The names on the wire of the fields that the contract requires: each is always written, and never null."""
    omits = kind.__struct_config__.omit_defaults
    return frozenset(
        name
        for name, field in fields_of(kind).items()
        if field.required
        or not omits
        or (isinstance(field.default_factory, Written) and cast("Written[Any]", field.default_factory).required)
    )


def to_builtins(value: msgspec.Struct) -> dict[str, Any]:
    """The JSON-like form of a wire type, unchecked; `turnkeeper.engine.documents` checks what it saves."""
    result: dict[str, Any] = msgspec.to_builtins(value)
    return result
