"""A service: a bot as it is deployed, with its flows, its channels, and where it keeps what it knows."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import anyio

from turnkeeper.conversation.channel import Channel
from turnkeeper.conversation.conversations import Conversations
from turnkeeper.conversation.flow import Flow
from turnkeeper.errors import InvalidInput, StoreBusy, StoreUnavailable
from turnkeeper.log.keyring import Keyring
from turnkeeper.log.store import Store
from turnkeeper.observe.telemetry import Telemetry
from turnkeeper.stores.opening import open_store
from turnkeeper.transport.opening import open_transport, transport_in
from turnkeeper.transport.protocol import Transport

log = logging.getLogger(__name__)

STORE_VARIABLE: Final = "TURNKEEPER_STORE"
_DEFAULT_STORE: Final = "sqlite:///turnkeeper.db"
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 5.0
"""Seconds between two attempts at a store that cannot be reached yet."""

_T = TypeVar("_T")
ChannelMaker = Callable[[], AbstractAsyncContextManager[Channel]]


@dataclass(frozen=True)
class Running:
    """A service that is open in this process.

    Attributes:
        store, transport: where things are kept, and how workers are told of them.
        bot: takes and handles messages.
    """

    store: Store
    transport: Transport
    bot: Conversations


Front = Callable[[Running], Awaitable[None]]


class _Patience:
    """With a store that cannot be reached yet, until a moment."""

    def __init__(self, seconds: float) -> None:
        self._until = anyio.current_time() + seconds
        self._pause = _FIRST_PAUSE

    async def until_there(self, opened: Callable[[], Awaitable[_T]]) -> _T:
        """What is opened, at the first attempt that reaches it."""
        while True:
            try:
                return await opened()
            except (StoreUnavailable, StoreBusy) as e:
                left = self._until - anyio.current_time()
                if left <= 0:
                    raise
                log.warning("not there yet, will try for another %.0f s: %s", left, e)
            await anyio.sleep(min(self._pause, left))
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)


class Service:
    """What a deployment consists of. Every process of it imports the same one: `turnkeeper worker app:service`."""

    def __init__(
        self,
        flows: Flow | Sequence[Flow],
        channels: Mapping[str, Channel | ChannelMaker],
        *,
        store: str | None = None,
        transport: str | None = None,
        queue: str = "default",
        front: Front | None = None,
        keyring: Keyring | None = None,
        telemetry: Telemetry | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            flows: what the bot does.
            channels: by the part of a conversation's id before its first colon (`telegram:4711:12` goes to `telegram`): a
                channel, or a function that gives one as an async context manager, for each process that opens the service.
            store: the store's URL; if None, that of the environment's TURNKEEPER_STORE, or a file in the working directory.
            transport: the transport's URL; the store's if None.
            queue: names the queue, where several services share a server.
            front: takes messages from outside, for as long as it is not cancelled: a web server, a poller. `turnkeeper serve`
                runs it.
            keyring: what records are encrypted with; if None, that of the environment's TURNKEEPER_KEYS or
                TURNKEEPER_KEYS_FILE, and where neither is set nothing is encrypted.
            telemetry: traces and counts what the processes of the service do; None: nobody does.
            options: those of `Conversations`.

        Raises:
            InvalidInput: there is no channel, or the environment's keys cannot be used.
        """
        if not channels:
            raise InvalidInput("channels", "a service needs at least one")
        self.flows = [flows] if isinstance(flows, Flow) else list(flows)
        self._channels = dict(channels)
        self.store = store or os.environ.get(STORE_VARIABLE) or _DEFAULT_STORE
        self.transport = transport or self.store
        self.queue = queue
        self.front = front
        self.keyring = Keyring.from_environment() if keyring is None else keyring
        self._options: dict[str, Any] = {"telemetry": telemetry, **options}

    @asynccontextmanager
    async def open(self, *, wait_seconds: float = 0.0, **options: Any) -> AsyncGenerator[Running]:
        """Open store, transport, channels and conversations in this process. `options` go before the service's own.

        Args:
            wait_seconds: how long to wait for a store or a transport that cannot be reached yet.

        Raises:
            UnknownStoreUrl: a URL is not known.
            StoreError: store or transport cannot be used.
        """
        patience = _Patience(wait_seconds)
        async with AsyncExitStack() as stack:
            store = await patience.until_there(partial(open_store, self.store, keyring=self.keyring))
            stack.push_async_callback(store.close)
            if self.transport == self.store:
                # Through the same connections.
                transport = await patience.until_there(partial(transport_in, store, self.queue))
            else:
                transport = await patience.until_there(partial(open_transport, self.transport, self.queue))
            stack.push_async_callback(transport.close)
            channels: dict[str, Channel] = {}
            for prefix, given in self._channels.items():
                channels[prefix] = await stack.enter_async_context(given()) if callable(given) else given

            def channel_of(conversation_id: str) -> Channel:
                prefix = conversation_id.partition(":")[0]
                if prefix not in channels:
                    raise InvalidInput(
                        "conversation_id", f"{conversation_id!r} belongs to none of {', '.join(channels)}"
                    )
                return channels[prefix]

            made = Conversations(
                store, self.flows, channel_of, announce=transport.publish, **{**self._options, **options}
            )
            bot = await stack.enter_async_context(made)
            yield Running(store, transport, bot)
