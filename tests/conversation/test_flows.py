"""The flow API: what a step may do, and that all of it is the same again when the step runs again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.conversation.driving import replica, state_of
from tests.conversation.platform import NotSent, Platform, Refused, SearchablePlatform, Unknown
from turnkeeper.conversation.context import FlowContext, Reject, TimedOut
from turnkeeper.conversation.flow import END, Flow
from turnkeeper.conversation.message import Button, Content, Message
from turnkeeper.conversation.state import SendState
from turnkeeper.engine.outcomes import OutcomeUnknown
from turnkeeper.engine.tools import ToolContext, tool
from turnkeeper.errors import FlowUnknown, InvalidInput, MessageRefused, ValueTooLarge
from turnkeeper.keeper import Keeper
from turnkeeper.log.store import Store
from turnkeeper.stores.sqlite import SqliteStore

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    """Rules are the same on all stores: the conformance, crash and model suites show that."""
    store = await SqliteStore.open(":memory:")
    yield store
    await store.close()


def two_questions(**options: Any) -> Flow:
    """Name and number, then a step that says both."""
    flow = Flow("order", **options)

    @flow.step
    async def ask(c: FlowContext) -> None:
        await c.send("Hello.")
        c.state["name"] = await c.ask("Name?")
        c.state["number"] = await c.ask("How many?", validate=whole_number)

    @flow.step
    async def say(c: FlowContext) -> None:
        await c.send(f"{c.state['name']} wants {c.state['number']}.")

    return flow


def whole_number(message: Message) -> int:
    """A validator."""
    if not message.text.isdigit():
        raise Reject("A number, please.")
    return int(message.text)


async def test_answers_reach_their_waits(store: Store) -> None:
    """C1, C2, C4, C6: one process, live continuations."""
    platform = Platform()
    async with replica(store, two_questions(), platform) as person:
        for text in ("hi", "Ann", "many", "3"):
            assert (await person.says(text)).left is None
    assert platform.texts() == ["Hello.", "Name?", "How many?", "A number, please.", "Ann wants 3."]
    state = await state_of(store)
    assert (state.owner, state.inbound, state.sends, state.flow) == ("", (), (), None)


@pytest.mark.parametrize("resume", ["all-answers", "first-wait"])
async def test_every_message_by_another_replica(store: Store, resume: Any) -> None:
    """C3 to C8: what was answered is not asked again; in the seed's mode the later waits are."""
    platform = Platform()
    said = ["hi", "Ann", "many", "3"] if resume == "all-answers" else ["hi", "Ann", "ping", "Ann", "3"]
    for text in said:
        async with replica(store, two_questions(resume=resume), platform) as person:
            await person.says(text)
    if resume == "all-answers":
        assert platform.texts() == ["Hello.", "Name?", "How many?", "A number, please.", "Ann wants 3."]
    else:
        # "ping" found the second wait lost: the step asked again from its start, and took it for no answer (C5). The answer to
        # its first question was then kept, and the one to its second lost with its process again.
        assert platform.texts() == ["Hello.", "Name?", "How many?", "Hello.", "Name?", "How many?", "Hello.", "Name?"]


async def test_first_wait_mode_in_one_process(store: Store) -> None:
    platform = Platform()
    async with replica(store, two_questions(resume="first-wait"), platform) as person:
        for text in ("hi", "Ann", "many", "3"):
            await person.says(text)
    assert platform.texts() == ["Hello.", "Name?", "How many?", "A number, please.", "Ann wants 3."]


async def test_same_again(store: Store) -> None:
    """C10: chance, time and what was made once are the same when the step runs again; effects happen once."""
    seen: list[tuple[Any, ...]] = []
    made: list[str] = []
    charged: list[str] = []

    @tool
    def charge(amount: int, context: ToolContext) -> str:
        charged.append(context.operation_id)
        return f"paid {amount}"

    flow = Flow("f")

    @flow.step
    async def only(c: FlowContext) -> None:
        once = await c.once("token", lambda: made.append("x") or len(made))
        paid = await c.do(charge, amount=5)
        seen.append((c.message.text, once, paid, c.now(), c.uuid(), c.random.random()))
        answer = await c.ask("And?")
        await c.send(f"{answer} {c.uuid()}")

    platform = Platform()
    for text in ("go", "on"):
        async with replica(store, flow, platform) as person:
            await person.says(text)
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert len(charged) == len(made) == 1
    assert platform.texts()[0] == "And?"
    assert platform.texts()[1].startswith("on ")


async def test_duplicate_events_change_nothing(store: Store) -> None:
    """J1, invariant 10."""
    platform = Platform()
    async with replica(store, two_questions(), platform) as person:
        await person.says("hi", event_id="e1")
        before = await state_of(store)
        for _ in range(2):
            await person.says("hi", event_id="e1")
        after = await state_of(store)
    assert before == after
    assert platform.texts() == ["Hello.", "Name?"]


async def test_cancel_and_restart_words(store: Store) -> None:
    platform = Platform()
    flow = two_questions(cancel_words=["stop"], restart_words=["again"])

    @flow.on_cancel
    async def gone(c: FlowContext) -> None:
        await c.send("Never mind.")

    async with replica(store, flow, platform) as person:
        await person.says("hi")
        await person.says("Ann")
        await person.says("AGAIN")
        await person.says("Bob")
    async with replica(store, flow, platform) as person:
        await person.says(" Stop ")
        assert (await state_of(store)).flow is None
        await person.says("hi")
    assert platform.texts() == [
        "Hello.", "Name?", "How many?", "Hello.", "Name?", "How many?", "Never mind.", "Hello.", "Name?",
    ]  # fmt: skip


async def test_timeout_and_reminder(store: SqliteStore) -> None:
    """A wait's time runs out, and a reminder comes, whoever is there then."""
    flow = Flow("f")

    @flow.step
    async def only(c: FlowContext) -> str:
        await c.remind("later", "Do not forget.", after=3600)
        try:
            await c.ask("Yes?", timeout=60)
        except TimedOut:
            await c.send("Too late.")
        return END

    platform = Platform()
    async with replica(store, flow, platform) as person:
        await person.says("go")
    async with replica(store, flow, platform) as person:
        assert (await person.bot.process("c")).handled == 0
        await store.advance_clock(61_000)
        await person.bot.process("c")
        assert platform.texts() == ["Yes?", "Too late."]
        await store.advance_clock(3_600_000)
        await person.bot.process("c")
        await person.bot.process("c")
    assert platform.texts() == ["Yes?", "Too late.", "Do not forget."]
    assert (await state_of(store)).timers == ()


async def test_answered_in_time(store: SqliteStore) -> None:
    flow = Flow("f")

    @flow.step
    async def only(c: FlowContext) -> None:
        await c.send(await c.ask("Yes?", timeout=60))

    platform = Platform()
    async with replica(store, flow, platform) as person:
        await person.says("go")
        await person.says("sure")
        await store.advance_clock(120_000)
        await person.bot.process("c")
    assert platform.texts() == ["Yes?", "sure"]
    assert (await state_of(store)).timers == ()


async def test_stale_buttons_and_edits_answer_nothing(store: Store) -> None:
    """An edit, or a button of a wait that is gone, is no answer to another question."""
    whys: list[str] = []
    flow = Flow("f")

    @flow.step
    async def only(c: FlowContext) -> None:
        first = await c.ask(Content(text="A or B?", buttons=(Button("A", "a"), Button("B", "b"))))
        second = await c.ask(Content(text="C or D?", buttons=(Button("C", "c"), Button("D", "d"))))
        await c.send(f"{first}{second}")

    @flow.on_unasked
    async def unasked(c: FlowContext) -> None:
        whys.append(c.why)
        await c.send("That is over.")

    platform = Platform()
    async with replica(store, flow, platform) as person:
        await person.says("go")
        first = platform.seen[-1][1]
        await person.says(kind="button", prompt=first, value="b")
        await person.says(kind="button", prompt=first, value="a")
        await person.says("A", kind="edit", edits="x")
        await person.says(kind="button", prompt="nothing", value="d")
        second = next(key for _, key, content in platform.seen if content.text == "C or D?")
        await person.says(kind="button", prompt=second, value="d")
    assert whys == ["stale_button", "edit", "stale_button"]
    assert platform.texts() == ["A or B?", "C or D?", *["That is over."] * 3, "bd"]


async def test_button_of_the_first_prompt_after_a_rejected_answer(store: Store) -> None:
    """Both prompts ask for the same: either's button is an answer."""
    flow = Flow("f")

    @flow.step
    async def only(c: FlowContext) -> None:
        def chosen(message: Message) -> str:
            if message.kind != "button":
                raise Reject("Press one, please.")
            return message.value

        await c.send(
            await c.ask(Content(text="A or B?", buttons=(Button("A", "a"), Button("B", "b"))), validate=chosen)
        )

    platform = Platform()
    async with replica(store, flow, platform) as person:
        await person.says("go")
        await person.says("A")
    async with replica(store, flow, platform) as person:
        await person.says(kind="button", prompt=platform.seen[0][1], value="a")
    assert platform.texts() == ["A or B?", "Press one, please.", "a"]


async def test_versions(store: Store) -> None:
    """A renamed step goes on; one that is gone ends the flow; a newer version is left to who knows it."""
    old = Flow("f", version=1)

    @old.step
    async def first(c: FlowContext) -> None:
        await c.send(f"old {await c.ask('Old?')}")

    new = Flow("f", version=2, renamed={"first": "renewed"})

    @new.step
    async def renewed(c: FlowContext) -> None:
        await c.send(f"new {await c.ask('Old?')}")

    other = Flow("f", version=3)

    @other.step
    async def another(c: FlowContext) -> None:
        await c.ask("Other?")

    @other.on_interrupted
    async def over(c: FlowContext) -> None:
        await c.send(f"over: {c.why}")

    platform = Platform()
    async with replica(store, old, platform) as person:
        await person.says("go")
    async with replica(store, new, platform) as person:
        await person.says("yes")
        await person.says("go")
    async with replica(store, old, platform) as person:
        with pytest.raises(FlowUnknown):
            await person.says("hm")
        with pytest.raises(FlowUnknown):
            await person.bot.process("c")
    async with replica(store, new, platform) as person:
        await person.bot.process("c")
        assert platform.texts() == ["Old?", "new yes", "Old?", "new hm"]
        await person.says("go")
    async with replica(store, other, platform) as person:
        await person.says("x")
        assert platform.texts()[-2:] == ["Old?", "over: version"]
        await person.says("go")
    assert platform.texts()[-1] == "Other?"


async def test_poison(store: SqliteStore, caplog: pytest.LogCaptureFixture) -> None:
    """J5: a step that always fails is set aside after its attempts, and holds the conversation until somebody has looked."""
    flow = Flow("f")

    @flow.step
    async def only(c: FlowContext) -> None:
        await c.send("trying")
        raise LookupError("nothing there")

    platform = Platform()
    async with replica(store, flow, platform, max_attempts=3) as person:
        result = await person.says("go")
        for _ in range(3):
            assert result.left == "later"
            await store.advance_clock(60_000)
            result = await person.bot.process("c")
        assert result.left == "held"
        assert (await person.says("more")).left == "held"
    state = await state_of(store)
    assert state.attention == "quarantined"
    assert "LookupError: nothing there" in str(state.inbound[0].quarantined)
    assert platform.texts() == ["trying"]
    assert "nothing there" in caplog.text


async def test_poison_is_skipped_where_wanted(store: SqliteStore) -> None:
    flow = Flow("f")

    @flow.step
    async def only(c: FlowContext) -> None:
        if c.message.text == "bad":
            raise LookupError
        await c.send(c.message.text)

    platform = Platform()
    async with replica(store, flow, platform, max_attempts=1, on_poison="skip") as person:
        await person.says("bad")
        await store.advance_clock(60_000)
        await person.says("good")
    assert platform.texts() == ["good"]


async def test_a_step_that_differs_is_stopped(store: SqliteStore) -> None:
    """O2: the same key with another content sends nothing."""
    flow = Flow("f")
    count = iter(range(100))

    @flow.step
    async def only(c: FlowContext) -> None:
        await c.send(f"number {next(count)}")
        await c.ask("And?")
        await c.send("end")

    platform = Platform()
    for text in ("go", "on"):
        async with replica(store, flow, platform) as person:
            result = await person.says(text)
    assert result.left == "later"
    assert platform.texts() == ["number 0", "And?"]
    assert "OutboxConflict" in (await state_of(store)).inbound[0].reason


async def test_unknown_send(store: Store) -> None:
    """Adapter contract, 1 to 3: sent again under its key, looked up, or left in doubt and reported."""
    for number, platform in enumerate(
        [Platform(dedup_window=60.0, lose={"Name?"}), SearchablePlatform(lose={"Name?"}), Platform(lose={"Name?"})]
    ):
        async with replica(store, two_questions(), platform) as person:
            person.conversation_id = f"c{number}"
            for text in ("hi", "Ann", "3"):
                await person.says(text)
        assert platform.texts(f"c{number}") == ["Hello.", "Name?", "How many?", "Ann wants 3."]
        state = await state_of(store, f"c{number}")
        doubts = [send for send in state.sends if send.state is SendState.AMBIGUOUS]
        assert len(doubts) == (number == 2)
        assert state.attention == ("unknown_send" if number == 2 else None)


async def test_unknown_send_that_may_not_be_tried_again_yet(store: SqliteStore) -> None:
    """What the channel asks for holds for a message in doubt too, which stays in doubt meanwhile."""
    answers: list[Any] = [Refused("slow down", retry_after=300.0), Unknown("the connection was cut")]
    platform = Platform(dedup_window=600.0, fault=lambda _: answers.pop() if answers else None)
    async with replica(store, two_questions(), platform) as person:
        processed = await person.says("hi")
        assert (processed.left, len(platform.calls)) == ("later", 2)
        assert [send.state for send in (await state_of(store)).sends] == [SendState.SENDING]
        await store.advance_clock(301_000)
        assert (await person.bot.process("c")).left is None
    assert platform.texts() == ["Hello.", "Name?"]


async def test_not_sent_and_refused(store: SqliteStore) -> None:
    answers: list[Any] = [NotSent("refused"), Refused("slow down", retry_after=0.01)]
    platform = Platform(fault=lambda text: answers.pop() if answers else None)
    async with replica(store, two_questions(), platform) as person:
        await person.says("hi")
    assert platform.texts() == ["Hello.", "Name?"]

    flow = Flow("f")

    @flow.step
    async def only(c: FlowContext) -> None:
        try:
            await c.send("rude")
        except MessageRefused as e:
            await c.send(f"sorry: {e.reason}")

    platform = Platform(fault=lambda text: Refused("no") if text == "rude" else None)
    async with replica(store, flow, platform) as person:
        person.conversation_id = "d"
        await person.says("hi")
    assert platform.texts("d") == ["sorry: no"]
    assert (await state_of(store, "d")).flow is None


async def test_channel_that_is_down(store: SqliteStore) -> None:
    """A message that cannot be brought out waits; it is no attempt of the step's own."""
    platform = Platform(fault=lambda _: Refused("down", retry_after=300.0))
    async with replica(store, two_questions(), platform, max_attempts=2) as person:
        assert (await person.says("hi")).left == "later"
        for _ in range(4):
            await store.advance_clock(301_000)
            assert (await person.bot.process("c")).left == "later"
        platform.fault = None
        await store.advance_clock(301_000)
        assert (await person.bot.process("c")).left is None
    assert platform.texts() == ["Hello.", "Name?"]


async def test_long_messages_go_in_parts(store: Store) -> None:
    """O4."""
    flow = Flow("f")

    @flow.step
    async def only(c: FlowContext) -> None:
        await c.send("one two three\nfour five six")

    platform = Platform(max_length=10)
    async with replica(store, flow, platform) as person:
        await person.says("go")
    assert platform.texts() == ["one two", "three", "four five", "six"]
    assert len({key for _, key, _ in platform.seen}) == 4


async def test_effect_in_doubt_holds_the_conversation_until_it_is_settled(store: SqliteStore) -> None:
    calls: list[str] = []

    @tool
    def charge(context: ToolContext) -> str:
        calls.append(context.turn_id)
        raise OutcomeUnknown("timeout")

    flow = Flow("f")

    @flow.step
    async def only(c: FlowContext) -> None:
        await c.send(await c.do(charge))

    platform = Platform()
    async with replica(store, flow, platform, max_attempts=2) as person:
        for _ in range(4):
            assert (await person.says("go", event_id="e")).left == "later"
            await store.advance_clock(61_000)
        assert len(calls) == 1
        await Keeper(store).resolve_tool(calls[0], 0, 0, "happened", who="ann", why="saw it", result="paid")
        assert (await person.bot.process("c")).left is None
    assert platform.texts() == ["paid"]
    assert len(calls) == 1


async def test_bad_input(store: Store) -> None:
    platform = Platform()
    async with replica(store, two_questions(), platform) as person:
        with pytest.raises(ValueTooLarge):
            await person.says("x", data={"blob": bytes(range(256)) * 1200})
        with pytest.raises(InvalidInput, match=r"message\.kind"):
            await person.says("x", kind="sticker")
        with pytest.raises(InvalidInput, match="event_id"):
            await person.says("x", event_id="")
    assert (await state_of(store)).received == 0
    with pytest.raises(InvalidInput, match="has no steps"):
        async with replica(store, Flow("empty"), platform):
            pass


async def test_validator_that_raises_is_a_failing_step(store: SqliteStore) -> None:
    flow = Flow("f")

    @flow.step
    async def only(c: FlowContext) -> None:
        def broken(message: Message) -> str:
            raise KeyError(message.text)

        await c.ask("Name?", validate=broken)

    async with replica(store, flow, Platform(), max_attempts=1) as person:
        await person.says("go")
        assert (await person.says("Ann")).left == "later"
        await store.advance_clock(60_000)
        assert (await person.bot.process("c")).left == "held"


async def test_when_there_is_something_to_do_again(store: SqliteStore) -> None:
    """For a worker: a timer, a pause, or nothing before somebody says something; and others have their turn between two."""
    flow = Flow("f")

    @flow.step
    async def only(c: FlowContext) -> None:
        if c.message.text == "fail":
            raise LookupError
        if c.message.text == "wait":
            await c.ask("Yes?", timeout=60)

    async with replica(store, flow, Platform()) as person:
        assert (await person.says("go")).again_in is None
        for text in ("one", "two", "three"):
            await person.writes(text)
        result = await person.bot.process("c", at_most=2)
        assert (result.handled, result.left, result.again_in) == (2, "more", 0.0)
        assert (await state_of(store)).owner == ""
        assert (await person.bot.process("c", at_most=2)).left is None
        waiting = await person.says("wait")
        assert (waiting.left, 50 < (waiting.again_in or 0) <= 60) == (None, True)
        await person.says("yes")
        failed = await person.says("fail")
        assert (failed.left, 0 < (failed.again_in or 0) <= 2) == ("later", True)
