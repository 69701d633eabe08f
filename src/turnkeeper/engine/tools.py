"""Tools: functions that a model may call, each with the one policy for when its outcome is unknown (architecture.md)."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast, get_type_hints, overload

import msgspec

from turnkeeper.engine.arguments import InvalidArguments
from turnkeeper.engine.outcomes import LookedUp
from turnkeeper.errors import InvalidInput, OwnershipLost
from turnkeeper.log import values


class Policy(str, Enum):
    """What happens when a crash leaves a tool between its effect barrier and its completion."""

    FAIL_CLOSED = "fail_closed"
    REPLAY_SAFE = "replay_safe"
    RECONCILE = "reconcile"
    TRANSACTIONAL = "transactional"


@dataclass
class ToolContext:
    """What a tool may know about the call that it serves. Ask for it with a parameter of this type.

    Attributes:
        operation_id: the idempotency key of this call: the same on every attempt, on every machine. Hand it to the backend.
        turn_id: the turn.
        round_index, slot_index: the call's place in the turn.
        fence: grows at each change of owner.
        call_id: the provider's id of the call, as given; may be empty, repeated or None.
        transaction: for transactional tools, the store's transaction; else None.
        delegate: runs another agent below this call; `subagent` makes tools of it.
    """

    operation_id: str
    turn_id: str
    round_index: int
    slot_index: int
    fence: int
    call_id: str | None = None
    transaction: Any = None
    delegate: Any = field(default=None, repr=False)
    lost: bool = field(default=False, repr=False)

    def check(self) -> None:
        """Stop here if this worker lost the call meanwhile. For long tools, before each step that cannot be undone.

        Raises:
            OwnershipLost: another worker may be going on with it.
        """
        if self.lost:
            raise OwnershipLost(f"turn {self.turn_id!r} round {self.round_index} slot {self.slot_index}")


LookUp = Callable[[ToolContext], Awaitable[LookedUp]]


class Tool:
    """A function that a model may call.

    Attributes:
        name: what the model calls it.
        description: what the model reads about it.
        policy: what happens when its outcome is unknown.
        parameters: the JSON Schema of its arguments.
        refusals: exceptions of the function that mean that the effect was definitely refused.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        parameters: dict[str, Any] | None = None,
        replay_safe: bool = False,
        reconcile: LookUp | None = None,
        transactional: bool = False,
        refusals: tuple[type[Exception], ...] = (),
    ) -> None:
        self._schema = parameters
        self.function = function
        self.name = values.identifier(name or function.__name__, "tool name", longest=128)
        self.description = inspect.cleandoc(description or function.__doc__ or "")
        chosen = [
            policy
            for policy, given in (
                (Policy.REPLAY_SAFE, replay_safe),
                (Policy.RECONCILE, reconcile is not None),
                (Policy.TRANSACTIONAL, transactional),
            )
            if given
        ]
        if len(chosen) > 1:
            raise InvalidInput(f"tool {self.name}", f"has two policies: {' and '.join(p.value for p in chosen)}")
        self.policy = chosen[0] if chosen else Policy.FAIL_CLOSED
        self.look_up = reconcile
        self.refusals = refusals
        self.is_async = inspect.iscoroutinefunction(function)
        if transactional and self.is_async:
            raise InvalidInput(
                f"tool {self.name}", "a transactional tool runs inside the store's transaction: make it a def"
            )
        self._context_parameter, self._arguments = _arguments_type(function, self.name)

    @property
    def parameters(self) -> dict[str, Any]:
        """The JSON Schema of the arguments."""
        if self._schema is not None or self._arguments is None:
            return self._schema or {"type": "object"}
        schema = msgspec.json.schema(self._arguments)
        definitions = cast("dict[str, Any]", schema.get("$defs", {}))
        own = definitions.pop(self._arguments.__name__)
        own.pop("title", None)
        return {**own, "$defs": definitions} if definitions else own

    @property
    def replayable(self) -> bool:
        """Whether the slot may run again after its owner died behind the barrier."""
        return self.policy in (Policy.REPLAY_SAFE, Policy.TRANSACTIONAL)

    def bind(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The function's keyword arguments, checked and converted by its annotations.

        Raises:
            InvalidArguments: a parameter is missing, unknown or of another type; the model is told.
        """
        if self._arguments is None:
            return arguments
        try:
            bound = msgspec.convert(arguments, self._arguments)
        except msgspec.ValidationError as e:
            raise InvalidArguments(str(e)) from e
        return {name: getattr(bound, name) for name in self._arguments.__struct_fields__}

    def call(self, bound: dict[str, Any], context: ToolContext) -> Any:
        """Call the function: a coroutine for an async one."""
        if self._context_parameter is not None:
            bound = {**bound, self._context_parameter: context}
        return self.function(**bound)

    def __repr__(self) -> str:
        return f"Tool({self.name}, {self.policy.value})"


def _arguments_type(function: Callable[..., Any], name: str) -> tuple[str | None, type[msgspec.Struct] | None]:
    """The parameter that takes the context, and a type for the others; None where `**arguments` takes any object."""
    hints = get_type_hints(function, include_extras=True)
    context: str | None = None
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    anything = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise InvalidInput(f"tool {name}", f"the parameter {parameter.name!r} has to be an ordinary named one")
        hint = hints.get(parameter.name, Any)
        if hint is ToolContext:
            context = parameter.name
        elif parameter.kind is parameter.VAR_KEYWORD:
            anything = True
        elif parameter.default is parameter.empty:
            fields.append((parameter.name, hint))
        else:
            default = msgspec.field(default_factory=lambda value=parameter.default: value)
            fields.append((parameter.name, hint, default))
    if anything:
        return context, None
    arguments = msgspec.defstruct(f"{name}_arguments", fields, kw_only=True, forbid_unknown_fields=True)
    return context, arguments


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    parameters: dict[str, Any] | None = None,
    replay_safe: bool = False,
    reconcile: LookUp | None = None,
    transactional: bool = False,
    refusals: tuple[type[Exception], ...] = (),
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Make a function a tool; its docstring and annotations are what the model reads.

    Say at most one of: `replay_safe=True` (it may run again, same operation id), `reconcile=look_up` (the look-up says
    whether the operation happened), `transactional=True` (its effect and its completion are one transaction of the
    store). Silence means fail closed: the turn stops until somebody settles what happened.

    A function with `**arguments` takes any object, unchecked; `parameters` is then the JSON Schema that the model reads.

    `refusals` are exceptions by which the function says that the effect was definitely refused; the model is told. Any
    other exception of a tool that is not replay safe means that its outcome is unknown, unless it proves that nothing was
    sent (`outcomes.classify`).
    """
    if function is not None:
        return Tool(function)

    def decorate(decorated: Callable[..., Any]) -> Tool:
        return Tool(decorated, **options)

    return decorate
