"""An answer that is lost is fetched from the provider that keeps it, instead of being bought again."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from tests.cases.charge_server import unused_port
from tests.models.clients import Known, asking, calling, port_at, saying, settling, short
from turnkeeper import DidNotHappen, Happened, Keeper, StillUnknown, tool
from turnkeeper.engine.wire import DelegatedStateReference
from turnkeeper.models.failures import AnswerLost, ModelRefused, ModelUnavailable
from turnkeeper.models.fake import FakeModel, Fault, Script, ScriptedCall, ScriptedRound

pytestmark = pytest.mark.anyio

RESPONSE = DelegatedStateReference(provider="openai", kind="response", id="resp_1")


@pytest.mark.parametrize(
    "fault",
    [Fault(cut_after=2), Fault(cut_after=4), Fault(end_after=3), Fault(stall_after=3), Fault(error_after=3)],
    ids=["cut", "cut later", "ended early", "silent", "given up"],
)
async def test_a_background_response_goes_on_without_its_stream(fault: Fault) -> None:
    """The call is not even in doubt: its id is known, so it is asked for until it is ready."""
    known = Known()
    with FakeModel(saying("Hello.", fault, polls=3)) as fake:
        async with port_at(fake.url, "background", timeout=short(0.1)) as port:
            answer = await port.invoke(asking(known=known))
    assert answer.output == "Hello."
    assert known.references == [RESPONSE]
    assert fake.bought() == {0: 1}


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("fault", [Fault(reset=True), Fault(status=504, after_work=True), Fault(garbage=True)])
async def test_a_stored_completion_is_found_by_its_invocation(fault: Fault, streaming: bool) -> None:
    """Nothing of the answer came, not even its id."""
    with FakeModel(saying("Hello.", fault)) as fake:
        async with port_at(fake.url, "stored chat", streaming=streaming) as port:
            answer = await port.invoke(asking())
    assert (answer.output, answer.metadata["responseId"]) == ("Hello.", "chatcmpl-1")
    assert fake.bought() == {0: 1}


@pytest.mark.parametrize("fault", [Fault(cut_after=2), Fault(end_after=2)])
async def test_a_stored_completion_whose_stream_was_cut(fault: Fault) -> None:
    with FakeModel(saying("Hello.", fault)) as fake:
        async with port_at(fake.url, "stored chat") as port:
            assert (await port.invoke(asking())).output == "Hello."
    assert fake.bought() == {0: 1}


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_where_nobody_can_be_asked_the_turn_stops(api: str) -> None:
    """The answer is not bought again; somebody settles it, with what the provider's own log says."""
    script = Script(rounds=[ScriptedRound(text="Hello.", faults=[Fault(cut_after=3)])])
    with FakeModel(script) as fake:
        async with port_at(fake.url, api) as port, await Keeper.open("sqlite:///:memory:") as keeper:
            for _ in range(3):
                result = await keeper.run(settling(port), "hi", turn_id="t")
                assert (result.status, result.error_kind) == ("reconciliation_required", "model_outcome_unknown")
            assert fake.bought() == {0: 1}
            checkpoint = await keeper.checkpoint("t")
            await keeper.resolve_model("t", "did_not_happen", who="ann", why="the dashboard shows no answer")
            assert (await keeper.run(settling(port), "hi", turn_id="t")).output == "Hello."
    assert fake.bought() == {0: 2}, "as the operator wanted"
    assert checkpoint is not None
    assert checkpoint.model_reconciliation is not None
    told = checkpoint.model_reconciliation.metadata or {}
    assert (told["phase"], told.get("reference")) == (
        "stream_transport",
        {"provider": "openai", "kind": "response", "id": "resp_1"} if api == "responses" else None,
    )


async def test_a_later_process_fetches_it() -> None:
    """The first one is gone while the response is made, and nobody waits for it; the second one finds it ready, calls and all."""
    ran: list[int] = []

    @tool(replay_safe=True)
    def pay(cents: int) -> str:
        """Pay somebody."""
        ran.append(cents)
        return "paid"

    call = ScriptedCall(name="pay", arguments={"cents": 5})
    script = calling(call, text="I pay.", polls=2, faults=[Fault(cut_after=1)], look_up_faults=[Fault(status=500)])
    with FakeModel(script) as fake:
        async with await Keeper.open("sqlite:///:memory:") as keeper:
            async with port_at(fake.url, "background", longest_wait=0.0) as impatient:
                result = await keeper.run(settling(impatient, [pay]), "go", turn_id="t")
                assert result.status == "reconciliation_required"
            assert ran == []
            async with port_at(fake.url, "background") as port:
                result = await keeper.run(settling(port, [pay]), "go", turn_id="t")
    assert (result.status, result.output) == ("success", "Done.")
    assert ran == [5]
    assert fake.bought() == {0: 1, 1: 1}


# --- what a look-up can say ----------------------------------------------------------------------------------


async def test_a_look_up_without_a_name() -> None:
    """The process died before the provider said what it calls the response: nobody can ask for it."""
    async with port_at(f"http://127.0.0.1:{unused_port()}", "background") as port:
        for reference in (None, DelegatedStateReference(provider="other", kind="response", id="x")):
            found = await port.reconcile(asking(reference=reference))
            assert isinstance(found, StillUnknown)
            assert "not journaled" in found.evidence


async def test_a_look_up_that_finds_it() -> None:
    with FakeModel(saying("Hello.", Fault(), polls=3)) as fake:
        async with port_at(fake.url, "background", streaming=False, longest_wait=0.0) as port:
            with pytest.raises(AnswerLost, match="still running"):
                await port.invoke(asking())
        async with port_at(fake.url, "background") as port:
            found = await port.reconcile(asking(reference=RESPONSE))
    assert isinstance(found, Happened)
    assert found.result.output == "Hello."
    assert "resp_1" in found.evidence
    assert len(fake.bill) == 1


async def test_a_look_up_waits_no_longer_than_it_may() -> None:
    with FakeModel(saying(polls=10**9)) as fake:
        async with port_at(fake.url, "background", streaming=False, longest_wait=0.05) as port:
            with pytest.raises(AnswerLost):
                await port.invoke(asking())
            found = await port.reconcile(asking(reference=RESPONSE))
    assert isinstance(found, StillUnknown)
    assert "still running" in found.evidence


@pytest.mark.parametrize(("status", "known"), [(404, True), (401, True), (500, False)])
async def test_a_look_up_that_is_refused_knows_nothing(status: int, known: bool) -> None:
    """It was asked for before, so "not found" does not prove that it was not answered: it is kept for minutes only."""
    faults = [Fault(status=status)] * (1 if known else 10**4)
    with FakeModel(saying(polls=5, look_up_faults=faults)) as fake:
        async with port_at(fake.url, "background", streaming=False, longest_wait=0.05) as port:
            with pytest.raises(AnswerLost, match=str(status)):
                await port.invoke(asking())


async def test_a_look_up_survives_a_provider_that_stumbles() -> None:
    faults = [Fault(status=503), Fault(status=429), Fault(status=504)]
    with FakeModel(saying("Hello.", look_up_faults=faults)) as fake:
        async with port_at(fake.url, "background", streaming=False) as port:
            assert (await port.invoke(asking())).output == "Hello."


@pytest.mark.parametrize("finish", ["refusal", "content_filter"])
async def test_a_refusal_that_is_found_is_no_answer(finish: Any) -> None:
    """The call may be made again; it would be refused again."""
    script = Script(rounds=[ScriptedRound(text="No.", finish=finish, faults=[Fault(cut_after=2)] * 2)])
    with FakeModel(script) as fake:
        async with port_at(fake.url, "background") as port:
            with pytest.raises(ModelRefused):
                await port.invoke(asking())
            assert isinstance(await port.reconcile(asking(reference=RESPONSE)), DidNotHappen)
        async with port_at(fake.url, "stored chat") as port:
            with pytest.raises(AnswerLost):
                await port.invoke(asking())
            assert isinstance(await port.reconcile(asking()), DidNotHappen)


async def test_a_response_that_was_cancelled_did_not_happen() -> None:
    """By somebody in the provider's dashboard."""
    with FakeModel(saying(polls=10**9)) as fake:
        async with port_at(fake.url, "background", streaming=False, longest_wait=0.0) as port:
            with pytest.raises(AnswerLost):
                await port.invoke(asking())
            async with httpx2.AsyncClient() as client:
                await client.post(f"{fake.openai_url}/responses/resp_1/cancel")
            found = await port.reconcile(asking(reference=RESPONSE))
            assert isinstance(found, DidNotHappen)
            assert "cancelled" in found.evidence


async def test_a_stored_completion_that_is_not_there_proves_nothing() -> None:
    """Neither does a server that does not know the filter, or the listing."""
    with FakeModel(saying("Hello.", Fault(), Fault(), look_up_faults=[Fault(status=404)])) as fake:
        async with port_at(fake.url, "stored chat") as port:
            missing = await port.reconcile(asking())
            assert isinstance(missing, StillUnknown)
            assert "no stored answer" in missing.evidence
            await port.invoke(asking())
            refused = await port.reconcile(asking())
            assert isinstance(refused, StillUnknown)
            assert "404" in refused.evidence
            assert isinstance(await port.reconcile(asking()), Happened)
        async with port_at(fake.url, "chat") as port:
            assert isinstance(await port.reconcile(asking()), StillUnknown)
    async with port_at(f"http://127.0.0.1:{unused_port()}", "stored chat") as port:
        assert isinstance(await port.reconcile(asking()), StillUnknown)
        with pytest.raises(ModelUnavailable):
            await port.invoke(asking())
