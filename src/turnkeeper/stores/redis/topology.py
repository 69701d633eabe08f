"""Which server holds a key: the one there is, the master that sentinels name, or a node of a cluster."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from turnkeeper.errors import StoreError, StoreUnavailable
from turnkeeper.stores.redis import client as c
from turnkeeper.stores.redis.lines import AnswerLost, Lines, NotSent
from turnkeeper.stores.redis.settings import Address, Settings
from turnkeeper.stores.redis.trouble import Verdict, lost, refused, unreachable


class Unlocated(Exception):
    """It is not known which server holds the key. Nothing of the command was sent."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(str(verdict.error))
        self.verdict = verdict


class Topology(ABC):
    """Where keys are, as far as is known. For one event loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._room = asyncio.Semaphore(settings.connections)
        self._lines: dict[Address, Lines] = {}

    @abstractmethod
    async def address(self, key: bytes) -> Address:
        """The server that holds `key`.

        Raises:
            Unlocated: that cannot be found out now.
        """

    @abstractmethod
    async def primaries(self) -> list[Address]:
        """Every server that holds keys. Raises as `address` does."""

    async def suspect(self, address: Address) -> None:
        """What is known led to a server that is away or takes no writes: find out anew before the next use."""
        await self.lines(address).close()

    def moved(self, key: bytes, address: Address) -> None:  # noqa: B027  # only clusters move keys
        """A node said that `key` is at `address` from now on."""

    def lines(self, address: Address) -> Lines:
        """The connections to a server."""
        if address not in self._lines:
            self._lines[address] = Lines(lambda: self._settings.wire(address), self._settings.timeout, self._room)
        return self._lines[address]

    def abandoned(self) -> list[asyncio.Task[None]]:
        """Exchanges that go on without their callers."""
        return [task for lines in self._lines.values() for task in lines.abandoned]

    async def close(self) -> None:
        """Close every connection that is not in use."""
        for lines in self._lines.values():
            await lines.close()


class Single(Topology):
    """One server for everything."""

    async def address(self, key: bytes) -> Address:
        """See `Topology`."""
        return self._settings.addresses[0]

    async def primaries(self) -> list[Address]:
        """See `Topology`."""
        return [self._settings.addresses[0]]


class _Asking(Topology):
    """A topology that others know: it is asked for once, and again when it proved wrong."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._asking = asyncio.Lock()
        self._stale = True

    async def suspect(self, address: Address) -> None:
        """See `Topology`."""
        self._stale = True
        await super().suspect(address)

    async def _ensure(self) -> None:
        if not self._stale:
            return
        async with self._asking:
            if self._stale:
                await self._ask(self._informants())
                self._stale = False

    @abstractmethod
    def _informants(self) -> Iterable[Address]:
        """Who may know, in the order of asking."""

    @abstractmethod
    async def _learn(self, informant: Address) -> None:
        """Ask one of them. Raises NotSent, AnswerLost, or Unlocated for a useless answer."""

    async def _ask(self, informants: Iterable[Address]) -> None:
        verdict: Verdict | None = None
        for informant in informants:
            where = self._settings.where
            try:
                return await self._learn(informant)
            except NotSent as e:
                verdict = unreachable(e.__cause__, where)
            except AnswerLost as e:
                verdict = Verdict(lost(e.__cause__, where), passing=True)
                verdict.error.applied = False  # of what the caller wants, nothing was sent
            except Unlocated as e:
                verdict = e.verdict
        assert verdict is not None
        raise Unlocated(verdict)


class Cluster(_Asking):
    """Nodes that share the slots."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._slots: dict[int, Address] = {}

    async def address(self, key: bytes) -> Address:
        """See `Topology`."""
        await self._ensure()
        slot = c.slot_of(key)
        if slot not in self._slots:
            self._stale = True
            raise Unlocated(_down(self._settings.where, f"slot {slot} has no master"))
        return self._slots[slot]

    async def primaries(self) -> list[Address]:
        """See `Topology`."""
        await self._ensure()
        return sorted(set(self._slots.values()))

    def moved(self, key: bytes, address: Address) -> None:
        """See `Topology`. A node that was not known means that more than this slot has changed."""
        self._stale |= address not in self._slots.values()
        self._slots[c.slot_of(key)] = address

    def _informants(self) -> Iterable[Address]:
        known = [*{*self._slots.values(), *self._settings.addresses}]
        random.shuffle(known)  # so that clients do not all ask the same node
        return known

    async def _learn(self, informant: Address) -> None:
        (reply,) = await self.lines(informant).exchange([("CLUSTER", "SLOTS")])
        if isinstance(reply, Exception):
            raise Unlocated(refused(reply, self._settings.where))
        slots: dict[int, Address] = {}
        for first, last, master, *_ in reply:
            address = _address(master[0], master[1], informant)
            for slot in range(first, last + 1):
                slots[slot] = address
        if not slots:
            raise Unlocated(_down(self._settings.where, f"{informant} knows no slots"))
        self._slots = slots


class Sentinels(_Asking):
    """A master that sentinels watch over, and replace."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._master = settings.addresses[0]

    async def address(self, key: bytes) -> Address:
        """See `Topology`."""
        await self._ensure()
        return self._master

    async def primaries(self) -> list[Address]:
        """See `Topology`."""
        await self._ensure()
        return [self._master]

    def _informants(self) -> Iterable[Address]:
        return self._settings.addresses

    async def _learn(self, informant: Address) -> None:
        service = self._settings.service
        lines = Lines(
            lambda: self._settings.wire(informant, sentinel=True), self._settings.timeout, asyncio.Semaphore(1)
        )
        try:
            (reply,) = await lines.exchange([("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service)])
        finally:
            await lines.close()
        if isinstance(reply, Exception):
            raise Unlocated(refused(reply, self._settings.where))
        if reply is None:
            reason = f"the sentinel {informant} knows no master {service!r}; check the service's name"
            raise Unlocated(Verdict(StoreUnavailable(self._settings.where, reason, applied=False), passing=True))
        self._master = _address(reply[0], reply[1], informant)


def topology_of(settings: Settings) -> Topology:
    """The topology of a store's kind."""
    kinds: dict[str, type[Topology]] = {"single": Single, "cluster": Cluster, "sentinel": Sentinels}
    return kinds[settings.kind](settings)


def _address(host: Any, port: Any, informant: Address) -> Address:
    """An address as a server tells it; without a host it means its own."""
    name = host.decode() if isinstance(host, bytes) else host or ""
    return Address(name if name not in ("", "?") else informant.host, int(port))


def _down(where: str, reason: str) -> Verdict:
    error: StoreError = StoreUnavailable(where, f"is a cluster that is down: {reason}; try again", applied=False)
    return Verdict(error, passing=True)
