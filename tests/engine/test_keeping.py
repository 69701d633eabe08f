"""Size limits, each at its edge, with errors that name field, size and limit; and texts redacted before they are kept."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.conformance.tally import Added, Tally, TallyRules, adding, tally_log
from turnkeeper import Agent, Keeper, Message, ScriptedModel, tool
from turnkeeper.errors import InvalidInput, TurnCheckpointConflict, ValueTooLarge
from turnkeeper.log.decision import Decision
from turnkeeper.log.keeping import MAX_RECORD, Keeping, Limits
from turnkeeper.log.record import NOWHERE
from turnkeeper.log.shell import FencedLog
from turnkeeper.stores.sqlite import SqliteStore

pytestmark = pytest.mark.anyio

CARD = re.compile(r"\b\d{16}\b")
SECRET = "4111111111111111"


def hide(_place: str, text: str) -> str:
    """Numbers of cards are not kept."""
    return CARD.sub("[card]", text)


def asks(name: str, arguments: str) -> dict[str, Any]:
    """A decision to call a tool."""
    return {"role": "assistant", "tool_calls": [{"id": "1", "name": name, "arguments": arguments}]}


def seen_by(model: ScriptedModel, request: int) -> list[Message]:
    """What the model was shown."""
    return list(model.requests[request].messages)


def texts(messages: list[Message]) -> str:
    """All their texts."""
    return "\n".join(message.text for message in messages)


# --- limits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", Limits.__struct_fields__)
def test_limits_are_possible_ones(name: str) -> None:
    for size in (0, -1, MAX_RECORD + 1):
        with pytest.raises(InvalidInput, match=f"limits.{name}: must be 1 to "):
            Limits(**{name: size})
    assert getattr(Limits(**{name: 1}), name) == 1


def test_no_store_is_ever_asked_for_more_than_it_takes() -> None:
    """Redis takes 512 MB in a string, PostgreSQL and SQLite about 1 GB in a value: an append stays below with all of it."""
    assert Limits().record <= MAX_RECORD <= 512 * 1024 * 1024 // 2


async def test_an_input_at_the_limit_of_transcripts_and_above() -> None:
    async def start(limit: int) -> str:
        limits = Limits(transcript=limit)
        async with await Keeper.open("sqlite:///:memory:", limits=limits) as keeper:
            result = await keeper.run(Agent(ScriptedModel(["hello"])), "x" * 1000, turn_id="t")
            return result.status

    assert await start(1200) == "success"
    with pytest.raises(ValueTooLarge, match=r"^messages: \d+ bytes are over the limit of 1000 bytes$") as e:
        await start(1000)
    assert (e.value.field, e.value.limit, e.value.size > 1000) == ("messages", 1000, True)


async def test_a_turn_that_grows_over_the_limit_of_transcripts_stops_before_the_model_is_asked() -> None:
    @tool(replay_safe=True)
    def long() -> str:
        """A long result."""
        return "y" * 5000

    model = ScriptedModel([asks("long", "{}"), "never"])
    store = await SqliteStore.open(":memory:")
    result = await Keeper(store, limits=Limits(transcript=4000)).run(Agent(model, [long]), "go", turn_id="t")
    assert (result.status, result.error_kind) == ("failed", "transcript_too_large")
    assert re.search(r"transcript: \d+ bytes are over the limit of 4000 bytes", result.message or "")
    assert len(model.requests) == 1
    # What is there is kept, and goes on where the limit is higher.
    again = await Keeper(store).run(Agent(ScriptedModel(["not asked for", "done"]), [long]), "go", turn_id="t")
    assert again.output == "done"
    await store.close()


@pytest.mark.parametrize("over", [0, 1])
async def test_arguments_at_the_limit_and_above(over: int) -> None:
    ran: list[str] = []

    @tool
    def say(text: str) -> str:
        """Must not run with arguments that are too large."""
        ran.append(text)
        return "said"

    given = '{"text": "' + "z" * (88 + over) + '"}'
    assert len(given) == 100 + over
    model = ScriptedModel([asks("say", given), "done"])
    async with await Keeper.open("sqlite:///:memory:", limits=Limits(arguments=100)) as keeper:
        assert (await keeper.run(Agent(model, [say]), "go", turn_id="t")).output == "done"
        history = await keeper.history("t")
    assert len(ran) == 1 - over
    told = str([message.parts for message in seen_by(model, 1)])
    assert ("arguments: 101 bytes are over the limit of 100 bytes" in told) == bool(over)
    assert history is not None


@pytest.mark.parametrize("over", [0, 1])
async def test_a_result_at_the_limit_and_above(over: int) -> None:
    """The effect has happened: the slot is completed, the model is told, and nothing runs again."""
    ran: list[int] = []

    @tool
    def fetch() -> str:
        """Gives a large result."""
        ran.append(1)
        return "r" * 2000

    async def run(limit: int) -> tuple[str, int]:
        ran.clear()
        model = ScriptedModel([asks("fetch", "{}"), "done"])
        async with await Keeper.open("sqlite:///:memory:", limits=Limits(result=limit)) as keeper:
            assert (await keeper.run(Agent(model, [fetch]), "go", turn_id="t")).output == "done"
            assert (await keeper.run(Agent(ScriptedModel([]), [fetch]), "go", turn_id="t")).output == "done"
        assert len(ran) == 1
        told = str([message.parts for message in seen_by(model, 1)])
        found = re.search(r"\): (\d+) bytes are over the limit of (\d+) bytes", told)
        return (told, 0) if found is None else (told, int(found[1]))

    _, size = await run(1000)
    assert size > 2000
    told, too_large = await run(size - over)
    assert bool(too_large) == bool(over)
    assert ("result of fetch (round 0 slot 0): " in told) == bool(over)


@pytest.mark.parametrize("over", [0, 1])
async def test_an_append_at_the_limit_of_records_and_above(over: int) -> None:
    store = await SqliteStore.open(":memory:")
    await tally_log(store).ask(adding(1))
    size = sum(len(record.body) for record in (await store.read("tally")).records)
    await store.erase("tally")
    log = FencedLog(store, "tally", TallyRules(), most=size - over)
    if over:
        with pytest.raises(ValueTooLarge, match=f"^records of tally: {size} bytes are over the limit of {size - 1}"):
            await log.ask(adding(1))
    else:
        await log.ask(adding(1))
    assert ((await store.read("tally")).position == NOWHERE) == bool(over)
    # The log stays usable.
    assert (await log.ask(lambda _state, _now: Decision("nothing", ()))) == "nothing"
    await store.close()


class Snapshots(TallyRules):
    """Wants a snapshot before every append."""

    def snapshot(self, state: Tally, now: int) -> Any:
        """All that was added, and who did."""
        return Added(state.total, "somebody with a long name") if state.by else None


async def test_a_snapshot_that_is_too_large_is_left_out() -> None:
    """What is to be written is not held up by what was before."""
    store = await SqliteStore.open(":memory:")
    log = FencedLog(store, "tally", Snapshots(), most=50)
    for by in ("a", "b"):
        await log.ask(adding(1, by))
    assert [record.seq for record in (await store.read("tally")).records] == [1, 2]
    await FencedLog(store, "tally", Snapshots(), most=600).ask(adding(1, "c"))
    assert [record.seq for record in (await store.read("tally")).records] == [3, 4]
    await store.close()


async def test_operators_evidence_has_the_limit_of_results() -> None:
    async with await Keeper.open("sqlite:///:memory:", limits=Limits(result=500)) as keeper:

        @tool
        def charge() -> str:
            """Its outcome is unknown."""
            raise TimeoutError

        result = await keeper.run(Agent(ScriptedModel([asks("charge", "{}")]), [charge]), "go", turn_id="t")
        assert result.status == "reconciliation_required"
        evidence: dict[str, Any] = {"who": "ann", "why": "seen"}
        with pytest.raises(ValueTooLarge, match=r"^result: "):
            await keeper.resolve_tool("t", 0, 0, "happened", result="r" * 1000, **evidence)
        await keeper.resolve_tool("t", 0, 0, "happened", result="r" * 100, **evidence)


class Killed(BaseException):
    """What no code catches."""


# --- redaction -----------------------------------------------------------------------------------------------------


async def kept_texts(store: SqliteStore) -> bytes:
    """All that a store has of a turn, inflated as little as it is."""
    found = [head async for head in store.heads()]
    return b"".join([record.body for head in found for record in (await store.read(head.key)).records])


async def test_what_is_redacted_is_neither_kept_nor_used() -> None:
    """The model is shown the same in this run and behind a resume: what is kept."""
    dies = True

    @tool(replay_safe=True)
    def look_up(name: str) -> Mapping[str, Any]:
        """Finds a card."""
        return {"card": f"no. {SECRET}", "of": [name, SECRET, 7]}

    class Dying(ScriptedModel):
        """Dies at the second request, once."""

        async def invoke(self, request: Any) -> Any:
            if dies and len(self.requests) == 1:
                self.requests.append(request)
                raise Killed
            return await super().invoke(request)

    store = await SqliteStore.open(":memory:")
    keeper = Keeper(store, redact=hide)
    first = Dying([asks("look_up", '{"name": "ann"}'), "done"])
    text = f"My card is {SECRET}, thanks"
    with pytest.raises(BaseExceptionGroup):
        await keeper.run(Agent(first, [look_up]), text, turn_id="t")
    dies = False
    second = ScriptedModel(["not asked for", "done"])
    await store.advance_clock(3_600_000)
    assert (await keeper.run(Agent(second, [look_up]), text, turn_id="t")).output == "done"
    assert seen_by(first, 1) == seen_by(second, 0)
    shown = str([message.parts for message in seen_by(second, 0)])
    assert "My card is [card], thanks" in shown
    assert SECRET not in shown
    assert "no. [card]" in shown
    assert SECRET.encode() not in await kept_texts(store)
    await store.close()


async def test_a_redacting_function_that_changes_makes_another_turn() -> None:
    """The trap: it is a part of the input's identity."""
    store = await SqliteStore.open(":memory:")
    text = f"My card is {SECRET}"
    await Keeper(store, redact=hide).run(Agent(ScriptedModel(["done"])), text, turn_id="t")
    with pytest.raises(TurnCheckpointConflict):
        await Keeper(store, redact=lambda _place, _text: "***").run(Agent(ScriptedModel(["done"])), text, turn_id="t")
    await store.close()


def fails(_place: str, text: str) -> str:
    """Cannot do it, and tells too much."""
    raise RuntimeError(text)


def forgets(_place: str, _text: str) -> str:
    """Gives no text."""
    return None  # type: ignore[return-value]


@pytest.mark.parametrize("redact", [fails, forgets])
async def test_where_redacting_fails_nothing_is_kept(redact: Callable[[Any, str], str]) -> None:
    """An input is refused; the result of a call that has happened gets a stand-in. Neither tells what was to be hidden."""
    ran: list[int] = []

    @tool
    def fetch() -> str:
        """Must not run twice."""
        ran.append(1)
        return SECRET

    store = await SqliteStore.open(":memory:")
    with pytest.raises(InvalidInput, match=r"^messages\[0\]\.parts\[0\]: could not be redacted") as e:
        await Keeper(store, redact=redact).run(Agent(ScriptedModel(["x"])), SECRET, turn_id="t")
    assert SECRET not in str(e.value)
    assert [head async for head in store.heads()] == []

    def only_results(place: Any, text: str) -> str:
        return text if place == "input" else redact(place, text)

    model = ScriptedModel([asks("fetch", "{}"), "done"])
    result = await Keeper(store, redact=only_results).run(Agent(model, [fetch]), "go", turn_id="t")
    assert (result.output, ran) == ("done", [1])
    shown = str([message.parts for message in seen_by(model, 1)])
    assert "its result cannot be kept" in shown
    assert SECRET not in shown
    assert SECRET.encode() not in await kept_texts(store)
    await store.close()


def test_a_value_without_a_redacting_function_is_itself() -> None:
    value = {"a": [SECRET]}
    assert Keeping().redacted("result", value, "x") is value
    assert Keeping(redact=hide).redacted("result", {SECRET: [SECRET, 1, None]}, "x") == {SECRET: ["[card]", 1, None]}
