"""Identities of a conversation: its log's key, its events' digests, its sends' keys, its instances' and effects' names."""

from __future__ import annotations

import hashlib
from typing import Final

from turnkeeper.conversation.state import SendKey

EVENT_BYTES: Final = 12
"""Of an event's digest: two of a million events agree by chance once in 10^17 conversations."""


def _digest(*parts: str | int, size: int = 16) -> bytes:
    digest = hashlib.blake2b(digest_size=size)
    for part in parts:
        text = str(part).encode()
        digest.update(b"%d:%s" % (len(text), text))
    return digest.digest()


def conversation_hash(conversation_id: str) -> str:
    """A short form of a conversation's id, without characters that mean something to a store."""
    return _digest("conversation", conversation_id).hex()


def conversation_key(conversation_id: str) -> str:
    """The key of a conversation's log."""
    return f"conversation:{{{conversation_hash(conversation_id)}}}"


def event_digest(event_id: str) -> bytes:
    """What a repeated event is told by."""
    return _digest("event", event_id, size=EVENT_BYTES)


def send_key(conversation_id: str, seed: bytes, key: SendKey) -> str:
    """The key under which a message is sent, the same on every attempt, on every machine (F3).

    `seed` is the log's own: a conversation that was erased and begins anew has other keys.
    """
    return "msg_" + _digest("send", conversation_id, seed.hex(), *key).hex()


def instance_id(conversation_id: str, seed: bytes, number: int) -> str:
    """Names the run of a flow that a message has begun."""
    return _digest("instance", conversation_id, seed.hex(), number).hex()


def effect_turn(instance: str, entry: int, name: str, nth: int) -> str:
    """The turn of an effect: the nth of that name in that visit of a step."""
    return f"flow:{instance}:{entry}:{name}:{nth}"


def chance_seed(seed: bytes, instance: str, entry: int, record: int) -> bytes:
    """What the random values of a step are made of, behind the message that caused them."""
    return seed + _digest("chance", instance, entry, record)


def timer_id(instance: str, entry: int, name: str, nth: int) -> str:
    """Names a timer of a visit of a step."""
    return _digest("timer", instance, entry, name, nth).hex()
