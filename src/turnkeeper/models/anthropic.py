"""Models behind Anthropic's Messages API; needs the extra `anthropic`.

```python
from anthropic import AsyncAnthropic
from turnkeeper.models.anthropic import AnthropicMessages

agent = Agent(AnthropicMessages(AsyncAnthropic(), "claude-sonnet-5"), tools, unknown_model="reconcile")
```
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any, Final, cast

from turnkeeper.engine.contract_ports import ProviderChunk
from turnkeeper.engine.ports import AnswerCut, ModelRequest
from turnkeeper.engine.wire import ModelInvocationResponse, TextChunk, ThinkingChunk
from turnkeeper.models.anthropic_blocks import MessageStream, answer_of, block_tools, blocks_of
from turnkeeper.models.failures import Caller, MissingSdk, Phase, checked_options, raise_judged
from turnkeeper.models.streaming import events_of

try:
    from anthropic import AsyncAnthropic
    from anthropic.resources.messages import AsyncMessages
except ImportError as e:
    raise MissingSdk("anthropic", e) from e

PROVIDER: Final = "anthropic"
CLIENT_REQUEST_ID: Final = "X-Client-Request-Id"
_FILLED_IN: Final = ("model", "max_tokens", "messages", "system", "tools", "stream", "self")


class AnthropicMessages:
    """A model behind the Messages API, of Anthropic or of any server that speaks it: the client's `base_url` says which.

    The API keeps no answers and takes no idempotency key, so nobody can ask it what became of a call: an answer that is
    lost has to be settled by a person, or bought again.

    Args:
        client: the SDK's, with its key, address and timeouts. Its own retries are turned off.
        model: the model's name.
        max_tokens: most tokens of one answer; the API wants to be told.
        streaming: have the answer sent while it is made; the host's stream port sees it.
        options: more fields of each request, by the names of `client.messages.create`.

    Attributes:
        provider, model: names, for telemetry.
    """

    provider: Final = PROVIDER

    def __init__(
        self,
        client: AsyncAnthropic,
        model: str,
        *,
        max_tokens: int = 8192,
        streaming: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        # An attempt that the SDK makes by itself is one that no log knows of: attempts are the engine's.
        self._client = client.with_options(max_retries=0)
        self.model: Final = model
        self._fields: dict[str, Any] = {
            "model": model,
            "max_tokens": max_tokens,
            **checked_options(options, inspect.signature(AsyncMessages.create).parameters, _FILLED_IN),
        }
        self._headers: dict[str, str] = self._fields.pop("extra_headers", None) or {}
        self._streaming = streaming
        self._caller = Caller(PROVIDER, self._client)

    async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
        """See `turnkeeper.engine.ports.ModelPort.invoke`.

        Raises:
            ModelRefused, ModelUnavailable, AnswerLost: what can be known of the call.
            AnswerCut: the stream ended before the answer did.
        """
        conversation = blocks_of(request.messages, PROVIDER)
        fields: dict[str, Any] = {
            # Where it is given, the SDK does not refuse long answers that are not streamed.
            "timeout": self._client.timeout,
            **self._fields,
            "messages": conversation.messages,
            # For the logs of proxies: the API itself does not look at it.
            "extra_headers": {CLIENT_REQUEST_ID: request.invocation_id, **self._headers},
        }
        if conversation.system:
            fields["system"] = conversation.system
        if request.tools:
            fields["tools"] = block_tools(request.tools)
        return await (self._streamed(request, fields) if self._streaming else self._whole(fields))

    async def _whole(self, fields: dict[str, Any]) -> ModelInvocationResponse:
        phase: Phase = "request_dispatch"
        try:
            create: Any = self._client.messages.with_raw_response.create
            raw = await create(**fields)
            phase = "response_body"
            value: Any = json.loads(await raw.read())
        except Exception as e:
            raise_judged(self._caller, e, phase)
        if not isinstance(value, dict):
            raise self._caller.unreadable("it is no JSON object")
        return answer_of(cast("dict[str, Any]", value), self._caller)

    async def _streamed(self, request: ModelRequest, fields: dict[str, Any]) -> ModelInvocationResponse:
        stream = MessageStream()
        phase: Phase = "request_dispatch"
        try:
            async with events_of(self._client.messages.create(**fields, stream=True)) as events:
                phase = "stream_transport"
                async for event in events:
                    told: dict[str, Any] = event.to_dict()
                    stream.feed(told)
                    await request.stream.emit(_chunk_of(told))
        except Exception as e:
            raise_judged(self._caller, e, phase)
        if not stream.ended:
            raise AnswerCut("the stream ended before the message did")
        return answer_of(stream.message, self._caller, stream.texts)


def _chunk_of(event: dict[str, Any]) -> TextChunk | ThinkingChunk | ProviderChunk:
    """What the host is shown of an event."""
    match event.get("delta"):
        case {"type": "text_delta", "text": str(text)}:
            return TextChunk(value=text)
        case {"type": "thinking_delta", "thinking": str(thinking)}:
            return ThinkingChunk(value=thinking)
        case _:
            return ProviderChunk(event)
