"""Which of our typed errors a failure of Redis is, whether anything was changed, and whether to try again."""

from __future__ import annotations

from typing import Final, NamedTuple

from redis.exceptions import InvalidResponse

from turnkeeper.errors import (
    StoreBusy,
    StoreDenied,
    StoreError,
    StoreForeign,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
    StoreUnsuitable,
)
from turnkeeper.stores.redis import client as c


class Verdict(NamedTuple):
    """What a failure is, and whether it may pass while nothing was changed: then the same is tried again."""

    error: StoreError
    passing: bool


_DOWN: Final = {
    "LOADING": "is loading its data",
    "CLUSTERDOWN": "is a cluster that is down: some slots have no master (CLUSTERDOWN)",
    "MASTERDOWN": "is a replica without its master (MASTERDOWN)",
    "TRYAGAIN": "is moving the key to another node (TRYAGAIN)",
}
"""Nothing was changed, and it may pass."""


def refused(error: Exception, where: str) -> Verdict:
    """A server's answer that is an error."""
    code, text = c.code_of(error), str(error)
    verdict = _refused(code, text, where)
    verdict.error.__cause__ = error
    return verdict


def _refused(code: str, text: str, where: str) -> Verdict:
    if code in _DOWN:
        return Verdict(StoreUnavailable(where, f"{_DOWN[code]}; try again", applied=False), passing=True)
    match code:
        case "OOM":
            return Verdict(
                StoreFull(where, "has no memory left (OOM); raise maxmemory or free space, then try again"),
                passing=False,
            )
        case "READONLY":
            reason = "is a replica: it can be read but not written (READONLY); give the master's address"
            return Verdict(StoreReadOnly(where, reason), passing=True)
        case "NOREPLICAS":
            reason = "takes no writes while it has too few replicas (min-replicas-to-write)"
            return Verdict(StoreReadOnly(where, reason), passing=True)
        case "MISCONF":
            reason = "takes no writes because it cannot save to its disk (MISCONF); see its log"
            return Verdict(StoreReadOnly(where, reason), passing=False)
        case "BUSY":
            return Verdict(StoreBusy(where, "runs a slow script of somebody else (BUSY); try again"), passing=True)
        case "WRONGTYPE":
            return Verdict(
                StoreForeign(where, "a key of that name is not a log of Turnkeeper's (WRONGTYPE)"), passing=False
            )
        case "WRONGPASS" | "NOPERM":
            return Verdict(
                StoreDenied(where, f"denies access ({text}); check user, password and rights"), passing=False
            )
        case "MOVED" | "ASK":
            reason = "is a node of a cluster; write redis+cluster:// in place of redis://"
            return Verdict(StoreUnsuitable(where, reason), passing=False)
        case _:
            return _worded(text, where)


def _worded(text: str, where: str) -> Verdict:
    """Answers that have no code of their own."""
    words = text.lower()
    if "cluster support disabled" in words or "cluster mode is not enabled" in words:
        return Verdict(
            StoreUnsuitable(where, "is no cluster; write redis:// in place of redis+cluster://"), passing=False
        )
    if "can't run this command" in words:
        # Said from inside a script, which may have written before.
        denied = StoreDenied(
            where, f"denies its scripts a command ({text}); see the rights that docs/guarantees.md names"
        )
        denied.applied = None
        return Verdict(denied, passing=False)
    if "unknown command" in words or "unknown redis command" in words:
        reason = f"does not know a command that is needed ({text}); Redis 6.2 or Valkey 7.2, or newer, is needed"
        return Verdict(StoreUnsuitable(where, reason), passing=False)
    if "db index is out of range" in words or "invalid db index" in words:
        return Verdict(StoreUnsuitable(where, "has no database of that number; give another one"), passing=False)
    return Verdict(StoreUnavailable(where, f"failed ({text})"), passing=False)


def unreachable(error: BaseException | None, where: str) -> Verdict:
    """There was no connection. The server got nothing."""
    if isinstance(error, Exception) and c.is_reply(error):
        return refused(error, where)
    verdict = Verdict(StoreUnavailable(where, f"cannot be reached ({_told(error)})", applied=False), passing=True)
    if isinstance(error, InvalidResponse):
        verdict = Verdict(StoreForeign(where, "does not answer as Redis does; is it the right port?"), passing=False)
    verdict.error.__cause__ = error
    return verdict


def lost(error: BaseException | None, where: str) -> StoreUnavailable:
    """The answer was lost, and with it whether anything was done."""
    ours = StoreUnavailable(where, f"the answer was lost ({_told(error)})")
    ours.__cause__ = error
    return ours


def _told(error: BaseException | None) -> str:
    return str(error) or type(error).__name__
