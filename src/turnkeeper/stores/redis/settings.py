"""Where a Redis is and how to talk to it: from a URL, or from a client that somebody has already."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from turnkeeper.errors import InvalidInput, UnknownStoreUrl
from turnkeeper.stores.redis import client as c

Kind = Literal["single", "cluster", "sentinel"]

SCHEMES: Final = (
    "redis",
    "rediss",
    "redis+cluster",
    "rediss+cluster",
    "redis+sentinel",
    "rediss+sentinel",
)
_PORTS: Final = {"single": 6379, "cluster": 6379, "sentinel": 26379}
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Address(NamedTuple):
    """One server."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Settings:
    """How a store reaches its servers.

    Attributes:
        where: the store's address for people, without user and password.
        addresses: the server; or nodes of the cluster, of which one has to answer; or the sentinels.
        connection_class: what a connection is made of.
        connection: its arguments, but for host and port.
        service: the master's name, with sentinels.
        sentinel: arguments for the sentinels' own connections.
        timeout: seconds to connect, and seconds without a byte of the answer until it counts as lost.
        patience: seconds for which what cannot be done now, and surely was not done, is tried again.
        wait: replicas that must have an append before it is confirmed.
        connections: most connections at once, of one event loop.
        name: what keys begin with.
    """

    where: str
    kind: Kind
    addresses: tuple[Address, ...]
    connection_class: type[Any]
    connection: Mapping[str, Any] = field(repr=False)
    service: str = ""
    sentinel: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)
    timeout: float = 5.0
    patience: float = 10.0
    wait: int = 0
    connections: int = 32
    name: str = "tk"

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidInput("name", "must be 1 to 64 letters, digits, - and _")
        for number, least in (("timeout", 0.001), ("patience", 0), ("wait", 0), ("connections", 1)):
            if not getattr(self, number) >= least:
                raise InvalidInput(number, f"must be {least} or more")

    def wire(self, address: Address, *, sentinel: bool = False) -> c.Wire:
        """A connection to `address`, not connected yet."""
        arguments = dict(self.sentinel if sentinel else self.connection)
        if "path" not in arguments:
            arguments.update(host=address.host, port=address.port)
        arguments.setdefault("socket_timeout", self.timeout)
        arguments.setdefault("socket_connect_timeout", self.timeout)
        return c.wire(self.connection_class, arguments)


_OPTIONS: Final[Mapping[str, Callable[[str], Any]]] = {
    "timeout": float,
    "patience": float,
    "wait": int,
    "connections": int,
    "name": str,
}
_CONNECTION_OPTIONS: Final[Mapping[str, Callable[[str], Any]]] = {
    "db": int,
    "protocol": int,
    "client_name": str,
    "ssl_ca_certs": str,
    "ssl_certfile": str,
    "ssl_keyfile": str,
    "ssl_cert_reqs": str,
    "ssl_check_hostname": lambda text: {"true": True, "false": False}[text.lower()],
}
_SENTINEL_OPTIONS: Final = ("sentinel_username", "sentinel_password")


def parse(url: str) -> Settings:
    """The settings of a URL.

    `redis://[user:password@]host[:port][/db]`, `redis+cluster://host:port,host:port`,
    `redis+sentinel://host:port,host:port/service[/db]`; with TLS `rediss…`.

    Raises:
        UnknownStoreUrl: a part is not understood; no password is repeated.
    """
    parts = urlsplit(url)
    tls, kind = _scheme(parts.scheme)
    credentials, _, hosts = parts.netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    connection: dict[str, Any] = {}
    if user:
        connection["username"] = unquote(user)
    if password:
        connection["password"] = unquote(password)
    addresses = _addresses(hosts, kind)
    path = [unquote(part) for part in parts.path.split("/")[1:]]
    service = path.pop(0) if kind == "sentinel" and path else ""
    if kind == "sentinel" and not service:
        raise UnknownStoreUrl("a URL of sentinels names the master's service: redis+sentinel://host:port/service")
    settings: dict[str, Any] = {}
    sentinel: dict[str, Any] = {}
    if path and path[0]:
        connection["db"] = _value("db", int, path.pop(0))
    if any(path):
        raise UnknownStoreUrl(f"the path of a {parts.scheme} URL has a part too many: {path[0]!r}")
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name in _OPTIONS:
            settings[name] = _value(name, _OPTIONS[name], value)
        elif name in _CONNECTION_OPTIONS:
            connection[name] = _value(name, _CONNECTION_OPTIONS[name], value)
        elif name in _SENTINEL_OPTIONS and kind == "sentinel":
            sentinel[name.removeprefix("sentinel_")] = value
        else:
            known = ", ".join((*_OPTIONS, *_CONNECTION_OPTIONS, *(_SENTINEL_OPTIONS if kind == "sentinel" else ())))
            raise UnknownStoreUrl(f"the option {name} is not known; known: {known}")
    if connection.get("db") and kind == "cluster":
        raise UnknownStoreUrl("a cluster has no database but 0: leave the number out")
    if not tls and any(name.startswith("ssl_") for name in connection):
        raise UnknownStoreUrl(f"TLS options are for {parts.scheme.replace('redis', 'rediss', 1)}:// URLs")
    if kind == "sentinel":
        sentinel |= {name: connection[name] for name in connection if name.startswith("ssl_") or name == "protocol"}
    rest = "/".join(("", *([service] if service else []), *([str(connection["db"])] if connection.get("db") else [])))
    return Settings(
        f"{parts.scheme}://{','.join(map(str, addresses))}{rest}",
        kind,
        addresses,
        c.connection_class(tls=tls),
        connection,
        service,
        sentinel,
        **settings,
    )


def of_client(client: object, **options: Any) -> Settings:
    """The settings of an asyncio client of redis-py; `options` are those of `Settings`.

    Raises:
        InvalidInput: it is no such client.
    """
    found = c.described(client)
    addresses = tuple(Address(host, int(port)) for host, port in found.addresses)
    scheme = {"single": "redis", "cluster": "redis+cluster", "sentinel": "redis+sentinel"}[found.kind]
    where = f"{scheme}://{','.join(map(str, addresses))}{'/' * bool(found.service)}{found.service}"
    settings = Settings(
        where, found.kind, addresses, found.connection_class, found.connection, found.service, found.sentinel
    )
    return replace(settings, **options)


def _scheme(scheme: str) -> tuple[bool, Kind]:
    if scheme not in SCHEMES:
        raise UnknownStoreUrl(f"{scheme}: is not a scheme of Redis; known: {', '.join(SCHEMES)}")
    protocol, _, kind = scheme.partition("+")
    kinds: dict[str, Kind] = {"": "single", "cluster": "cluster", "sentinel": "sentinel"}
    return protocol == "rediss", kinds[kind]


def _addresses(hosts: str, kind: Kind) -> tuple[Address, ...]:
    found: list[Address] = []
    for text in hosts.split(","):
        bracketed = text.startswith("[")
        host, _, rest = text[1:].partition("]") if bracketed else text.partition(":")
        port = rest.removeprefix(":") if bracketed else rest
        if port and not (port.isdecimal() and 0 < int(port) < 65536):
            raise UnknownStoreUrl(f"the port of {host or 'the host'} is not a number from 1 to 65535")
        found.append(Address(unquote(host) or "localhost", int(port) if port else _PORTS[kind]))
    if kind == "single" and len(found) > 1:
        raise UnknownStoreUrl("redis:// names one host; several are for redis+cluster:// and redis+sentinel://")
    return tuple(found)


def _value(name: str, kind: Callable[[str], Any], text: str) -> Any:
    try:
        return kind(text)
    except (KeyError, ValueError):
        raise UnknownStoreUrl(f"{name}={text!r} is not a value that {name} can have") from None
