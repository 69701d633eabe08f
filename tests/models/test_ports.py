"""What goes over the wire and what comes back: tools, parallel calls, usage, streams, and blocks that are the provider's own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.models.clients import APIS, KEY, KINDS, Known, Watching, asking, calling, port_at, saying, settling
from turnkeeper import Agent, Host, Keeper, Message, TextPart, Tool, tool
from turnkeeper.engine.contract_ports import PortError
from turnkeeper.engine.wire import FilePart, ImagePart, InvocationUsage, Role
from turnkeeper.errors import InvalidInput
from turnkeeper.models.fake import FakeModel, Script, ScriptedCall, ScriptedRound
from turnkeeper.models.openai import OpenAIResponses

pytestmark = pytest.mark.anyio

every_kind = pytest.mark.parametrize(("api", "streaming"), KINDS)
every_api = pytest.mark.parametrize("api", APIS)


@tool(replay_safe=True)
def pay(cents: int, note: str = "") -> str:
    """Pay somebody."""
    return f"paid {cents}{note}"


THOUGHTFUL = Script(
    rounds=[
        ScriptedRound(
            text="One moment, please.",
            thinking="Two sums are asked for; both are small.",
            calls=[
                # Spaced as no encoder would do it: the provider gets its own text back.
                ScriptedCall(name="pay", arguments='{ "cents" :5,  "note": " für Äpfel" }'),
                ScriptedCall(name="pay", arguments={"cents": 7}),
            ],
            input_tokens=11,
            output_tokens=4,
        ),
        ScriptedRound(text="Both are paid.", input_tokens=20, output_tokens=3),
    ]
)


@every_kind
async def test_a_turn_with_parallel_calls(api: str, streaming: bool) -> None:
    """The fake provider refuses a conversation whose thoughts or signatures were changed, or whose calls lack results."""
    watching = Watching()
    with FakeModel(THOUGHTFUL) as fake:
        async with (
            port_at(fake.url, api, streaming=streaming) as port,
            await Keeper.open("sqlite:///:memory:") as keeper,
        ):
            agent = settling(port, [pay], host=Host(stream=watching))
            result = await keeper.run(agent, "pay 5 and 7", turn_id="t")
            assert (result.status, result.output) == ("success", "Both are paid.")
            session = keeper.session("t")
            told = [
                slot.result["output"] for slot in [await session.get_tool(0, n) for n in (0, 1)] if slot and slot.result
            ]
            first = await session.get_tool(0, 0)
            checkpoint = await keeper.checkpoint("t")
    assert told == ["paid 5 für Äpfel", "paid 7"]
    assert first is not None
    if api != "messages" or streaming:  # which has no text of the arguments otherwise
        assert first.raw_arguments == '{ "cents" :5,  "note": " für Äpfel" }'
        if api != "messages":  # and takes an object, never a text
            assert '{ \\"cents\\" :5,' in json.dumps(fake.requests[1].body)
    assert fake.bought() == {0: 1, 1: 1}
    assert checkpoint is not None
    assert checkpoint.metadata is not None
    usage = checkpoint.metadata["turnkeeper"]["usage"]
    assert usage == {"inputTokens": 31, "outputTokens": 7, "totalTokens": 38}
    if streaming:
        assert watching.text == "One moment, please.Both are paid."
        assert watching.thinking == "Two sums are asked for; both are small."
        assert watching.events
    else:
        assert (watching.text, watching.thinking, watching.events) == ("", "", [])


@every_api
async def test_tools_go_with_their_schema(api: str) -> None:
    with FakeModel(saying()) as fake:
        async with port_at(fake.url, api) as port:
            await port.invoke(asking(tools=[pay]))
    sent = fake.requests[0].body["tools"][0]
    schema = sent["function"]["parameters"] if "chat" in api else sent.get("parameters") or sent["input_schema"]
    assert schema == pay.parameters
    assert schema["required"] == ["cents"]
    described = sent.get("function", sent)
    assert (described["name"], described["description"]) == ("pay", "Pay somebody.")


@every_api
async def test_an_invocation_can_be_told_by_its_id(api: str) -> None:
    """It is in what the provider logs, and with what it stores; the answer says which model and answer it is."""
    with FakeModel(saying("Hello.", input_tokens=3, output_tokens=2)) as fake:
        async with port_at(fake.url, api) as port:
            answer = await port.invoke(asking())
    assert fake.requests[0].invocation == "inv_1"
    assert answer.usage == InvocationUsage(input_tokens=3, output_tokens=2, total_tokens=5)
    assert (answer.output, answer.metadata["finishReason"], answer.metadata["model"]) == ("Hello.", "stop", "model-1")
    assert answer.metadata["responseId"] == fake.bill[0].answer


async def test_the_conversation_of_every_role(subtests: pytest.Subtests) -> None:
    """Instructions, images and files, and an answer that another provider gave."""
    call = {"id": "other_1", "type": "function", "function": {"name": "pay", "arguments": '{"cents": 1}'}}
    image = ImagePart(source="iVBORw0KGgo=", media_type="image/png", detail="low")
    messages = [
        Message(role=Role.SYSTEM, parts=[TextPart(value="Be brief.")]),
        Message(parts=[TextPart(value="What is it?"), image, FilePart(source="https://files.test/a.pdf")]),
        Message(role=Role.ASSISTANT, parts=[TextPart(value="I pay.")], metadata={"tool_calls": [call]}),
        Message(role=Role.TOOL, parts=[TextPart(value="paid 1")], metadata={"tool_call_id": "other_1", "name": "pay"}),
        Message(parts=[TextPart(value="And now?")]),
    ]
    with FakeModel(Script(rounds=[ScriptedRound(), ScriptedRound(text="Hello.")])) as fake:
        for api in ("responses", "messages", "chat"):
            async with port_at(fake.url, api) as port:
                chat = messages if api != "chat" else [messages[0], Message(parts=[image]), *messages[2:]]
                assert (await port.invoke(asking(chat))).output == "Hello."
    responses, anthropic, chat = (asked.body for asked in fake.requests)
    with subtests.test("responses"):
        assert [item.get("role", item["type"]) for item in responses["input"]] == [
            *("system", "user", "assistant", "function_call", "function_call_output", "user")
        ]
        assert responses["input"][1]["content"][1:] == [
            {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo=", "detail": "low"},
            {"type": "input_file", "file_url": "https://files.test/a.pdf"},
        ]
    with subtests.test("messages"):
        assert anthropic["system"] == [{"type": "text", "text": "Be brief."}]
        assert [message["role"] for message in anthropic["messages"]] == ["user", "assistant", "user"]
        assert anthropic["messages"][0]["content"][1:] == [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}},
            {"type": "document", "source": {"type": "url", "url": "https://files.test/a.pdf"}},
        ]
        assert anthropic["messages"][1]["content"][1]["input"] == {"cents": 1}
        assert [block["type"] for block in anthropic["messages"][2]["content"]] == ["tool_result", "text"]
    with subtests.test("chat"):
        picture = {"url": "data:image/png;base64,iVBORw0KGgo=", "detail": "low"}
        assert chat["messages"][1]["content"] == [{"type": "image_url", "image_url": picture}]
        assert chat["messages"][2]["tool_calls"] == [call]


@every_api
async def test_data_without_a_type_is_refused_before_it_is_sent(api: str) -> None:
    with FakeModel(saying()) as fake:
        async with port_at(fake.url, api) as port:
            with pytest.raises(PortError, match="media type") as raised:
                await port.invoke(asking([Message(parts=[ImagePart(source="iVBORw0KGgo=")])]))
    assert raised.value.configuration_error
    assert fake.requests == []


@every_kind
async def test_a_repeated_call_id_is_made_unique_for_the_provider(api: str, streaming: bool) -> None:
    """Field case 02: the blocks that go back carry the ids of the transcript, so results are matched."""
    script = calling(
        ScriptedCall(name="pay", arguments={"cents": 1}, id="x"),
        ScriptedCall(name="pay", arguments={"cents": 2}, id="x"),
    )
    with FakeModel(script) as fake:
        async with (
            port_at(fake.url, api, streaming=streaming) as port,
            await Keeper.open("sqlite:///:memory:") as keeper,
        ):
            result = await keeper.run(settling(port, [pay]), "go", turn_id="t")
    assert (result.status, result.message) == ("success", None)
    assert fake.bought() == {0: 1, 1: 1}


@every_kind
async def test_an_answer_cut_at_its_length(api: str, streaming: bool) -> None:
    """The engine is told, so that it runs none of its calls."""
    script = calling(ScriptedCall(name="pay", arguments='{"cents": 12'), finish="length")
    ran: list[int] = []

    def spy(cents: int) -> None:
        ran.append(cents)

    with FakeModel(script) as fake:
        async with (
            port_at(fake.url, api, streaming=streaming) as port,
            await Keeper.open("sqlite:///:memory:") as keeper,
        ):
            if api == "messages" and not streaming:
                return  # it has no text that could be cut there
            result = await keeper.run(settling(port, [Tool(spy, name="pay")]), "go", turn_id="t")
    assert (result.status, result.message) == ("success", None)
    assert ran == []
    assert "arguments may be cut" in json.dumps(fake.requests[1].body)


@every_kind
async def test_the_id_is_known_before_the_answer(api: str, streaming: bool) -> None:
    """Only OpenAI's Responses have one that can be asked for, and only where it comes before the answer."""
    known = Known()
    with FakeModel(saying(polls=2)) as fake:
        async with port_at(fake.url, api, streaming=streaming) as port:
            await port.invoke(asking(known=known))
    expected = ["resp_1"] if api == "background" or (api == "responses" and streaming) else []
    assert [one.id for one in known.references] == expected


async def test_what_is_not_stored_has_no_name() -> None:
    known = Known()
    with FakeModel(saying()) as fake:
        async with port_at(fake.url, "responses", store=False) as port:
            await port.invoke(asking(known=known))
    assert known.references == []
    assert fake.requests[0].body["store"] is False
    assert "metadata" not in fake.requests[0].body


@every_api
async def test_more_fields_of_a_request(api: str) -> None:
    """Options go along; one that the SDK does not know, or the port fills in, is refused when the port is made."""
    options: dict[str, Any] = {
        "service_tier": "auto",
        "extra_body": {"seed_of": "mine"},
        "extra_headers": {"x-mine": "1"},
    }
    if api != "messages":
        options["metadata"] = {"mine": "1"}
    with FakeModel(saying()) as fake:
        async with port_at(fake.url, api, options=options) as port:
            await port.invoke(asking())
        sent = fake.requests[0]
        assert (sent.body["service_tier"], sent.body["seed_of"], sent.invocation) == ("auto", "mine", "inv_1")
        if api != "messages":
            assert sent.body["metadata"]["mine"] == "1"
        for wrong in ({"temprature": 1}, {"stream": True}, {"model": "other"}):
            with pytest.raises(InvalidInput, match=r"options\."):
                async with port_at(fake.url, api, options=wrong):
                    pass


def test_background_needs_a_stored_response() -> None:
    with pytest.raises(InvalidInput, match="store"):
        OpenAIResponses(AsyncOpenAI(api_key=KEY), "m", store=False)


async def test_agents_take_them_as_they_are() -> None:
    """The default agent needs no look-up: one line to use a port."""
    with FakeModel(saying("Hello.")) as fake:
        async with port_at(fake.url, "chat") as port, await Keeper.open("sqlite:///:memory:") as keeper:
            assert (await keeper.run(Agent(port), "hi", turn_id="t")).output == "Hello."
