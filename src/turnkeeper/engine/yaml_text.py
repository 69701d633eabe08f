"""YAML text from and to JSON-like trees: plain data only, read the same by readers of YAML 1.1 and of YAML 1.2.

The runtimes that share the contract write different YAML: PyYAML and SnakeYAML 1.1, the others 1.2. A plain scalar means here
what it means to both; the few numbers on which they disagree, and which both write, are refused instead of guessed. Aliases,
tags and merge keys have no place in a tree of JSON and are refused, so that nothing loads as an object, and nothing small
unfolds into something large.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any, Final

from turnkeeper.errors import InvalidInput
from turnkeeper.log.values import MAX_DEPTH

_NULL: Final = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL: Final = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT: Final = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_HEX: Final = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT: Final = re.compile(r"[-+]?[0-9]+\.[0-9]*(?:[eE][-+][0-9]+)?|\.[0-9]+(?:[eE][-+][0-9]+)?")
_NOT_FINITE: Final = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
# Octal in 1.1 and decimal in 1.2; a float in 1.2 and text in 1.1.
_DISPUTED: Final = re.compile(r"[-+]?0[0-7]+|[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
# Whatever a reader of 1.2 may take for a number, and one of 1.1 does not: text like this is written in quotes.
_NUMBER_IN_1_2: Final = re.compile(r"^(?:0o[0-7]+|[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?)$")

# Line breaks of 1.1 that are none in 1.2: escaped, or readers (PyYAML's own without libyaml) make others of them.
_BREAK: Final = re.compile("[\x85\u2028\u2029]")


@cache
def _library() -> ModuleType:
    try:
        import yaml
    except ImportError as e:
        raise InvalidInput("YAML", f"needs PyYAML ({e}); pip install 'turnkeeper[yaml]'") from e
    return yaml


def parse(text: str, where: str) -> Any:
    """The tree of a YAML text.

    Raises:
        InvalidInput: it is no YAML, holds what has no place in a tree of JSON, or a key twice; names the path, or `where`.
    """
    yaml = _library()
    try:
        # The events alone are the library's: the tree is built here, so nothing in a text can name a Python object.
        events: Iterator[Any] = yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        tree: Any = None
        documents = 0
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise InvalidInput(where, "holds more than one YAML document")
                tree = _node(yaml, events, next(events), where, "", 0)
    except (yaml.YAMLError, UnicodeEncodeError) as e:
        raise InvalidInput(where, f"is no YAML: {' '.join(str(e).split())}") from e
    return tree


def _node(yaml: ModuleType, events: Iterator[Any], event: Any, where: str, path: str, depth: int) -> Any:
    at = path.removeprefix(".") or where
    if isinstance(event, yaml.AliasEvent):
        raise InvalidInput(at, "is an alias of YAML; write the value itself")
    if event.tag is not None:
        raise InvalidInput(at, f"has the tag {event.tag}, and tags are not read")
    if isinstance(event, yaml.ScalarEvent):
        return _scalar(event.value, at) if event.implicit[0] else event.value
    if depth >= MAX_DEPTH:
        raise InvalidInput(at, f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(event, yaml.SequenceStartEvent):
        items: list[Any] = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            items.append(_node(yaml, events, event, where, f"{path}[{len(items)}]", depth + 1))
        return items
    fields: dict[str, Any] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        key = _key(yaml, event, at)
        if key in fields:
            raise InvalidInput(f"{path}.{key}".removeprefix("."), "is given twice")
        fields[key] = _node(yaml, events, next(events), where, f"{path}.{key}", depth + 1)
    return fields


def _key(yaml: ModuleType, event: Any, at: str) -> str:
    if not isinstance(event, yaml.ScalarEvent) or event.tag is not None:
        raise InvalidInput(at, "has a key that is not plain text")
    key: str = event.value
    if event.implicit[0] and (key == "<<" or not isinstance(_scalar(key, at), str)):
        raise InvalidInput(at, f"has the key {key}, which YAML does not read as text; put it in quotes")
    return key


def _scalar(text: str, at: str) -> Any:
    """What a plain scalar means."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    try:
        if _INT.fullmatch(text):
            return int(text)
        if _HEX.fullmatch(text):
            return int(text, 16)
    except ValueError as e:
        raise InvalidInput(at, str(e)) from e
    if _FLOAT.fullmatch(text):
        return float(text)
    if _NOT_FINITE.fullmatch(text):
        raise InvalidInput(at, f"{text} has no form in JSON")
    # Digits with an 8 or 9 behind a leading zero are nobody's octal number, and no writer's decimal one: text.
    if _DISPUTED.fullmatch(text) and not re.fullmatch(r"[-+]?0[0-9]*[89][0-9]*", text):
        raise InvalidInput(
            at, f"{text} is read differently by readers of YAML; put text in quotes, write floats as 1.0e+3"
        )
    return text


@cache
def _dumper() -> type[Any]:
    yaml = _library()
    base: type[Any] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

    class Dumper(base):
        """Writes what no reader can take for something else, and every value in its place."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"' if _BREAK.search(value) else None)

    Dumper.add_representer(str, text)
    Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER_IN_1_2, list("-+.0123456789"))
    return Dumper


def dump(tree: Any) -> str:
    """The YAML of a tree of JSON, in block style, with the keys in their order."""
    # Lines are not folded: what folding changes and what not is where emitters err.
    text: str = _library().dump(
        tree, Dumper=_dumper(), sort_keys=False, allow_unicode=True, default_flow_style=False, width=10**9
    )
    return text
