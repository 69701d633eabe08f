"""What a Redis promises as it is set up, for `turnkeeper doctor`; and whether it is one that can be used at all."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final, NamedTuple, cast

from turnkeeper.errors import StoreUnsuitable
from turnkeeper.log.store import Promise
from turnkeeper.stores.redis import client as c
from turnkeeper.stores.redis.server import Server
from turnkeeper.stores.redis.trouble import refused

OLDEST: Final = (6, 2)
"""The oldest Redis that the scripts are written for."""
UNKNOWN: Final = "unknown (the server does not tell this user)"

_CONFIGURED: Final = ("appendonly", "appendfsync", "maxmemory-policy", "min-replicas-to-write")
_SCANNED: Final = 500


async def check(server: Server) -> None:
    """See that the store can be used; says at once if not.

    Raises:
        StoreUnsuitable: the server is too old.
        StoreError: it cannot be reached, or lets this user not in.
    """
    for reply in (await server.on_each("INFO", "server", some=True)).values():
        if isinstance(reply, Exception):
            if c.code_of(reply) == "NOPERM":
                continue  # this user may be shut out of INFO alone; the first command of a log will tell
            raise refused(reply, server.where).error
        info = _fields(reply)
        version = _version(info.get("redis_version", ""))
        if version and version < OLDEST:
            found = info["redis_version"]
            raise StoreUnsuitable(server.where, f"is Redis {found}; 6.2 or newer is needed, or Valkey")


async def scan(server: Server, pattern: str) -> AsyncIterator[list[bytes]]:
    """The keys of a pattern that hold hashes, on every server, a few hundred at a time; some may come twice."""
    for address in await server.on_each("PING"):
        cursor: bytes | str | int = 0
        while True:
            reply = await server.on(address, "SCAN", cursor, "MATCH", pattern, "COUNT", _SCANNED, "TYPE", "hash")
            if isinstance(reply, Exception):
                raise refused(reply, server.where).error
            cursor, keys = reply
            if keys:
                yield keys
            if int(cursor) == 0:
                break


class _Node(NamedTuple):
    """What one server tells about itself; what it does not tell is missing."""

    info: Mapping[str, str]
    config: Mapping[str, str]


async def promises(server: Server, offset: int) -> list[Promise]:
    """See `turnkeeper.log.store.Store.promises`. `offset` is the test clock's, in milliseconds.

    Raises:
        StoreError: a server cannot be reached.
    """
    infos = await server.on_each("INFO", "everything")
    configs = [await server.on_each("CONFIG", "GET", name) for name in _CONFIGURED]
    asked = time.time_ns() // 1_000_000
    times = await server.on_each("TIME")
    nodes = {
        str(address): _Node(_fields(info), {k: v for found in configs for k, v in _pairs(found.get(address)).items()})
        for address, info in infos.items()
    }
    lines = [_over(nodes, line) for line in (_version_line, _durable, _eviction)]
    lines.append(_over(nodes, lambda node: _replicas(node, server.settings.wait)))
    lines.append(_cluster(server, len(nodes)))
    lines.append(_clock(times.values(), asked, offset))
    return lines


def _over(nodes: Mapping[str, _Node], line: Callable[[_Node], Promise]) -> Promise:
    """One line for all servers: what they have in common, or each by name where they differ."""
    each = {address: line(node) for address, node in nodes.items()}
    worst = next((promise for promise in each.values() if not promise.holds), next(iter(each.values())))
    if len({promise.found for promise in each.values()}) == 1:
        return worst
    return worst._replace(found="; ".join(f"{address}: {promise.found}" for address, promise in each.items()))


def _version_line(node: _Node) -> Promise:
    redis = node.info.get("redis_version")
    valkey = node.info.get("valkey_version")
    found = f"Valkey {valkey}" if valkey else f"Redis {redis}" if redis else UNKNOWN
    return Promise("server", found, not redis or _version(redis) >= OLDEST, "Redis 6.2 or newer, or Valkey, is needed")


def _durable(node: _Node) -> Promise:
    name = "durable"
    enabled = node.info.get("aof_enabled", {"yes": "1", "no": "0"}.get(node.config.get("appendonly", "")))
    fsync = node.config.get("appendfsync")
    if enabled is None:
        return Promise(name, UNKNOWN, False, "ask who runs the server for appendonly yes and appendfsync always")
    if enabled == "0":
        advice = (
            "set appendonly yes and appendfsync always: without it a restart loses what came after the last snapshot"
        )
        return Promise(name, "no append-only file: in memory, and in snapshots if there are any", False, advice)
    if node.info.get("aof_last_write_status", "ok") != "ok":
        return Promise(name, "the append-only file cannot be written", False, "see the server's log, free its disk")
    if fsync is None:
        advice = "ask who runs the server for appendfsync always"
        return Promise(name, f"append-only file, its appendfsync {UNKNOWN}", False, advice)
    found = f"append-only file, appendfsync {fsync}"
    advice = (
        "set appendfsync always: a machine that fails may lose the last second, and an effect in it may be repeated"
    )
    return Promise(name, found, fsync == "always", advice)


def _eviction(node: _Node) -> Promise:
    policy = node.info.get("maxmemory_policy", node.config.get("maxmemory-policy"))
    if policy is None:
        return Promise("eviction", UNKNOWN, False, "ask who runs the server for maxmemory-policy noeviction")
    bound = node.info.get("maxmemory_human", "")
    found = f"maxmemory-policy {policy}, maxmemory {'not set' if bound in ('', '0B') else bound}"
    advice = "set maxmemory-policy noeviction: a log that is evicted is a turn that may run again"
    return Promise("eviction", found, policy == "noeviction", advice)


def _replicas(node: _Node, wait: int) -> Promise:
    count = node.info.get("connected_slaves")
    least = node.config.get("min-replicas-to-write")
    if count is None:
        return Promise("replicas", UNKNOWN, False, "a failover may lose confirmed appends unless ?wait=N is set")
    if node.info.get("role") == "slave":
        return Promise(
            "replicas", "is a replica itself", False, "give the master's address: a replica takes no appends"
        )
    waiting = f", each append waits for {wait}" if wait else ", asynchronous"
    found = f"{count}{waiting}" + (f", min-replicas-to-write {least}" if least not in (None, "0") else "")
    if count == "0":
        return Promise("replicas", f"none{waiting if wait else ''}", wait == 0, "?wait=N needs replicas")
    advice = "a failover may lose confirmed appends: open the store with ?wait=1 or more"
    return Promise("replicas", found, wait > 0, advice)


def _cluster(server: Server, nodes: int) -> Promise:
    kinds = {
        "single": "one server",
        "cluster": f"cluster, {nodes} masters",
        "sentinel": f"master {server.settings.service!r} of sentinels",
    }
    return Promise("servers", kinds[server.settings.kind], True)


def _clock(times: Any, asked: int, offset: int) -> Promise:
    told = [int(seconds) * 1000 + int(micros) // 1000 - asked for seconds, micros in times]
    apart = max(told) - min(told)
    found = f"the server's, {told[0] / 1000:+.1f} s from this host's"
    if apart > 1000:
        found += f", {apart / 1000:.1f} s between servers"
    if offset:
        return Promise("clock", f"{found}, moved by {offset / 1000:+.1f} s", False, "the test clock was moved")
    return Promise("clock", found, apart <= 1000, "keep the servers' clocks together (NTP): a failover changes clocks")


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _fields(reply: Any) -> dict[str, str]:
    """The fields of an INFO, or nothing where it was refused."""
    if isinstance(reply, Exception):
        return {}
    return dict(re.findall(r"^(\w+):(.*?)\r?$", _text(reply), re.MULTILINE))


def _pairs(reply: Any) -> dict[str, str]:
    """The pairs of a CONFIG GET, a list in RESP2 and a mapping in RESP3; nothing where it was refused."""
    if isinstance(reply, dict):
        pairs: Any = cast("dict[Any, Any]", reply).items()
    elif isinstance(reply, list):
        items = cast("list[Any]", reply)
        pairs = zip(items[::2], items[1::2], strict=True)
    else:
        return {}
    return {_text(name): _text(value) for name, value in pairs}


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])
