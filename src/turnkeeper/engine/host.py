"""What a host may have a say in, beside model, tools and channel: policies, context, messages, retries, streams (1.16)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turnkeeper.engine.contract_ports import (
    ContextPackingStrategy,
    ContextSource,
    ContextTransform,
    ConversationPort,
    HostPolicyPort,
    ModelStreamPort,
    ProviderChunk,
    RetryPolicyPort,
)
from turnkeeper.engine.wire import TextChunk, ThinkingChunk
from turnkeeper.observe.logs import logger

log = logger(__name__)


@dataclass(frozen=True)
class Host:
    """The host's ports; each that is None or empty has the contract's default.

    Attributes:
        policy: has a say before each model call and before the final output; without it nothing is changed.
        retry: waits between two attempts at a model call; without it the pause doubles from half a second.
        conversation: makes the messages of a finished tool round.
        sources, transforms, packing: make what the model is shown; without them it is the conversation.
        stream: is shown the answer while it is made.
    """

    policy: HostPolicyPort | None = None
    retry: RetryPolicyPort | None = None
    conversation: ConversationPort | None = None
    sources: Sequence[ContextSource] = ()
    transforms: Sequence[ContextTransform] = ()
    packing: ContextPackingStrategy | None = None
    stream: ModelStreamPort | None = None

    @property
    def makes_context(self) -> bool:
        """Whether the model is shown anything but the conversation."""
        return bool(self.sources or self.transforms or self.packing)

    @property
    def prepares(self) -> bool:
        """Whether something has to be done between two rounds, so that a model call cannot be announced with what was before."""
        return self.policy is not None or self.makes_context


class QuietStream:
    """A stream whose failures do not change the turn (1.16)."""

    def __init__(self, stream: ModelStreamPort | None) -> None:
        self._stream = stream

    async def emit(self, chunk: TextChunk | ThinkingChunk | ProviderChunk) -> None:
        """See `ModelStreamPort`."""
        if self._stream is None:
            return
        try:
            await self._stream.emit(chunk)
        except Exception:
            log.exception("the host's stream failed")
