"""Field case 09: NUL and halves of surrogate pairs in model or tool text are the same on every store, and never a raw error."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from tests.cases.script import records
from tests.conformance.support import ClockedStore, listed
from tests.conftest import shared_json
from turnkeeper.errors import InvalidInput
from turnkeeper.log.record import HeadQuery
from turnkeeper.log.store import Store
from turnkeeper.stores.sqlite import SqliteStore
from turnkeeper.turn_checkpoint import ToolCallAction, TurnCheckpointSession, TurnPhase, TurnSnapshot

pytestmark = pytest.mark.anyio

CASE: Final = "cases/09-text-a-backend-rejects.json"
LONG: Final = " and some more text, so that it is long enough to be shared in a round" * 2


def texts() -> list[str]:
    """The texts of the case."""
    found = [entry["value"] for entry in shared_json(CASE)["texts"]]
    assert len(found) == 15
    return found


def kept(text: str) -> str:
    """The documented rule: the same code points, U+FFFD for each half of a surrogate pair."""
    return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)


class Turn(NamedTuple):
    """What a whole turn with one tool call says, wherever a text may stand."""

    trace: str = "trace"
    scope: str = "primary"
    user: str = "hello"
    assistant: str = "I look."
    arguments: str = '{"q": 1}'
    call_id: str = "call-1"
    result: Any = "found"
    final: str = "Here it is."
    reply: str = "Here it is."
    metadata: str = "meta"
    reply_key: str = "reply"
    message_id: str = "message"
    owner: str = "owner"
    tool: str = "look"

    def messages(self) -> list[Any]:
        """The transcript before the round."""
        return [{"role": "user", "content": self.user, "meta": {self.metadata: self.metadata}}]

    def decision(self) -> dict[str, Any]:
        """The model's decision."""
        call = {"id": self.call_id, "function": {"name": self.tool, "arguments": self.arguments}}
        return {"content": self.assistant, "tool_calls": [call]}

    def whole_transcript(self) -> list[Any]:
        """The transcript behind the round."""
        answer = {"role": "tool", "tool_call_id": self.call_id, "content": self.result}
        return [*self.messages(), {"role": "assistant", **self.decision()}, answer]

    async def take(self, store: Store) -> TurnCheckpointSession:
        """Take the whole turn, as one worker does."""
        session = TurnCheckpointSession(store, self.trace, self.scope, labels={"label": self.metadata})
        runtime = {"note": self.metadata}
        await session.start(self.messages(), [self.tool], runtime)
        await session.reserve_assistant(0, self.decision())
        operation = session.logical_operation_id(0, 0)
        claimed = await session.claim_tool(
            0, 0, self.call_id, self.tool, self.arguments, operation, owner_token=self.owner
        )
        assert claimed.action is ToolCallAction.ACQUIRED
        begun = await session.begin_tool(0, 0, self.owner, claimed.fence)
        assert begun.should_begin
        completed = await session.complete_tool(0, 0, self.owner, claimed.fence, {"value": self.result})
        assert completed.action is ToolCallAction.COMPLETED
        await session.commit_round(0, self.whole_transcript(), runtime)
        await session.save_final_model(self.final)
        await session.reserve_final_delivery(self.reply_key, self.reply, {"button": self.metadata})
        await session.mark_delivered(self.reply_key, self.message_id)
        await session.mark_completed()
        return session


async def _look_again(store: Store, turn: Turn) -> tuple[TurnSnapshot, dict[str, Any]]:
    """The turn and its tool's result, as a process that starts now reads them."""
    session = TurnCheckpointSession(store, turn.trace, turn.scope)
    snapshot, slot = await session.load(), await session.get_tool(0, 0)
    assert snapshot is not None
    assert slot is not None
    assert slot.result is not None
    assert snapshot.phase is TurnPhase.COMPLETED
    return snapshot, slot.result


def _expect(turn: Turn, snapshot: TurnSnapshot, result: dict[str, Any]) -> None:
    """Every place holds what `turn` says, by the documented rule."""

    def stored(value: Any) -> Any:
        if isinstance(value, str):
            return kept(value)
        if isinstance(value, dict):
            return {kept(key): stored(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        return [stored(item) for item in value] if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType]

    assert snapshot.messages == stored(turn.whole_transcript())
    assert snapshot.assistant_responses == {0: stored(turn.decision())}
    assert result == {"value": stored(turn.result)}
    assert snapshot.final_model == kept(turn.final)
    assert snapshot.final_text == kept(turn.reply)
    assert snapshot.final_delivery == {"button": kept(turn.metadata)}
    assert snapshot.runtime == {"note": kept(turn.metadata)}
    assert (snapshot.reply_message_key, snapshot.sent_message_id) == (turn.reply_key, turn.message_id)


EVERYWHERE = ("user", "assistant", "arguments", "result", "final", "reply", "metadata", "call_id")
CONTENT: dict[str, Callable[[str], dict[str, Any]]] = {
    "user message": lambda text: {"user": text},
    "assistant text": lambda text: {"assistant": text},
    "tool arguments raw string": lambda text: {"arguments": text},
    "tool result string": lambda text: {"result": text},
    "tool result nested key and value": lambda text: {"result": {"a": [{text: text, "other": [text]}]}},
    "final text": lambda text: {"final": text, "reply": text},
    "a reply that is not the final text": lambda text: {"reply": text},
    "metadata value": lambda text: {"metadata": text},
    "provider's call id": lambda text: {"call_id": text},
    "everywhere": lambda text: dict.fromkeys(EVERYWHERE, text),
}


@pytest.mark.parametrize("place", CONTENT)
async def test_content(store: ClockedStore, place: str) -> None:
    """A whole turn with each text in one place comes back by the rule, and starting it again is the same turn."""
    longer = [text + LONG for text in texts()] if place == "everywhere" else []
    for number, text in enumerate(texts() + longer):
        turn = Turn(trace=f"t{number}")._replace(**CONTENT[place](text))
        session = await turn.take(store)
        snapshot, result = await _look_again(store, turn)
        _expect(turn, snapshot, result)
        # What the first session handed out is what is stored: nobody sees the unstored form.
        first = await session.load()
        assert first is not None
        assert first.messages == snapshot.messages
        again = TurnCheckpointSession(store, turn.trace, labels={"label": turn.metadata})
        revision = snapshot.revision
        assert (await again.start(turn.messages(), [turn.tool], {"note": turn.metadata})).revision == revision
        labels = [head.labels["label"] for head in await listed(store, HeadQuery(prefix=again.key))]
        assert labels == [kept(turn.metadata)]


IDENTIFIERS = ("trace", "scope", "reply_key", "message_id", "owner", "tool")
UNFIT = ("\x00", "a\x00b", "a\ud83d", "\ude02b", "\ude02\ud83d")


@pytest.mark.parametrize("place", IDENTIFIERS)
async def test_identifiers(store: ClockedStore, place: str) -> None:
    """Texts that a store could not take as an identifier: one typed error, before any write. The others are kept as they are."""
    for number, text in enumerate(texts()):
        turn = Turn(trace=f"t{number}")._replace(**{place: text})
        unfit = any(c < " " or c == "\x7f" or "\ud800" <= c <= "\udfff" for c in text)
        assert unfit or not any(bad in text for bad in UNFIT)
        if unfit:
            with pytest.raises(InvalidInput):
                await turn.take(store)
        else:
            await turn.take(store)
            snapshot, result = await _look_again(store, turn)
            _expect(turn, snapshot, result)


@pytest.mark.parametrize("text", UNFIT)
async def test_nothing_is_written_before_an_identifier_is_refused(store: ClockedStore, text: str) -> None:
    """Each call that takes an identifier refuses a bad one by name, and the log has not grown."""
    session = TurnCheckpointSession(store, "trace")
    await session.start([{"role": "user", "content": "hi"}])
    bad_decision = Turn(tool=text).decision()
    operation = session.logical_operation_id(0, 0)

    async def refused(call: Callable[[], Awaitable[Any]]) -> None:
        before = await records(store, session.key)
        with pytest.raises(InvalidInput) as raised:
            await call()
        assert raised.value.field
        assert await records(store, session.key) == before

    for trace, scope in ((text, "primary"), ("trace", text)):
        with pytest.raises(InvalidInput):
            TurnCheckpointSession(store, trace, scope)
    await refused(lambda: session.reserve_assistant(0, bad_decision))
    await session.reserve_assistant(0, Turn().decision())
    await refused(lambda: session.claim_tool(0, 0, "call-1", text, '{"q": 1}', operation))
    await refused(lambda: session.claim_tool(0, 0, "call-1", "look", '{"q": 1}', operation, owner_token=text))
    claimed = await session.claim_tool(0, 0, "call-1", "look", '{"q": 1}', operation, owner_token="owner")
    for call in (session.begin_tool, session.renew_tool, session.abandon_tool):
        before = await records(store, session.key)
        assert (await call(0, 0, text, claimed.fence)).action is ToolCallAction.STALE_OWNER
        assert await records(store, session.key) == before
    await session.begin_tool(0, 0, "owner", claimed.fence)
    await store.advance_clock(3_600_000)
    await session.claim_tool(0, 0, "call-1", "look", '{"q": 1}', operation, owner_token="other")
    await refused(lambda: session.resolve_tool(0, 0, "happened", who=text, why="seen", result_record={}))
    await session.resolve_tool(0, 0, "happened", who="me", why=f"seen {text}", result_record={"text": text})
    slot = await session.get_tool(0, 0)
    assert slot is not None
    assert slot.result == {"text": kept(text)}
    await session.commit_round(0, Turn().whole_transcript(), {})
    await session.save_final_model("done")
    await refused(lambda: session.reserve_final_delivery(text, "done"))
    await session.reserve_final_delivery("reply", "done")
    await refused(lambda: session.mark_delivered(text, "message"))
    await refused(lambda: session.mark_delivered("reply", text))
    assert (await session.mark_delivered("reply", "message")).phase is TurnPhase.DELIVERED


async def test_after_a_restart(tmp_path: Path) -> None:
    """The same from a file that another process opens."""
    path = tmp_path / "turns.db"
    turns = [Turn(trace=f"t{number}")._replace(**CONTENT["everywhere"](text)) for number, text in enumerate(texts())]
    async with await SqliteStore.open(path) as store:
        for turn in turns:
            await turn.take(store)
    async with await SqliteStore.open(path) as store:
        for turn in turns:
            snapshot, result = await _look_again(store, turn)
            _expect(turn, snapshot, result)


async def test_text_that_only_talks_about_nul(store: ClockedStore) -> None:
    r"""The six visible characters `\u0000` are text like any other, beside a real NUL."""
    turn = Turn(user="write \\u0000 for \x00", result={"\\u0000": "\x00", "\x00": "\\u0000"}, final="\\u0000\x00")
    await turn.take(store)
    snapshot, result = await _look_again(store, turn)
    assert snapshot.messages[0]["content"] == "write \\u0000 for \x00"
    assert result == {"value": {"\\u0000": "\x00", "\x00": "\\u0000"}}
    assert snapshot.final_model == "\\u0000\x00"
