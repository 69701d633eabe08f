"""The servers of a store, from one event loop: commands go to who holds the key, and go again only where that is harmless."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from turnkeeper.errors import StoreError, StoreUnavailable
from turnkeeper.stores.redis import client as c
from turnkeeper.stores.redis.lines import AnswerLost, Lines, NotSent
from turnkeeper.stores.redis.scripts import Script
from turnkeeper.stores.redis.settings import Address, Settings
from turnkeeper.stores.redis.topology import Topology, Unlocated, topology_of
from turnkeeper.stores.redis.trouble import Verdict, lost, refused, unreachable

_PAUSES: Final = (0.005, 0.5)
"""Seconds between two tries: the first pause, and the longest."""
_WATCHES: Final = 256
"""Commands that wait on one server, at once."""
_REDIRECTS: Final = 16
"""Redirections that are followed at once; then there is a pause before each."""


class Server:
    """Commands to the servers of a store, from one event loop."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.where = settings.where
        self.unconfirmed: set[bytes] = set()
        """Keys whose last append has not reached as many replicas as it should have."""
        self._topology: Topology = topology_of(settings)
        self._watches: dict[Address, Lines] = {}

    async def settled(self) -> None:
        """Wait for what cancelled callers left under way: what is read behind it tells for good what it did (LOG-6)."""
        while tasks := self._topology.abandoned():
            await asyncio.wait(tasks)

    # --- commands ----------------------------------------------------------------------------------------------

    async def run(
        self,
        script: Script,
        key: bytes,
        *arguments: bytes | str | int,
        repeatable: bool,
        wait: int = 0,
        more_keys: Sequence[bytes] = (),
    ) -> tuple[Any, int]:
        """Run a script on its key; its reply, and how many replicas have it (with `wait`, else 0).

        Args:
            more_keys: other keys that it touches, in the slot of `key`.
            repeatable: running it twice does what running it once does. Otherwise a lost answer is an error.
            wait: how many replicas to wait for, as long as half the timeout.
        """
        tail: list[c.Command] = []
        if wait:
            tail.append(("WAIT", wait, max(1, round(self.settings.timeout * 500))))
        call = ("EVALSHA", script.sha, 1 + len(more_keys), key, *more_keys, *arguments)
        replies = await self._insist(key, [call, *tail], repeatable, script)
        acknowledged = replies[1] if wait and isinstance(replies[1], int) else 0
        return replies[0], acknowledged

    async def call(self, key: bytes, *command: bytes | str | int) -> Any:
        """One command on one key that may be repeated."""
        return (await self._insist(key, [command], True))[0]

    async def watch(self, key: bytes, *command: bytes | str | int) -> Any:
        """One command that reads, and waits on the server for less than the timeout; None where that did not work.

        It has a connection that counts beside the others, and that is dropped where the caller is cancelled.
        """
        address: Address | None = None
        try:
            address = await self._topology.address(key)
            (reply,) = await self._watching(address).exchange([command], abandons=False)
        except Unlocated:
            return None
        except (NotSent, AnswerLost):
            if address is not None:
                await self._topology.suspect(address)
            return None
        if isinstance(reply, Exception):
            if c.code_of(reply) == "MOVED" and self.settings.kind == "cluster":
                host, port = c.moved_to(reply)
                self._topology.moved(key, Address(host or (address.host if address else ""), port))
            return None
        return reply if reply is not None else []

    def _watching(self, address: Address) -> Lines:
        if address not in self._watches:
            make = partial(self.settings.wire, address)
            self._watches[address] = Lines(make, self.settings.timeout, asyncio.Semaphore(_WATCHES))
        return self._watches[address]

    async def call_many(self, calls: Sequence[tuple[bytes, c.Command]]) -> list[Any]:
        """Commands that may be repeated, each on its key, with one round trip to each server that holds some."""
        groups: defaultdict[Address, list[int]] = defaultdict(list)
        for index, (key, _) in enumerate(calls):
            groups[await self._locate(key)].append(index)
        replies: list[Any] = [None] * len(calls)

        async def group(address: Address, indexes: list[int]) -> None:
            try:
                found = await self._exchange(address, [calls[index][1] for index in indexes])
            except (NotSent, AnswerLost) as e:
                found = [e] * len(indexes)
            for index, reply in zip(indexes, found, strict=True):
                # What went wrong goes the long way: redirections, pauses, typed errors.
                replies[index] = await self.call(calls[index][0], *calls[index][1]) if _bad(reply) else reply

        await asyncio.gather(*(group(address, indexes) for address, indexes in groups.items()))
        return replies

    async def on_each(self, *command: bytes | str | int, some: bool = False) -> dict[Address, Any]:
        """A command, once, to every server that holds keys. An error that one of them answers is its reply.

        Raises:
            StoreUnavailable: one of them is away; with `some`, all of them are.
        """
        try:
            addresses = await self._topology.primaries()
        except Unlocated as e:
            raise e.verdict.error from e
        found = await asyncio.gather(*(self.on(address, *command) for address in addresses), return_exceptions=True)
        replies = dict(zip(addresses, found, strict=True))
        away = [reply for reply in found if isinstance(reply, StoreError)]
        if away and not (some and len(away) < len(found)):
            raise away[0]
        return {address: reply for address, reply in replies.items() if not isinstance(reply, StoreError)}

    async def on(self, address: Address, *command: bytes | str | int) -> Any:
        """A command, once, to one server. A server's error is its reply."""
        try:
            return (await self._exchange(address, [command]))[0]
        except NotSent as e:
            await self._topology.suspect(address)
            raise unreachable(e.__cause__, self.where).error from e
        except AnswerLost as e:
            raise lost(e.__cause__, self.where) from e

    async def close(self) -> None:
        """Finish what was asked, then close the connections."""
        await self.settled()
        await self._topology.close()
        for lines in self._watches.values():
            await lines.close()

    # --- trying ------------------------------------------------------------------------------------------------

    async def _locate(self, key: bytes) -> Address:
        deadline = _Deadline(self.settings.patience)
        while True:
            try:
                return await self._topology.address(key)
            except Unlocated as e:
                await deadline.pause(e.verdict)

    async def _insist(
        self, key: bytes, commands: list[c.Command], repeatable: bool, script: Script | None = None
    ) -> list[Any]:
        """Send commands to whoever holds `key` until they were executed, patience has an end, or an answer was lost."""
        deadline = _Deadline(self.settings.patience)
        redirected: Address | None = None
        asking = False
        redirections = 0
        while True:
            address = self.settings.addresses[0]
            try:
                address = redirected or await self._topology.address(key)
                replies = await self._exchange(address, [("ASKING",), *commands] if asking else commands)
            except Unlocated as e:
                await deadline.pause(e.verdict)
                continue
            except NotSent as e:
                redirected, asking = None, False
                await self._topology.suspect(address)
                await deadline.pause(unreachable(e.__cause__, self.where))
                continue
            except AnswerLost as e:
                redirected, asking = None, False
                await self._topology.suspect(address)
                error = lost(e.__cause__, self.where)
                if not repeatable:
                    raise error from e
                await deadline.pause(Verdict(error, passing=True))
                continue
            replies = replies[1:] if asking else replies
            redirected, asking = None, False
            error = replies[0]
            if not isinstance(error, Exception):
                return replies
            # An error in place of a reply: nothing was executed.
            match c.code_of(error):
                case "NOSCRIPT" if script is not None:
                    commands = [("EVAL", script.source, *commands[0][2:]), *commands[1:]]
                case ("MOVED" | "ASK") as code if self.settings.kind == "cluster":
                    host, port = c.moved_to(error)
                    target = Address(host or address.host, port)
                    redirections += 1
                    if code == "ASK":
                        redirected, asking = target, True
                    else:
                        self._topology.moved(key, target)
                    if redirections > _REDIRECTS:
                        await deadline.pause(_restless(self.where))
                case _ as code:
                    verdict = refused(error, self.where)
                    if code != "TRYAGAIN" and verdict.passing:
                        await self._topology.suspect(address)
                    await deadline.pause(verdict)

    async def _exchange(self, address: Address, commands: Sequence[c.Command]) -> list[Any]:
        return await self._topology.lines(address).exchange(commands)


class _Deadline:
    """How long something is tried again, with growing pauses."""

    def __init__(self, patience: float) -> None:
        self._end = time.monotonic() + patience
        self._pause = _PAUSES[0]

    async def pause(self, verdict: Verdict) -> None:
        """Wait before the next try, or raise the verdict's error if there is none."""
        left = self._end - time.monotonic()
        if not verdict.passing or left <= 0:
            raise verdict.error
        await asyncio.sleep(min(left, self._pause * (0.5 + random.random())))  # noqa: S311  # spreads clients
        self._pause = min(self._pause * 2, _PAUSES[1])


def _restless(where: str) -> Verdict:
    reason = "the nodes of the cluster send each other's keys round in a circle; try again"
    return Verdict(StoreUnavailable(where, reason, applied=False), passing=True)


def _bad(reply: object) -> bool:
    return isinstance(reply, Exception)
