"""Models behind OpenAI's APIs, and behind every server that speaks Chat Completions; needs the extra `openai`.

```python
from openai import AsyncOpenAI
from turnkeeper.models.openai import OpenAIResponses

model = OpenAIResponses(AsyncOpenAI(), "gpt-5.5")
agent = Agent(model, tools, unknown_model="reconcile", reconcile_model=model.reconcile)
```
"""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final, cast

import anyio

from turnkeeper.engine.contract_ports import ProviderChunk
from turnkeeper.engine.outcomes import DidNotHappen, Happened, LookedUp, StillUnknown
from turnkeeper.engine.ports import AnswerCut, ModelRequest
from turnkeeper.engine.wire import DelegatedStateReference, ModelInvocationResponse, TextChunk, ThinkingChunk
from turnkeeper.errors import InvalidInput
from turnkeeper.models.failures import AnswerLost, Caller, MissingSdk, ModelError, Phase, checked_options, raise_judged
from turnkeeper.models.openai_chat import chat_answer, chat_messages, chat_tools
from turnkeeper.models.openai_responses import ENDS, RUNNING, input_items, response_answer, response_tools
from turnkeeper.models.openai_stream import OpenAIStream
from turnkeeper.models.streaming import events_of

try:
    from openai import AsyncOpenAI
    from openai.resources.chat.completions import AsyncCompletions
    from openai.resources.responses import AsyncResponses
except ImportError as e:
    raise MissingSdk("openai", e) from e

PROVIDER: Final = "openai"
CLIENT_REQUEST_ID: Final = "X-Client-Request-Id"
"""OpenAI keeps it with its log of the request, for its support."""
METADATA: Final = "turnkeeper_invocation_id"
"""The name, in the metadata of what OpenAI stores, under which a call's invocation id stands."""
_FILLED_IN: Final = ("model", "messages", "input", "tools", "stream", "store", "background", "metadata", "n", "self")


class _Port:
    """What both of OpenAI's APIs have in common.

    Attributes:
        provider, model: names, for telemetry.
    """

    provider: Final = PROVIDER

    def __init__(self, client: AsyncOpenAI, model: str, options: Mapping[str, Any] | None, method: Any) -> None:
        # An attempt that the SDK makes by itself is one that no log knows of: attempts are the engine's.
        self._client = client.with_options(max_retries=0)
        self.model: Final = model
        self._metadata: dict[str, str] = dict((options or {}).get("metadata") or {})
        given = {name: value for name, value in (options or {}).items() if name != "metadata"}
        self._options = checked_options(given, inspect.signature(method).parameters, _FILLED_IN)
        self._headers: dict[str, str] = self._options.pop("extra_headers", None) or {}
        self._caller = Caller(PROVIDER, self._client)

    def _marked(self, request: ModelRequest, *, stored: bool) -> dict[str, Any]:
        """The fields of every request. Its invocation id is in OpenAI's own log, and with what OpenAI stores of it."""
        headers = {CLIENT_REQUEST_ID: request.invocation_id, **self._headers}
        marked: dict[str, Any] = {**self._options, "model": self.model, "extra_headers": headers}
        metadata = {**self._metadata, **({METADATA: request.invocation_id} if stored else {})}
        return {**marked, "metadata": metadata} if metadata else marked

    async def _whole(self, method: Any, **fields: Any) -> dict[str, Any]:
        """The JSON object that a method of the SDK brings, as it came: what the SDK does not know of it is kept."""
        phase: Phase = "request_dispatch"
        try:
            raw = await method(**fields)
            phase = "response_body"
            value: Any = json.loads(raw.content)
        except Exception as e:
            raise_judged(self._caller, e, phase)
        if not isinstance(value, dict):
            raise self._caller.unreadable("it is no JSON object")
        return cast("dict[str, Any]", value)

    async def _events(self, method: Any, **fields: Any) -> AsyncGenerator[dict[str, Any]]:
        """The events of a stream, as they came."""
        phase: Phase = "request_dispatch"
        try:
            async with events_of(method(**fields, stream=True)) as events:
                phase = "stream_transport"
                async for event in events:
                    yield event.to_dict()
        except Exception as e:
            raise_judged(self._caller, e, phase)


class OpenAIChat(_Port):
    """A model behind Chat Completions, of OpenAI or of any server that speaks it: the client's `base_url` says which.

    With `store=True`, which OpenAI knows, a lost answer can be looked for by its invocation id: `reconcile`.

    Args:
        client: the SDK's, with its key, address and timeouts. Its own retries are turned off.
        model: the model's name.
        streaming: have the answer sent while it is made; the host's stream port sees it.
        store: have OpenAI keep the answer, so that `reconcile` can find it.
        options: more fields of each request, by the names of `client.chat.completions.create`.
    """

    def __init__(
        self,
        client: AsyncOpenAI,
        model: str,
        *,
        streaming: bool = True,
        store: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(client, model, options, AsyncCompletions.create)
        self._streaming = streaming
        self._store = store

    async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
        """See `turnkeeper.engine.ports.ModelPort.invoke`.

        Raises:
            ModelRefused, ModelUnavailable, AnswerLost: what can be known of the call.
            AnswerCut: the stream ended before the answer did.
        """
        fields = self._marked(request, stored=self._store)
        fields["messages"] = chat_messages(request.messages, PROVIDER)
        if request.tools:
            fields["tools"] = chat_tools(request.tools)
        if self._store:
            fields["store"] = True
        try:
            if self._streaming:
                return await self._streamed(request, {"stream_options": {"include_usage": True}, **fields})
            create = self._client.chat.completions.with_raw_response.create
            return chat_answer(await self._whole(create, **fields), self._caller)
        except (AnswerLost, AnswerCut):
            found = await self.reconcile(request) if self._store else None
            if isinstance(found, Happened):
                return cast("ModelInvocationResponse", found.result)
            raise

    async def _streamed(self, request: ModelRequest, fields: dict[str, Any]) -> ModelInvocationResponse:
        stream = OpenAIStream(self._caller)
        async with aclosing(self._events(self._client.chat.completions.create, **fields)) as events:
            async for event in events:
                said = [one for one in stream.feed(event) if isinstance(one, TextChunk | ThinkingChunk)]
                for chunk in said or [ProviderChunk(event)]:
                    await request.stream.emit(chunk)
        stream.end()
        return stream.response()

    async def reconcile(self, request: ModelRequest) -> LookedUp:
        """Look for the answer to a call among what OpenAI stores, by its invocation id: `Agent(reconcile_model=…)`.

        That it is not there proves nothing: it may still be made, or was not stored.
        """
        if not self._store:
            return StillUnknown("the answer was not stored at the provider: see `store`")
        listing = self._client.chat.completions.with_raw_response.list
        try:
            page = await self._whole(listing, metadata={METADATA: request.invocation_id}, limit=20)
            stored = cast("list[dict[str, Any]]", page.get("data") or [])
            # A server that does not know the filter gives others' answers.
            mark = {METADATA: request.invocation_id}
            found = [one for one in stored if mark.items() <= (one.get("metadata") or {}).items()]
            if not found:
                return StillUnknown("the provider has no stored answer with its invocation id, or not yet")
        except ModelError as e:
            return StillUnknown(str(e))
        return _looked_up(found[0], chat_answer, self._caller)


class OpenAIResponses(_Port):
    """A model behind OpenAI's Responses API.

    In background mode, the default, the provider goes on with an answer whatever becomes of who asked for it. Its id is
    journaled as soon as the provider tells it, so that a later process fetches the answer with `reconcile`.

    Args:
        client: the SDK's, with its key, address and timeouts. Its own retries are turned off.
        model: the model's name.
        background: use background mode, which stores the response at the provider. Servers that do not know it need False.
        streaming: have the answer sent while it is made; the host's stream port sees it.
        store: have the response stored; None leaves that to the provider. Background mode needs it stored.
        poll_seconds: the pause between two looks at a response that is not ready.
        longest_wait: seconds after which a response that is still not ready counts as unknown.
        options: more fields of each request, by the names of `client.responses.create`.
    """

    def __init__(
        self,
        client: AsyncOpenAI,
        model: str,
        *,
        background: bool = True,
        streaming: bool = True,
        store: bool | None = None,
        poll_seconds: float = 2.0,
        longest_wait: float = 3600.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if background and store is False:
            raise InvalidInput("store", "background mode works only with responses that are stored")
        super().__init__(client, model, options, AsyncResponses.create)
        self._background = background
        self._streaming = streaming
        self._store = True if background else store
        self._poll_seconds = poll_seconds
        self._longest_wait = longest_wait

    async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
        """See `turnkeeper.engine.ports.ModelPort.invoke`.

        Raises:
            ModelRefused, ModelUnavailable, AnswerLost: what can be known of the call.
            AnswerCut: the stream ended before the answer did.
        """
        fields = self._marked(request, stored=self._store is not False)
        fields["input"] = input_items(request.messages, PROVIDER)
        if request.tools:
            fields["tools"] = response_tools(request.tools)
        if self._store is not None:
            fields["store"] = self._store
        if self._background:
            fields["background"] = True
        if self._streaming:
            response = await self._streamed(request, fields)
        else:
            response = await self._whole(self._client.responses.with_raw_response.create, **fields)
            if response.get("status") in RUNNING:
                await self._known(request, response)
                response = await self._ready(str(response.get("id")))
        return response_answer(response, self._caller)

    async def _streamed(self, request: ModelRequest, fields: dict[str, Any]) -> dict[str, Any]:
        """The response at the end of its stream; of a stream that was cut, fetched, where it goes on without it."""
        begun: dict[str, Any] | None = None
        try:
            async with aclosing(self._events(self._client.responses.create, **fields)) as events:
                async for event in events:
                    response: Any = event.get("response")
                    if isinstance(response, dict):
                        response = cast("dict[str, Any]", response)
                        if begun is None and self._store is not False:
                            await self._known(request, response)
                        begun = response
                        if event.get("type") in ENDS:
                            return response
                    elif event.get("type") == "error":
                        if begun is not None and self._background:
                            break  # the stream has failed; whether the response has, only the response says
                        raise self._caller.said(event)
                    await request.stream.emit(_chunk_of(event))
        except AnswerLost:
            if begun is None or not self._background:
                raise
        else:
            if begun is None or not self._background:
                raise AnswerCut("the stream ended before the response did")
        return await self._ready(str(begun.get("id")))

    async def _known(self, request: ModelRequest, response: dict[str, Any]) -> None:
        if isinstance(response.get("id"), str):
            await request.known_as(DelegatedStateReference(provider=PROVIDER, kind="response", id=response["id"]))

    async def _ready(self, response_id: str) -> dict[str, Any]:
        """The response, when it is not running any more.

        Raises:
            AnswerLost: it is not kept any more, or still runs after the longest wait, or the provider cannot be asked.
        """
        until = anyio.current_time() + self._longest_wait
        why = "it is still running"
        while True:
            try:
                retrieve = self._client.responses.with_raw_response.retrieve
                response = await self._whole(retrieve, response_id=response_id)
                if response.get("status") not in RUNNING:
                    return response
            except ModelError as e:
                # It was asked for already, so none of this says that it was not answered.
                why = str(e)
                if e.configuration_error:
                    raise AnswerLost(PROVIDER, f"the response {response_id}: {why}", "response_body") from None
            if anyio.current_time() + self._poll_seconds >= until:
                raise AnswerLost(PROVIDER, f"the response {response_id}: {why}", "response_body")
            await anyio.sleep(self._poll_seconds)

    async def reconcile(self, request: ModelRequest) -> LookedUp:
        """Fetch the answer to a call whose id is journaled, and wait for it if it is still made: `Agent(reconcile_model=…)`."""
        known = request.reference
        if known is None or (known.provider, known.kind) != (PROVIDER, "response"):
            return StillUnknown("the provider's id of the response was not journaled; its dashboard may show the call")
        try:
            response = await self._ready(known.id)
        except ModelError as e:
            return StillUnknown(str(e))
        return _looked_up(response, response_answer, self._caller)


def _looked_up(
    found: dict[str, Any], answer: Callable[[dict[str, Any], Caller], ModelInvocationResponse], caller: Caller
) -> LookedUp:
    """What is found at the provider, as what became of the call: a failure or a refusal there is no answer."""
    try:
        return Happened(answer(found, caller), f"kept at the provider as {found.get('id')}")
    except AnswerLost as e:
        return StillUnknown(str(e))
    except ModelError as e:
        return DidNotHappen(str(e))


def _chunk_of(event: dict[str, Any]) -> TextChunk | ThinkingChunk | ProviderChunk:
    """What the host is shown of an event."""
    delta: Any = event.get("delta")
    if isinstance(delta, str):
        if event.get("type") == "response.output_text.delta":
            return TextChunk(value=delta)
        if str(event.get("type")).startswith("response.reasoning"):
            return ThinkingChunk(value=delta)
    return ProviderChunk(event)
