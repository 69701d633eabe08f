"""What a failed call says (engine-contract.md 2.17): surely not answered, perhaps answered, refused. And never a key."""

from __future__ import annotations

import json
import logging
import traceback
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.cases.charge_server import unused_port
from tests.models.clients import APIS, KINDS, asking, port_at, saying, settling, short
from turnkeeper import AnswerCut, Keeper, OutcomeUnknown
from turnkeeper.engine.contract_ports import PortError
from turnkeeper.models.failures import (
    AnswerLost,
    Caller,
    ModelRefused,
    ModelUnavailable,
    retry_after,
)
from turnkeeper.models.fake import FakeModel, Fault
from turnkeeper.models.openai import OpenAIChat

pytestmark = pytest.mark.anyio

every_kind = pytest.mark.parametrize(("api", "streaming"), KINDS)
every_api = pytest.mark.parametrize("api", APIS)
STREAMS = [api for api in APIS if api not in ("background", "stored chat")]
"""What cannot fetch an answer that it lost."""


async def failures(
    api: str, *faults: Fault, streaming: bool = True, timeout: Any = 5.0, **more: Any
) -> tuple[list[Any], FakeModel]:
    """What a port raises at each fault. The provider is asked once for each, though the client's own retries are on."""
    errors: list[Any] = []
    with FakeModel(saying("Hello.", *faults, **more)) as fake:
        async with port_at(fake.url, api, streaming=streaming, timeout=timeout) as port:
            for _ in faults:
                with pytest.raises(Exception) as raised:  # noqa: PT011  # looked at by who asked
                    await port.invoke(asking())
                errors.append(raised.value)
                told = "".join(traceback.format_exception(raised.value)) + repr(vars(raised.value))
                assert "verysecret" not in told
    assert len(fake.requests) == len(faults)
    return errors, fake


async def failed(api: str, fault: Fault, **more: Any) -> tuple[Any, FakeModel]:
    """What a port raises where the fault meets its call."""
    errors, fake = await failures(api, fault, **more)
    return errors[0], fake


# --- surely not answered -------------------------------------------------------------------------------------


@every_kind
async def test_the_provider_says_that_it_has_none(api: str, streaming: bool) -> None:
    """Another attempt is allowed, no earlier than the provider wants."""
    statuses = (429, 408, 409, 500, 503, 529)
    errors, fake = await failures(
        api, *(Fault(status=status, retry_after=1.5) for status in statuses), streaming=streaming
    )
    for error, status in zip(errors, statuses, strict=True):
        assert isinstance(error, ModelUnavailable)
        assert (error.outcome_unknown, error.configuration_error) == (False, False)
        assert (error.status, error.retry_after, error.request_id) == (status, 1.5, "req_fake")
    assert fake.bill == []


@every_api
async def test_nobody_listens(api: str) -> None:
    """A refused connection: nothing was sent."""
    async with port_at(f"http://127.0.0.1:{unused_port()}", api) as port:
        with pytest.raises(ModelUnavailable, match="ConnectError") as raised:
            await port.invoke(asking())
    assert not raised.value.outcome_unknown


@every_api
async def test_no_such_host(api: str) -> None:
    """A failed name look-up."""
    async with port_at("http://no-such-host.invalid", api) as port:
        with pytest.raises(ModelUnavailable):
            await port.invoke(asking())


async def test_the_connection_takes_too_long() -> None:
    """A connect timeout, by the SDK's shape of it."""

    class ConnectTimeout(Exception):
        """As HTTP libraries call it."""

    class APIConnectionError(Exception):
        """As both SDKs call it."""

    class APITimeoutError(APIConnectionError):
        """As both SDKs call it."""

    error = APITimeoutError("Request timed out.")
    error.__cause__ = ConnectTimeout("")
    assert isinstance(Caller("openai", None).judged(error, "request_dispatch"), ModelUnavailable)
    error.__cause__ = TimeoutError("")
    assert isinstance(Caller("openai", None).judged(error, "request_dispatch"), AnswerLost)


@every_api
async def test_the_provider_gives_up_in_its_stream(api: str) -> None:
    """It says itself that there is no answer. (In the background it has none to give up before it has said its id.)"""
    error, _ = await failed(api, Fault(error_after=0 if api == "background" else 3))
    assert isinstance(error, ModelUnavailable)
    assert not error.outcome_unknown
    assert "Overloaded" in str(error)


# --- perhaps answered ----------------------------------------------------------------------------------------


@every_kind
async def test_a_gateway_did_not_wait_for_it(api: str, streaming: bool) -> None:
    """504 after the work: the answer is on the bill."""
    error, fake = await failed(api, Fault(status=504, after_work=True), streaming=streaming)
    assert isinstance(error, AnswerLost)
    assert error.outcome_unknown
    assert (error.status, error.phase) == (504, "request_dispatch")
    assert error.metadata == {
        "provider": "anthropic" if api == "messages" else "openai",
        "phase": "request_dispatch",
        "requestId": "req_fake",
    }
    assert fake.bought() == {0: 1}


@every_kind
async def test_the_connection_is_lost_behind_the_request(api: str, streaming: bool) -> None:
    error, fake = await failed(api, Fault(reset=True), streaming=streaming)
    assert isinstance(error, AnswerLost)
    assert (error.outcome_unknown, error.phase) == (True, "request_dispatch")
    assert fake.bought() == {0: 1}


@every_kind
async def test_the_client_waits_no_longer(api: str, streaming: bool) -> None:
    """A read timeout does not stop the provider."""
    error, fake = await failed(api, Fault(slow=1.0), streaming=streaming, timeout=short(0.1))
    assert isinstance(error, AnswerLost)
    assert error.outcome_unknown
    assert fake.bought() == {0: 1}


@pytest.mark.parametrize("api", STREAMS)
async def test_a_stream_that_is_cut(api: str) -> None:
    """At any event: what came of it is not used."""
    errors, fake = await failures(api, *(Fault(cut_after=event) for event in range(6)))
    for error in errors:
        assert isinstance(error, AnswerLost)
        assert (error.outcome_unknown, error.phase) == (True, "stream_transport")
    assert fake.bought() == {0: 6}


@pytest.mark.parametrize("api", STREAMS)
async def test_a_stream_that_falls_silent(api: str) -> None:
    error, _ = await failed(api, Fault(stall_after=2), timeout=short(0.1))
    assert isinstance(error, AnswerLost)
    assert error.phase == "stream_transport"


@pytest.mark.parametrize("api", STREAMS)
async def test_a_stream_that_ends_too_early(api: str) -> None:
    """In an orderly way, as a proxy does it: cut all the same."""
    errors, _ = await failures(api, *(Fault(end_after=event) for event in range(4)))
    assert [type(error) for error in errors] == [AnswerCut] * 4


@every_kind
async def test_an_answer_that_cannot_be_read(api: str, streaming: bool) -> None:
    """2.17: a 2xx body that is none of the provider's may stand for an answer."""
    error, _ = await failed(api, Fault(garbage=True), streaming=streaming)
    assert isinstance(error, AnswerLost)
    assert error.phase == ("stream_transport" if streaming else "response_body")


@pytest.mark.parametrize("api", STREAMS)
async def test_an_answer_that_is_cut_in_its_middle(api: str) -> None:
    error, _ = await failed(api, Fault(cut_after=0), streaming=False)
    assert isinstance(error, AnswerLost)


@pytest.mark.parametrize("strange", [{}, {"choices": []}, {"choices": [{"message": {"tool_calls": [{"id": "a"}]}}]}])
async def test_json_that_is_no_answer(strange: dict[str, Any]) -> None:
    from turnkeeper.models.anthropic_blocks import answer_of
    from turnkeeper.models.openai_chat import chat_answer
    from turnkeeper.models.openai_responses import response_answer

    caller = Caller("p", None)
    done = {"status": "completed", "output": [{"type": "function_call"}], "content": [{"type": "tool_use"}]}
    for answer, told in ((chat_answer, strange), (response_answer, done), (answer_of, done), (answer_of, {})):
        with pytest.raises(AnswerLost, match="cannot be read"):
            answer(told, caller)


# --- refused -------------------------------------------------------------------------------------------------


@every_kind
async def test_the_request_is_refused(api: str, streaming: bool) -> None:
    """Another attempt gets the same answer: the turn fails at once, without another request."""
    statuses = (400, 401, 403, 404, 413, 422)
    errors, fake = await failures(api, *(Fault(status=status) for status in statuses), streaming=streaming)
    for error, status in zip(errors, statuses, strict=True):
        assert isinstance(error, ModelRefused)
        assert (error.configuration_error, error.outcome_unknown, error.status) == (True, False, status)
    assert fake.bill == []


@every_kind
@pytest.mark.parametrize("finish", ["refusal", "content_filter"])
async def test_the_model_refuses(api: str, streaming: bool, finish: str) -> None:
    """1.17: determinate. It is not asked the same again."""
    error, _ = await failed(api, Fault(), streaming=streaming, finish=finish)
    assert isinstance(error, ModelRefused)
    assert error.configuration_error
    assert error.code == ("refusal" if api == "messages" else finish)


async def test_a_server_at_another_kind_of_address() -> None:
    async with port_at("ftp://127.0.0.1", "chat") as port:
        with pytest.raises(ModelRefused, match="UnsupportedProtocol"):
            await port.invoke(asking())


async def test_what_the_engine_makes_of_it(caplog: pytest.LogCaptureFixture) -> None:
    """Retried, stopped for, given up: by its kind alone. Nothing of the key gets into log, result or checkpoint."""
    caplog.set_level(logging.DEBUG)
    outcomes: dict[str, tuple[Any, ...]] = {}
    for name, fault in (
        ("retried", Fault(status=429, retry_after=0.001)),
        ("stopped", Fault(cut_after=2)),
        ("refused", Fault(status=401)),
    ):
        with FakeModel(saying("Hello.", fault)) as fake:
            async with port_at(fake.url, "chat") as port, await Keeper.open("sqlite:///:memory:") as keeper:
                result = await keeper.run(settling(port), "hi", turn_id="t")
                checkpoint = await keeper.checkpoint("t")
                assert checkpoint is not None
                told = (
                    repr(checkpoint) + repr(result) + repr(await keeper.history("t")) + repr(await keeper.events("t"))
                )
                assert "verysecret" not in told
        outcomes[name] = (result.status, result.error_kind, len(fake.requests))
    assert outcomes == {
        "retried": ("success", None, 2),
        "stopped": ("reconciliation_required", "model_outcome_unknown", 1),
        "refused": ("failed", "model_error", 1),
    }
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("turnkeeper")]
    assert ours
    assert not any("verysecret" in one for one in ours)


# --- keys ----------------------------------------------------------------------------------------------------


async def test_a_provider_that_echoes_the_key() -> None:
    """It says which key was wrong; we do not, nor a part of it that another server masks in its own way."""
    error, _ = await failed("chat", Fault(status=401))
    assert "Incorrect API key provided: [key]" in str(error)
    client = AsyncOpenAI(api_key="plainpassword", default_headers={"X-My-Token": "gateway-secret"})
    said = Caller("p", client).clean("plainpassword, gateway-secret, sk-abc***xyz99, Bearer abc.def and text")
    assert said == "[key], [key], [key], Bearer [key] and text"
    await client.close()


async def test_a_client_without_a_key() -> None:
    """The SDK refuses by itself, before it sends anything."""

    async def no_key() -> str:
        return ""

    async with AsyncOpenAI(api_key=no_key, base_url=f"http://127.0.0.1:{unused_port()}/v1") as client:
        with pytest.raises(ModelRefused, match="authentication"):
            await OpenAIChat(client, "m").invoke(asking())


# --- small rules ---------------------------------------------------------------------------------------------


def test_when_to_come_again() -> None:
    assert retry_after({"retry-after": "2"}) == 2.0
    assert retry_after({"retry-after-ms": "250", "retry-after": "2"}) == 0.25
    assert retry_after({"retry-after": "Thu, 01 Jan 2015 00:00:00 GMT"}) == 0.0
    later = retry_after({"retry-after": "Fri, 01 Jan 2100 00:00:00 GMT"})
    assert later is not None
    assert later > 1000
    assert retry_after({"retry-after": "soon"}) is None
    assert retry_after({}) is None


def test_others_errors_stay_what_they_are() -> None:
    error = KeyError("a bug")
    assert Caller("p", None).judged(error, "request_dispatch") is error


def test_a_port_error_says_what_2_17_wants() -> None:
    for kind, flags in (
        (ModelRefused("p", "x"), (False, True)),
        (ModelUnavailable("p", "x"), (False, False)),
        (AnswerLost("p", "x", "response_body"), (True, False)),
    ):
        assert isinstance(kind, PortError)
        assert (kind.outcome_unknown, kind.configuration_error) == flags
        assert not isinstance(kind, OutcomeUnknown)
        json.dumps(kind.metadata)
