"""The one place that touches redis-py: connections, what a client of it knows, and what its errors are called.

Only connections are taken from it: their handshake, TLS, credentials and parser. What is sent, where and when, and above all
what is sent again, is decided here, as an append whose answer was lost must not be repeated (LOG-6).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol, cast

from redis import exceptions as e
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.connection import Connection, SSLConnection
from redis.asyncio.sentinel import SentinelConnectionPool, SentinelManagedSSLConnection
from redis.crc import key_slot

from turnkeeper.errors import InvalidInput

try:
    import hiredis
except ImportError:  # the parser in C is recommended, not needed
    hiredis = None

Command = tuple[bytes | str | int, ...]

_pack: Final[Callable[[Command], bytes] | None] = getattr(hiredis, "pack_command", None)

FAILURES: Final = (e.RedisError, OSError, TimeoutError, EOFError)
"""What a connection raises when it cannot go on."""

_REPLIES: Final = (e.ResponseError, e.BusyLoadingError, e.AuthenticationError)
"""Errors that are a server's answer."""

_CODES: Final[Mapping[type[Exception], str]] = {
    e.NoScriptError: "NOSCRIPT",
    e.MovedError: "MOVED",
    e.AskError: "ASK",
    e.TryAgainError: "TRYAGAIN",
    e.MasterDownError: "MASTERDOWN",
    e.ClusterDownError: "CLUSTERDOWN",
    e.BusyLoadingError: "LOADING",
    e.OutOfMemoryError: "OOM",
    e.ReadOnlyError: "READONLY",
    e.NoPermissionError: "NOPERM",
    e.AuthenticationError: "WRONGPASS",
    e.AuthorizationError: "WRONGPASS",
}
"""Codes that redis-py takes off a message, most special class first."""

_CODE: Final = re.compile(
    r"(?:^|[ -])(OOM|READONLY|WRONGTYPE|NOREPLICAS|MISCONF|NOPERM|BUSY|CROSSSLOT|LOADING|CLUSTERDOWN|MASTERDOWN)\b"
)
"""Codes in a message: in front, or, from scripts on servers before 7, behind `Error running script`."""

_OF_ITS_OWN: Final = frozenset(
    {
        # Retries, decoding and bookkeeping of the client, which a store must not inherit.
        "retry",
        "retry_on_error",
        "retry_on_timeout",
        "health_check_interval",
        "decode_responses",
        "encoding",
        "encoding_errors",
        "encoder_class",
        "response_callbacks",
        "legacy_responses",
        "himport_registry",
        "event_dispatcher",
        "connection_pool",
        "connection_class",
        "max_connections",
        "maint_notifications_config",
        "maint_notifications_pool_handler",
        "oss_cluster_maint_notifications_handler",
        "orig_host_address",
        "orig_socket_timeout",
        "orig_socket_connect_timeout",
    }
)


class Wire(Protocol):
    """A connection of redis-py, as far as it is used."""

    @property
    def is_connected(self) -> bool: ...
    async def connect(self) -> None: ...
    async def disconnect(self, nowait: bool = ...) -> None: ...
    async def can_read(self) -> bool: ...
    def pack_commands(self, commands: Sequence[Command]) -> list[bytes]: ...
    async def read_response(self, *, disconnect_on_error: bool) -> Any: ...


class Described(NamedTuple):
    """What an existing client knows about its servers."""

    kind: Literal["single", "cluster", "sentinel"]
    addresses: tuple[tuple[str, int], ...]
    connection_class: type[Any]
    connection: dict[str, Any]
    service: str = ""
    sentinel: Mapping[str, Any] = {}


def connection_class(*, tls: bool) -> type[Any]:
    """What a connection is made of."""
    return SSLConnection if tls else Connection


def wire(kind: type[Any], arguments: Mapping[str, Any]) -> Wire:
    """A connection, not connected yet, that tries nothing twice by itself."""
    return cast("Wire", kind(**arguments))


def described(client: object) -> Described:
    """What an asyncio client knows about its servers.

    Raises:
        InvalidInput: it is no asyncio client of redis-py.
    """
    if isinstance(client, RedisCluster):
        arguments = client.connection_kwargs
        nodes = tuple((str(node.host), int(node.port)) for node in client.startup_nodes)
        kept = _kept(arguments)
        kept.pop("redis_connect_func", None)  # the cluster client's own, where it reads from replicas
        return Described("cluster", nodes, cast("type[Any]", arguments["connection_class"]), kept)
    if not isinstance(client, Redis):
        raise InvalidInput("redis", f"must be a client of redis.asyncio, not {type(client).__module__}")
    pool = cast("Any", client).connection_pool
    arguments = cast("dict[str, Any]", pool.connection_kwargs)
    if isinstance(pool, SentinelConnectionPool):
        manager = cast("Any", pool).sentinel_manager
        given = [cast("dict[str, Any]", s.connection_pool.connection_kwargs) for s in manager.sentinels]
        hosts = tuple((str(kwargs["host"]), int(kwargs["port"])) for kwargs in given)
        tls = issubclass(cast("type[Any]", pool.connection_class), SentinelManagedSSLConnection)
        return Described(
            "sentinel",
            hosts,
            connection_class(tls=tls),
            _kept(arguments),
            str(cast("Any", pool).service_name),
            _kept(given[0]),
        )
    kept = _kept(arguments)
    address = (str(arguments.get("host", arguments.get("path", "localhost"))), int(arguments.get("port", 6379)))
    return Described("single", (address,), cast("type[Any]", pool.connection_class), kept)


def _kept(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in arguments.items() if name not in _OF_ITS_OWN and name not in ("host", "port")
    }


def slot_of(key: bytes) -> int:
    """The slot of a key in a cluster."""
    return key_slot(key)


def is_reply(error: Exception) -> bool:
    """Whether an error is a server's answer, and not a failing connection."""
    return isinstance(error, _REPLIES)


async def reply_of(wire: Wire) -> Any:
    """The next reply of a connection; an error that is the server's answer comes as a value."""
    try:
        return await wire.read_response(disconnect_on_error=False)
    except _REPLIES as error:
        return error


def transport_of(wire: Wire) -> Any:
    """The asyncio transport of a connected connection."""
    return cast("Any", wire)._writer.transport


async def send(wire: Wire, commands: Sequence[Command], timeout: float) -> None:
    """Send commands in one go; most often without giving way, as the system's buffer takes them.

    Raises:
        TimeoutError: for `timeout` seconds the server did not take enough of them.
    """
    writer = cast("Any", wire)._writer
    # The library's own sending makes a task for each command, and packs it in Python (measured: a third of an append).
    writer.write(b"".join(map(_pack, commands)) if _pack else b"".join(wire.pack_commands(commands)))
    if writer.transport.get_write_buffer_size():
        async with asyncio.timeout(timeout):
            await writer.drain()


async def drop(wire: Wire, transport: Any) -> None:
    """Close at once: what the server has not read of this connection yet, it never executes.

    A graceful close would send what is still buffered, and the system would go on sending it when we are gone.
    """
    connected: socket.socket | None = transport.get_extra_info("socket")
    if connected is not None:
        with contextlib.suppress(OSError):  # it may be closed already
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
    await wire.disconnect(nowait=True)


def code_of(error: BaseException) -> str:
    """The code of a server's error (`OOM`, `WRONGTYPE`, ...), or an empty string."""
    for kind, code in _CODES.items():
        if isinstance(error, kind):
            return code
    found = _CODE.search(str(error))
    return found[1] if found else ""


def moved_to(error: BaseException) -> tuple[str, int]:
    """Where a MOVED or ASK points to; the host is empty if it is the one that said so."""
    redirect = cast("Any", error)
    return str(redirect.host), int(redirect.port)
