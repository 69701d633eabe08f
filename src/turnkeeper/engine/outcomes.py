"""What may be known of an effect's outcome, as a tool, a model port or a channel tells it by what it raises or returns."""

from __future__ import annotations

import math
import socket
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

import anyio

from turnkeeper.engine.contract_ports import PortError
from turnkeeper.errors import TurnkeeperError

T = TypeVar("T")


class EffectRefused(TurnkeeperError):
    """The effect was definitely refused; the model is told why. (A declined card, a full flight.)

    Attributes:
        kind: a short name of the reason, for the model and for reports.
    """

    def __init__(self, message: str, *, kind: str = "tool_error") -> None:
        super().__init__(message)
        self.kind = kind


class NotSent(TurnkeeperError):
    """The effect provably did not happen: nothing left this process. It may be tried again."""


class OutcomeUnknown(TurnkeeperError):
    """The effect may have happened. It is not repeated by itself.

    Attributes:
        metadata: what the provider said of it; kept with a model call that has to be settled.
    """

    def __init__(self, message: str, *, metadata: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.metadata = None if metadata is None else dict(metadata)


@dataclass(frozen=True)
class Happened:
    """A look-up found that the effect happened, with this result."""

    result: Any = None
    evidence: str = "found by its operation id"


@dataclass(frozen=True)
class DidNotHappen:
    """A look-up found that the effect did not happen, and will not happen any more."""

    evidence: str = "not found by its operation id"


@dataclass(frozen=True)
class StillUnknown:
    """A look-up could not tell."""

    evidence: str = "the look-up could not tell"


LookedUp = Happened | DidNotHappen | StillUnknown


async def awaited(call: Awaitable[T]) -> T:
    """Await something of the host's. A cancellation that comes from inside it is its failure, and not one of this run.

    Raises:
        OutcomeUnknown: it was cancelled, and nobody has cancelled this run.
    """
    try:
        return await call
    except anyio.get_cancelled_exc_class() as e:
        if anyio.current_effective_deadline() == -math.inf:
            raise
        raise OutcomeUnknown("it was cancelled from inside") from e


Kind = Literal["refused", "not sent", "unknown"]

# By name, because HTTP libraries bring classes of their own and none of them may be imported for this.
_NOT_SENT_NAMES: Final = frozenset(
    {"ConnectError", "ConnectTimeout", "PoolTimeout", "ConnectionTimeout", "ClientConnectorError", "NewConnectionError"}
)


def classify(error: Exception, refusals: tuple[type[Exception], ...] = ()) -> Kind:
    """What an exception says about the effect that raised it (flows.md, adapter contract).

    Refused: `EffectRefused`, the tool's own `refusals`, and a `PortError` that does not say `outcome_unknown`. Not sent:
    `NotSent`, refused connections, failed name look-ups, connect timeouts. Everything else is unknown: an exception that nobody
    vouched for proves nothing about the effect.
    """
    if isinstance(error, PortError):
        return "unknown" if error.outcome_unknown else "refused"
    if isinstance(error, EffectRefused) or (refusals and isinstance(error, refusals)):
        return "refused"
    if isinstance(error, NotSent | ConnectionRefusedError | socket.gaierror):
        return "not sent"
    if any(kind.__name__ in _NOT_SENT_NAMES for kind in type(error).__mro__):
        return "not sent"
    return "unknown"
