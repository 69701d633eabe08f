"""The providers' real clients, each behind its port, against an address."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx2
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from turnkeeper import Agent, Host, Message, ModelRequest, TextPart, Tool
from turnkeeper.engine.contract_ports import ModelStreamPort, ProviderChunk
from turnkeeper.engine.host import QuietStream
from turnkeeper.engine.wire import DelegatedStateReference, TextChunk, ThinkingChunk
from turnkeeper.models.anthropic import AnthropicMessages
from turnkeeper.models.fake import Fault, Script, ScriptedCall, ScriptedRound
from turnkeeper.models.openai import OpenAIChat, OpenAIResponses

KEY: Final = "sk-proj-verysecret0123456789"
APIS: Final = ("chat", "stored chat", "responses", "background", "messages")
KINDS: Final = [
    (api, streaming)
    for api in APIS
    for streaming in (True, False)
    # What is stored is asked for only where an answer is lost.
    if api != "stored chat"
]
"""An API, and whether its answers are streamed."""

Port = OpenAIChat | OpenAIResponses | AnthropicMessages


@asynccontextmanager
async def port_at(
    url: str, api: str, *, streaming: bool = True, timeout: Any = 5.0, **more: Any
) -> AsyncGenerator[Any]:
    """The port for an API, with a real client for the server at `url`."""
    if api == "messages":
        async with AsyncAnthropic(base_url=url, api_key=KEY, timeout=timeout) as anthropic:
            yield AnthropicMessages(anthropic, "model-1", streaming=streaming, **more)
        return
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, timeout=timeout) as openai:
        if api.endswith("chat"):
            yield OpenAIChat(openai, "model-1", streaming=streaming, store=api == "stored chat", **more)
        else:
            more = {"poll_seconds": 0.001, **more}
            yield OpenAIResponses(openai, "model-1", streaming=streaming, background=api == "background", **more)


def short(read: float) -> httpx2.Timeout:
    """A client that does not wait long for an answer."""
    return httpx2.Timeout(5.0, read=read)


class Known:
    """Keeps what a port says that its provider calls the call."""

    def __init__(self) -> None:
        self.references: list[DelegatedStateReference] = []

    async def __call__(self, reference: DelegatedStateReference) -> None:
        self.references.append(reference)


class Watching:
    """A host's stream port that keeps what it is shown."""

    def __init__(self) -> None:
        self.text = ""
        self.thinking = ""
        self.events: list[Any] = []

    async def emit(self, chunk: TextChunk | ThinkingChunk | ProviderChunk) -> None:
        """See `ModelStreamPort`."""
        match chunk:
            case TextChunk():
                self.text += chunk.value
            case ThinkingChunk():
                self.thinking += chunk.value
            case ProviderChunk():
                self.events.append(chunk.value)


def asking(
    messages: str | Sequence[Message] = "hi",
    tools: Sequence[Tool] = (),
    *,
    stream: ModelStreamPort | None = None,
    known: Known | None = None,
    reference: DelegatedStateReference | None = None,
) -> ModelRequest:
    """A request of the engine's."""
    said = [Message(parts=[TextPart(value=messages)])] if isinstance(messages, str) else messages
    return ModelRequest(
        turn_id="t",
        round_index=0,
        attempt=0,
        invocation_id="inv_1",
        messages=said,
        tools=tools,
        stream=QuietStream(stream),
        reference=reference,
        known_as=known or Known(),
    )


class NoPause:
    """A retry policy that does not wait."""

    async def backoff(self, request: Any) -> None:
        """See `RetryPolicyPort`."""


def settling(port: Any, tools: Sequence[Tool] = (), **more: Any) -> Agent:
    """An agent that does not buy an answer twice: it asks the provider, where that can be asked, or stops."""
    look_up: Callable[..., Any] | None = more.pop("reconcile_model", getattr(port, "reconcile", None))
    host = more.pop("host", Host(retry=NoPause()))
    return Agent(port, tools, unknown_model="reconcile", reconcile_model=look_up, host=host, **more)


def saying(text: str = "Hello.", *faults: Fault, **more: Any) -> Script:
    """A script of one last word."""
    return Script(rounds=[ScriptedRound(text=text, faults=list(faults), **more)])


def calling(*calls: ScriptedCall, then: str = "Done.", **more: Any) -> Script:
    """A script of one round with tools, and a last word."""
    return Script(rounds=[ScriptedRound(calls=list(calls), **more), ScriptedRound(text=then)])
