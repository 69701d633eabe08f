"""Short ways to say what the engine's tests are about: what happened outside, what stands in the log, who is the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import anyio

from turnkeeper import Keeper, Message, ModelRequest, Reply, ScriptedModel, ToolContext
from turnkeeper.engine.stored import stored_messages
from turnkeeper.engine.transcript import check_pairs
from turnkeeper.engine.wire import Role
from turnkeeper.models.scripted import Answer, calls
from turnkeeper.turn.records import AnyRecord
from turnkeeper.turn.state import Slot, TurnState, find_slot

R = TypeVar("R", bound=AnyRecord)


class Ledger:
    """What happened outside the store, in order. It does not deduplicate."""

    def __init__(self) -> None:
        self.effects: list[str] = []
        """Operation ids."""
        self.told: list[Any] = []
        """What the tools had to say about it."""

    def write(self, context: ToolContext, told: Any = None) -> None:
        """An effect happens."""
        self.effects.append(context.operation_id)
        self.told.append(told)

    def once(self, count: int) -> bool:
        """Whether exactly so many effects happened, each once."""
        return len(self.effects) == count and max(Counter(self.effects).values(), default=1) == 1


class Channel:
    """A channel for replies that does as its plan says: raises, or sends."""

    def __init__(self, *plan: Exception | None, sent_all_the_same: bool = False) -> None:
        self.plan = list(plan)
        self.sent_all_the_same = sent_all_the_same
        self.tries: list[Reply] = []
        self.sent: list[Reply] = []

    async def send(self, reply: Reply) -> str:
        """See `ReplyPort.send`."""
        self.tries.append(reply)
        error = self.plan.pop(0) if self.plan else None
        if error is None or self.sent_all_the_same:
            self.sent.append(reply)
        if error is not None:
            raise error
        return f"m{len(self.sent)}"


def asks(*rounds: Sequence[tuple[str, Any]], then: str = "done") -> ScriptedModel:
    """A model that asks for the tools of each round, and then has its last word."""
    script: list[Answer] = [calls(*requests) for requests in rounds]
    return ScriptedModel([*script, then])


def asks_once(*requests: tuple[str, Any], then: str = "done") -> ScriptedModel:
    """A model that asks for these tools at the same time, and then has its last word."""
    return asks(requests, then=then)


def requests_of(model: ScriptedModel) -> list[tuple[int, int]]:
    """What the model was asked: (round, attempt)."""
    return [(request.round_index, request.attempt) for request in model.requests]


def last_results(request: ModelRequest) -> list[str]:
    """The results that the model is shown at the end of its request."""
    results: list[str] = []
    for message in reversed(request.messages):
        if message.role is not Role.TOOL:
            break
        results.insert(0, message.text)
    return results


async def until(holds: Callable[[], Awaitable[bool]], seconds: float = 10) -> None:
    """Wait until something is so, that nobody sends an event for."""
    with anyio.fail_after(seconds):
        while not await holds():  # noqa: ASYNC110  # a log tells nobody that it has grown
            await anyio.sleep(0.002)


async def state_of(keeper: Keeper, turn_id: str = "t") -> TurnState:
    """The state of the turn; its log is whole and its transcript pairs up."""
    history = await keeper.history(turn_id)
    assert history is not None
    assert [entry.seq for entry in history.entries] == list(range(1, history.state.revision + 1))
    check_pairs(stored_messages(history.state))
    return history.state


async def slot_of(keeper: Keeper, round_index: int, slot_index: int, turn_id: str = "t") -> Slot | None:
    """A slot as it stands."""
    return find_slot(await state_of(keeper, turn_id), round_index, slot_index)


async def messages_of(keeper: Keeper, turn_id: str = "t") -> list[Message]:
    """The transcript of the turn."""
    return stored_messages(await state_of(keeper, turn_id))


async def records_of(keeper: Keeper, kind: type[R], turn_id: str = "t") -> list[R]:
    """The records of one kind in the turn's log, in order."""
    history = await keeper.history(turn_id)
    assert history is not None
    return [entry.record for entry in history.entries if isinstance(entry.record, kind)]
