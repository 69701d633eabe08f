"""What a turn log holds, read as the engine's types: also where the turn was driven by hand, in a chat form."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from turnkeeper.engine.transcript import result_text
from turnkeeper.engine.wire import (
    Message,
    ModelInvocationResponse,
    ModelToolRequest,
    ModelToolResult,
    Outcome,
    message_from,
    to_builtins,
)
from turnkeeper.errors import InvalidInput, SchemaConflict
from turnkeeper.log import values
from turnkeeper.turn.identity import raw_calls
from turnkeeper.turn.state import Round, TurnState, thaw_messages

_WIRE_FIELDS = frozenset({"output", "toolRequests", "assistantMessages"})

UNKNOWN_TEXT = (
    "The outcome of this call is not known: it may have happened or not. It was not tried again. Do not assume either."
)
"""What the model is told of an effect whose outcome stays unknown."""


def stored_messages(state: TurnState) -> list[Message]:
    """The canonical transcript."""
    return [message_from(message, f"messages[{i}]") for i, message in enumerate(thaw_messages(state.transcript))]


def stored_response(round_: Round) -> ModelInvocationResponse:
    """The canonical decision of a round."""
    return stored_response_from(values.thaw(round_.response), f"decision of round {round_.index}")


def stored_response_from(response: dict[str, Any], field: str) -> ModelInvocationResponse:
    """A decision from its wire form, or from an assistant message in a chat form."""
    if response.keys() & _WIRE_FIELDS:
        try:
            return msgspec.convert(response, ModelInvocationResponse)
        except msgspec.ValidationError as e:
            raise SchemaConflict(field, str(e)) from e
    requests = [
        ModelToolRequest(id=call_id, name=name, arguments=arguments) for call_id, name, arguments in raw_calls(response)
    ]
    message = message_from({"role": "assistant", **response}, field)
    metadata = {name: item for name, item in message.metadata.items() if name != "tool_calls"}
    spoken = Message(role=message.role, parts=message.parts, metadata=metadata)
    return ModelInvocationResponse(
        output=None if requests else message.text or None, assistant_messages=[spoken], tool_requests=requests
    )


def stored_result(frame: bytes, request_id: str, name: str) -> ModelToolResult:
    """The result of a slot."""
    record: Any = values.thaw(frame)
    if isinstance(record, dict) and "outcome" in record:
        return _result_from(cast("dict[str, Any]", record), name)
    output: Any = cast("dict[str, Any]", record).get("content", record) if isinstance(record, dict) else record
    return ModelToolResult(request_id=request_id, name=name, outcome=Outcome.SUCCESS, output=output)


def _result_from(record: dict[str, Any], name: str) -> ModelToolResult:
    try:
        return msgspec.convert(record, ModelToolResult)
    except msgspec.ValidationError as e:
        raise SchemaConflict(f"result of {name}", str(e)) from e


def stored_form(result: ModelToolResult, field: str) -> dict[str, Any]:
    """A result as a slot keeps it.

    Raises:
        InvalidInput: its output cannot be kept exactly, or has no form that a model can be shown; names the path.
    """
    # The output as it is: whatever else would be made of it on the way (a list of a set) is not what the tool gave.
    record = {**to_builtins(msgspec.structs.replace(result, output=None)), "output": result.output}
    kept: dict[str, Any] = values.storable(record, field)
    try:
        result_text(result.output)
    except (TypeError, ValueError) as e:
        raise InvalidInput(f"{field}.output", f"has no form in JSON ({e})") from e
    return kept


def kept_result(result: ModelToolResult, field: str) -> tuple[ModelToolResult, bytes]:
    """A result as it comes back from its slot, and the slot's frame. Raises what `stored_form` raises, and `ValueTooLarge`."""
    record = stored_form(result, field)
    return _result_from(record, result.name), values.seal(record, field)


def final_text(response: ModelInvocationResponse) -> str | None:
    """The text of a final answer, or None where the model had nothing to say."""
    if isinstance(response.output, str):
        return response.output
    if response.output is not None:
        return msgspec.json.encode(response.output).decode()
    spoken = [message.text for message in response.assistant_messages if message.parts]
    return spoken[-1] if spoken else None
