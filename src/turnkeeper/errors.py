"""Turnkeeper's own errors: each carries the state that explains it and says what to do next."""

from __future__ import annotations

from typing import Literal


class TurnkeeperError(RuntimeError):
    """Base class of every error that Turnkeeper raises on purpose."""


class OwnershipLost(BaseException):
    """This worker no longer owns what it was working on; another worker may already be going on with it.

    Derives from `BaseException` so that a tool's or step's `except Exception` cannot swallow it and go on working.

    Attributes:
        what: the turn, slot or conversation that was lost.
    """

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is no longer owned by this worker: stop here, whoever owns it goes on")
        self.what = what


# --- input ---------------------------------------------------------------------------------------------------


class InvalidInput(TurnkeeperError, ValueError):
    """A caller's argument cannot be accepted. Nothing was written.

    Attributes:
        field: the argument or the path inside it (`messages[2].content`).
        reason: what is wrong with it.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class ValueTooLarge(InvalidInput):
    """A value is over the size limit. Nothing was written; store a shorter value or a reference in its place.

    Attributes:
        size: its size in bytes, encoded.
        limit: the largest size accepted, in bytes.
    """

    def __init__(self, field: str, size: int, limit: int) -> None:
        super().__init__(field, f"{size} bytes are over the limit of {limit} bytes")
        self.size = size
        self.limit = limit


class OwnerAlive(TurnkeeperError):
    """A lease is to be taken from an owner that has renewed it less than half of its length ago. Nothing was changed.

    An owner that lives renews its lease at a third of its length, so one that is silent for longer is dead or cut off.

    Attributes:
        what: the turn or conversation.
        owner: who holds the lease.
        left_ms: milliseconds until it is called silent, if it does not renew its lease before.
    """

    def __init__(self, what: str, owner: str, left_ms: int) -> None:
        super().__init__(
            f"{what}: {owner} has renewed its lease not long ago and may be alive; look again in {left_ms / 1000:.1f} s, or "
            "insist on it if you know that it is dead"
        )
        self.what = what
        self.owner = owner
        self.left_ms = left_ms


class SchemaConflict(TurnkeeperError):
    """Stored data has a form that this version does not know. It is left alone (flows.md, ambiguity 24).

    Attributes:
        where: the log, record or frame.
    """

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}; it was left untouched, upgrade this reader")
        self.where = where
        self.reason = reason


# --- stores --------------------------------------------------------------------------------------------------


class StoreError(TurnkeeperError):
    """A store could not do what it was asked.

    Attributes:
        where: the store (a path or an address, never a password).
        applied: `False` if nothing was changed, `None` if that cannot be known without reading again (LOG-6).
    """

    applied: bool | None = False

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.where = where
        self.reason = reason


class StoreBusy(StoreError):
    """The store was held by others for longer than the caller's patience. Nothing was changed; try again."""


class StoreFull(StoreError):
    """The disk, or the store's configured bound, is full. Nothing was changed; free space and try again."""


class StoreReadOnly(StoreError):
    """The store can be read but not written. Nothing was changed."""


class StoreForeign(StoreError):
    """What is there belongs to something else, and was left untouched."""


class StoreVersion(StoreError):
    """The store was written by a newer version of Turnkeeper, and was left untouched; upgrade this process.

    Attributes:
        found: the version of the store.
        known: the newest version that this process knows.
    """

    def __init__(self, where: str, found: int, known: int) -> None:
        super().__init__(where, f"has schema version {found}, this process knows up to {known}: upgrade it")
        self.found = found
        self.known = known


class StoreOutdated(StoreError):
    """The store was written by an older version of Turnkeeper, and was left untouched; run `turnkeeper migrate`.

    Attributes:
        found: the version of the store.
        known: the version that this process works with.
    """

    def __init__(self, where: str, found: int, known: int) -> None:
        super().__init__(
            where, f"has schema version {found}, this process needs {known}: run `turnkeeper migrate` on it"
        )
        self.found = found
        self.known = known


class StoreMissing(StoreError):
    """There is no store at that place, and the caller did not want one to be made."""


class StoreUnsuitable(StoreError):
    """The place cannot keep the store's promises (a network file system, say)."""


class StoreCorrupt(StoreError):
    """The store's file is damaged. It was left untouched: keep it, and restore from a copy."""


class StoreDenied(StoreError):
    """The store does not let this user in, or does not let it do this; check its name, password and rights."""


class StoreRolledBack(StoreError):
    """A log is shorter than what the store had confirmed: a failover or a restored copy has lost appends.

    Whoever knew the longer log must not go on from it; a new reader gets the log as it is now.
    """


class StoreUnavailable(StoreError):
    """The store could not be reached, or failed while it worked.

    `applied` is None, as whether it was applied is not known, unless the store surely never got it.
    """

    applied = None

    def __init__(self, where: str, reason: str, *, applied: bool | None = None) -> None:
        super().__init__(where, reason)
        self.applied = applied


class StoreClosed(StoreError):
    """The store was closed before the call."""


class StoreContention(StoreError):
    """So many other writers moved the same log that this one gave up. Nothing was changed; try again."""


class EncryptionError(StoreError):
    """A record cannot be sealed or opened; nothing was changed. No message or attribute ever holds a key.

    `where` names the log and the record.

    Attributes:
        key_id: the id of the key that it is sealed with, or is to be; None where no key is named.
    """

    def __init__(self, where: str, key_id: str | None, reason: str) -> None:
        super().__init__(where, reason)
        self.key_id = key_id


class KeyMissing(EncryptionError):
    """A record is sealed with a key that is not in this process's keyring, or there is no keyring."""


class KeyWrong(EncryptionError):
    """The keyring has another key under the id that a record names: two keys were given the same id."""


class KeyUnavailable(EncryptionError):
    """The function that gives a key (a KMS's, say) failed; the call may be made again."""


class RecordTampered(EncryptionError):
    """A record is not as it was sealed: it was changed, or moved here from another log or another place in this one."""


class RecordPlain(EncryptionError):
    """A record is not encrypted, and the keyring does not allow that: it is older than the encryption, or was put there."""


class UnknownStoreUrl(TurnkeeperError, ValueError):
    """A store URL names no store that this installation knows."""


# --- turns (names of the first seed) -------------------------------------------------------------------------


class TurnCheckpointError(TurnkeeperError):
    """Base class for an unusable or invalid durable turn checkpoint."""


class TurnCheckpointBusy(TurnCheckpointError):
    """Another fenced worker currently owns the logical turn or tool call.

    Attributes:
        owner: who owns it.
        until: end of its lease, in milliseconds of the store's clock.
    """

    def __init__(self, what: str, owner: str | None = None, until: int | None = None) -> None:
        super().__init__(f"{what} is owned by {owner or 'another worker'}; wait for it to finish or its lease to end")
        self.what = what
        self.owner = owner
        self.until = until


class TurnCheckpointConflict(TurnCheckpointError):
    """The logical turn/slot already contains different canonical input."""


class TurnSchemaConflict(TurnCheckpointError, SchemaConflict):
    """The stored turn has a form that this version does not know; it was left alone."""


# --- conversations -------------------------------------------------------------------------------------------


class ConversationError(TurnkeeperError):
    """What was asked of a conversation does not fit how it stands."""


class OutboxConflict(ConversationError):
    """A step that ran again wants to send something else than what its key stands for (flows.md, O2). Nothing was sent.

    The step's code is not deterministic, or was changed: take what differs from run to run out of `c.once`, `c.now` or
    `c.random`, or give the flow a new version.

    Attributes:
        conversation_id: the conversation.
        key: message, sequence and chunk of the send.
    """

    def __init__(self, conversation_id: str, key: tuple[int, ...]) -> None:
        super().__init__(
            f"conversation {conversation_id!r}: the send {key} was another text when this step ran first; nothing was sent"
        )
        self.conversation_id = conversation_id
        self.key = key


class EffectConflict(ConversationError):
    """A step that ran again wants an effect, or an agent's turn, with something else than when it ran first. It was not done.

    As with `OutboxConflict`: take what differs from run to run out of `c.once`, `c.now` or `c.random`.

    Attributes:
        conversation_id: the conversation.
        effect: the tool's name, or the agent turn's.
    """

    def __init__(self, conversation_id: str, effect: str) -> None:
        super().__init__(
            f"conversation {conversation_id!r}: {effect!r} was given something else when this step ran first; it was not done"
        )
        self.conversation_id = conversation_id
        self.effect = effect


class FlowCheckpointConflict(ConversationError):
    """A conditional write met another revision than it expected (R2): somebody else has gone on; read, and do not retry.

    Attributes:
        expected: the revision that the writer knew.
        found: the one that is there; 0 for none, or for one that was set without a condition.
    """

    def __init__(self, conversation_id: str, expected: int, found: int) -> None:
        super().__init__(f"conversation {conversation_id!r}: its row has revision {found}, not {expected}")
        self.conversation_id = conversation_id
        self.expected = expected
        self.found = found


class MessageRefused(ConversationError):
    """The channel refuses a message for good; it is not sent again.

    Attributes:
        key: message, sequence and chunk of the send.
        reason: the channel's words.
    """

    def __init__(self, conversation_id: str, key: tuple[int, ...], reason: str) -> None:
        super().__init__(f"conversation {conversation_id!r}: its message {key} was refused: {reason}")
        self.conversation_id = conversation_id
        self.key = key
        self.reason = reason


class MessageNotDelivered(ConversationError):
    """A message is not known to be out, and trying again did not help; the conversation is gone on with later.

    Attributes:
        key: message, sequence and chunk of the send.
        retry_after: seconds to wait.
    """

    def __init__(self, conversation_id: str, key: tuple[int, ...], retry_after: float) -> None:
        super().__init__(f"conversation {conversation_id!r}: its message {key} could not be delivered yet")
        self.conversation_id = conversation_id
        self.key = key
        self.retry_after = retry_after


class EffectFailed(ConversationError):
    """An effect of a step did not happen, or was refused; the same when the step runs again.

    Attributes:
        kind: why, as an error kind.
    """

    def __init__(self, what: str, kind: str, reason: str) -> None:
        super().__init__(f"{what}: {reason}")
        self.kind = kind
        self.reason = reason


class TurnUnfinished(ConversationError):
    """A turn that a step waits for cannot be finished yet: its outcome has to be settled, or somebody has to approve.

    Not caught, it puts the conversation's message back: it is gone on with once that is done.

    Attributes:
        turn_id: the turn; settle it, then the conversation goes on by itself.
        status: of the turn.
        open_slots: (round, slot) of the calls that wait.
    """

    def __init__(self, turn_id: str, status: str, reason: str, open_slots: tuple[tuple[int, int], ...] = ()) -> None:
        super().__init__(f"turn {turn_id!r} is not finished ({status}): {reason}")
        self.turn_id = turn_id
        self.status = status
        self.open_slots = open_slots


class FlowUnknown(ConversationError):
    """A conversation is in a flow, or in a version of one, that this process does not know; it was left alone.

    Attributes:
        flow, version: what its row says.
    """

    def __init__(self, conversation_id: str, flow: str, version: int) -> None:
        super().__init__(
            f"conversation {conversation_id!r} is in version {version} of the flow {flow!r}, which this process does not "
            "know; another may, or deploy that version"
        )
        self.conversation_id = conversation_id
        self.flow = flow
        self.version = version


# --- channels ------------------------------------------------------------------------------------------------


class TranscriptError(TurnkeeperError):
    """A console's transcript cannot be used, or a line could not be written to it.

    Attributes:
        path: the file.
        reason: what is wrong.
        applied: False where nothing was changed; None where a part of a line may stand there.
    """

    def __init__(self, path: str, reason: str, *, applied: Literal[False] | None = False) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason
        self.applied = applied
