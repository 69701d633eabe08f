"""The ports of the contract: names, types and flags as the shared vectors pin them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest

from tests.conftest import shared_json
from turnkeeper.engine import contract_ports
from turnkeeper.engine.contract_ports import Operation, PortError, operation_of
from turnkeeper.errors import InvalidInput, TurnkeeperError

PINNED = ("EnginePermissionPort", "EngineToolPort", "EngineDurabilityPort", "EnginePostCommitPort")
NATIVE = {
    "ModelStreamPort": {"emit": Operation("emit", non_fatal=True)},
    "HostPolicyPort": {
        "before_model": Operation("beforeModel", runtime_cancellable=True),
        "before_commit": Operation("beforeCommit", runtime_cancellable=True),
    },
    "RetryPolicyPort": {"backoff": Operation("backoff", runtime_cancellable=True)},
    "ConversationPort": {"format_tool_exchange": Operation("formatToolExchange", sync=True)},
    "ContextSource": {"load": Operation("load", runtime_cancellable=True)},
    "ContextTransform": {"apply": Operation("apply", runtime_cancellable=True)},
    "ContextPackingStrategy": {"pack": Operation("pack", runtime_cancellable=True)},
}


def snake(name: str) -> str:
    """A name of the contract in Python."""
    return re.sub("([A-Z])", lambda match: f"_{match[1].lower()}", name)


def wire_type(hint: Any) -> str:
    """How the contract writes a type."""
    if hint in (None, type(None)):
        return "void"
    if hint is str:
        return "string"
    arguments = getattr(hint, "__args__", ())
    return f"{arguments[0].__name__}[]" if arguments else hint.__name__


def operations(port: str) -> dict[str, Callable[..., Any]]:
    """The operations of a port, by their names in Python."""
    members: dict[str, Any] = getattr(contract_ports, port).__dict__
    return {name: item for name, item in members.items() if hasattr(item, "__contract_operation__")}


@pytest.mark.parametrize("port", PINNED)
def test_pinned_ports_are_as_the_vectors_say(port: str) -> None:
    """1.16: operation names, parameters, types, and the flags."""
    methods = shared_json("vectors/prompty/port_contracts.json")["protocols"][port]["methods"]
    ours = operations(port)
    assert set(ours) == {snake(name) for name in methods}
    for name, expected in methods.items():
        method = ours[snake(name)]
        hints = get_type_hints(method)
        assert wire_type(hints.pop("return")) == expected["returns"]
        assert {parameter: wire_type(hint) for parameter, hint in hints.items()} == {
            snake(parameter): type_ for parameter, type_ in expected["params"].items()
        }
        said = operation_of(method)
        assert said == Operation(
            name, expected["sync"], expected["runtimeCancellable"], expected["atomic"], expected["nonFatal"]
        )
        assert inspect.iscoroutinefunction(method) is not expected["sync"]


@pytest.mark.parametrize("port", NATIVE)
def test_native_ports_are_as_the_page_says(port: str) -> None:
    """1.16: those that no vector pins."""
    ours = operations(port)
    assert {name: operation_of(method) for name, method in ours.items()} == NATIVE[port]
    for method in ours.values():
        assert inspect.iscoroutinefunction(method) is not operation_of(method).sync


def test_the_native_error_is_ours_by_the_same_name() -> None:
    """1.16: `PortError` is the one native error, and has three flavours."""
    assert shared_json("vectors/prompty/port_contracts.json")["nativeErrors"] == ["PortError"]
    plain, unknown = PortError("no"), PortError("cut", outcome_unknown=True, metadata={"phase": "response_body"})
    assert isinstance(plain, TurnkeeperError)
    assert (plain.message, plain.outcome_unknown, plain.configuration_error, plain.metadata) == (
        "no",
        False,
        False,
        None,
    )
    assert (unknown.outcome_unknown, unknown.metadata) == (True, {"phase": "response_body"})
    assert PortError("no such tool", configuration_error=True).configuration_error
    with pytest.raises(InvalidInput, match="outcome_unknown"):
        PortError("both", outcome_unknown=True, configuration_error=True)
