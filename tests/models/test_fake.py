"""The fake provider by itself: it refuses what real ones refuse, so that what it accepts means something; and it counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.models.clients import calling, saying
from turnkeeper.errors import InvalidInput
from turnkeeper.models.fake import FakeModel, Fault, Script, ScriptedCall, ScriptedRound, load_script

THINKING = Script(
    rounds=[ScriptedRound(thinking="Hm.", calls=[ScriptedCall(name="f", id="c")]), ScriptedRound(text="Done.")]
)
FIRST: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": [{"role": "user", "content": "hi"}]},
    "/v1/messages": {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
}


def following(path: str, answer: dict[str, Any], result_of: str = "c") -> dict[str, Any]:
    """The request behind a round of tools, as it has to be."""
    body = FIRST[path]
    if path == "/v1/chat/completions":
        result = {"role": "tool", "tool_call_id": result_of, "content": "ok"}
        return {"messages": [*body["messages"], answer["choices"][0]["message"], result]}
    if path == "/v1/responses":
        result = {"type": "function_call_output", "call_id": result_of, "output": "ok"}
        return {"input": [*body["input"], *answer["output"], result]}
    result = {"type": "tool_result", "tool_use_id": result_of, "content": "ok"}
    said = [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
    return {**body, "messages": [*body["messages"], *said]}


def thoughts_of(body: dict[str, Any]) -> dict[str, Any]:
    """What holds the model's reasoning in such a request."""
    if "input" in body:
        return body["input"][1]
    message = body["messages"][1]
    return message if "reasoning_content" in message else message["content"][0]


@pytest.mark.parametrize("path", list(FIRST))
def test_it_refuses_what_was_changed_on_the_way(path: str) -> None:
    with FakeModel(THINKING) as fake, httpx2.Client(base_url=fake.url) as client:
        answer = client.post(path, json=FIRST[path]).json()
        assert client.post(path, json=following(path, answer)).status_code == 200
        assert client.post(path, json=following(path, answer, "other")).status_code == 400, (
            "a result that nobody asked for"
        )
        for field in ("reasoning_content", "thinking", "signature", "encrypted_content"):
            body = following(path, client.post(path, json=FIRST[path]).json())
            thoughts = thoughts_of(body)
            if field in thoughts:
                thoughts[field] += " "
                refused = client.post(path, json=body)
                assert refused.status_code == 400, field
                assert refused.json()["error"]["type"] == "invalid_request_error"
        body = following(path, answer)
        conversation = "input" if "input" in body else "messages"
        unanswered = {**body, conversation: [*body[conversation][:-1], FIRST[path][conversation][0]]}
        assert client.post(path, json=unanswered).status_code == 400, "a call without its result"


@pytest.mark.parametrize("path", list(FIRST))
def test_the_bill(path: str) -> None:
    """What was made is on it, once for each time; what was refused is not."""
    script = saying("Hi.", Fault(status=500), Fault(status=504, after_work=True))
    headers = {"x-client-request-id": "mine", "authorization": "Bearer sk-1234"}
    with FakeModel(script) as fake, httpx2.Client(base_url=fake.url, headers=headers) as client:
        assert [client.post(path, json=FIRST[path]).status_code for _ in range(4)] == [500, 504, 200, 200]
        bill = client.get("/bill").json()
        asked = client.get("/requests").json()
    assert [(one["round"], one["invocation"]) for one in bill] == [(0, "mine")] * 3
    assert len({one["answer"] for one in bill}) == 3
    assert fake.bought() == {0: 3}
    assert len(asked) == 4
    assert "sk-1234" not in str(asked)


def test_what_no_script_has() -> None:
    with FakeModel(Script(rounds=[])) as fake, httpx2.Client(base_url=fake.url) as client:
        for path, body in FIRST.items():
            refused = client.post(path, json=body)
            assert (refused.status_code, "the script ends" in refused.text) == (400, True)
            assert client.post(path, content=b"{").status_code == 400
        assert client.get("/v1/responses/resp_9").status_code == 404
        assert client.post("/v1/responses/resp_9/cancel").status_code == 404
        assert client.post("/v1/messages", json={"messages": []}).status_code == 400
        assert fake.bill == []


def test_a_response_is_kept_only_where_it_would_be() -> None:
    """In the background at once; otherwise if its stream was read to its end, and nobody said no."""
    script = Script(rounds=[ScriptedRound(text="Hi.", faults=[Fault(end_after=3)])])
    with FakeModel(script) as fake, httpx2.Client(base_url=fake.openai_url) as client:
        body = FIRST["/v1/responses"]

        def status(answer: int) -> int:
            return client.get(f"/responses/resp_{answer}").status_code

        client.post("/responses", json={**body, "stream": True})
        assert status(1) == 404, "its stream ended too early"
        client.post("/responses", json={**body, "stream": True})
        assert status(2) == 200
        client.post("/responses", json={**body, "store": False})
        assert status(3) == 404
        client.post("/responses", json={**body, "background": True})
        assert status(4) == 200


def test_scripts_from_files(tmp_path: Path) -> None:
    expected = calling(ScriptedCall(name="pay", arguments='{"cents": '), faults=[Fault(status=429)])
    yaml = tmp_path / "script.yaml"
    yaml.write_text(
        """
        rounds:
          - calls:
              - name: pay
                arguments: '{"cents": '
            faults:
              - status: 429
          - text: Done.
        """
    )
    assert load_script(yaml) == expected
    json = tmp_path / "script.json"
    json.write_text('{"rounds": [{"calls": [{"name": "f", "arguments": {"a": 1}}]}]}')
    assert load_script(json).rounds[0].calls[0].text == '{"a":1}'
    json.write_text('{"rounds": [{"txt": "a"}]}')
    with pytest.raises(InvalidInput, match=r"txt.*\$\.rounds\[0\]"):
        load_script(json)
    with pytest.raises(InvalidInput, match="cannot be read"):
        load_script(tmp_path / "missing.json")
