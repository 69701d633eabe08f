"""Every name that telemetry uses: by GenAI's semantic conventions where they have one, else `turnkeeper.*`.

The conventions are still in development, so a name that they change is changed here and nowhere else. The tables at the end
say what is emitted; docs/telemetry.md shows them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

SCOPE: Final = "turnkeeper"
"""The instrumentation scope of everything that is emitted."""


def error_type(error: BaseException) -> str:
    """What `error.type` says of an exception: our kind, where it has one, else its class."""
    if not isinstance(error, Exception):
        return "cancelled"
    kind = getattr(error, "kind", None)
    return kind if isinstance(kind, str) and kind else type(error).__qualname__


# --- spans ---------------------------------------------------------------------------------------------------------

TURN: Final = "invoke_agent"
CALL_TURN: Final = "turnkeeper.call"
CHAT: Final = "chat"
EXECUTE_TOOL: Final = "execute_tool"
SEND: Final = "turnkeeper.send"
CONVERSATION_TURN: Final = "turnkeeper.conversation.turn"

# --- attributes: the conventions' ----------------------------------------------------------------------------------

OPERATION: Final = "gen_ai.operation.name"
CONVERSATION_ID: Final = "gen_ai.conversation.id"
PROVIDER: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
TOKEN_TYPE: Final = "gen_ai.token.type"  # noqa: S105  # input or output
TOOL_NAME: Final = "gen_ai.tool.name"
TOOL_TYPE: Final = "gen_ai.tool.type"
TOOL_CALL_ID: Final = "gen_ai.tool.call.id"
TOOL_ARGUMENTS: Final = "gen_ai.tool.call.arguments"
TOOL_RESULT: Final = "gen_ai.tool.call.result"
INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
ERROR_TYPE: Final = "error.type"

# --- attributes: ours ----------------------------------------------------------------------------------------------

TURN_ID: Final = "turnkeeper.turn.id"
TURN_SCOPE: Final = "turnkeeper.turn.scope"
TURN_STATUS: Final = "turnkeeper.turn.status"
TURN_RESUMED: Final = "turnkeeper.turn.resumed"
ROUND: Final = "turnkeeper.round"
SLOT: Final = "turnkeeper.slot"
FENCE: Final = "turnkeeper.fence"
ATTEMPT: Final = "turnkeeper.attempt"
OPERATION_ID: Final = "turnkeeper.operation.id"
TOOL_POLICY: Final = "turnkeeper.tool.policy"
OUTCOME: Final = "turnkeeper.outcome"
SEND_KEY: Final = "turnkeeper.send.key"
SENT_MESSAGE_ID: Final = "turnkeeper.send.message_id"
SENT_TEXT: Final = "turnkeeper.send.text"
MESSAGE_NUMBER: Final = "turnkeeper.message.number"
EFFECT: Final = "turnkeeper.effect"
EVENT: Final = "turnkeeper.event"
STORE: Final = "turnkeeper.store"

# --- metrics -------------------------------------------------------------------------------------------------------

TURNS: Final = "turnkeeper.turns"
EFFECTS: Final = "turnkeeper.effects"
AMBIGUOUS_OPEN: Final = "turnkeeper.ambiguous.open"
LEASE_LOSSES: Final = "turnkeeper.lease.losses"
APPEND_DURATION: Final = "turnkeeper.append.duration"
MODEL_DURATION: Final = "gen_ai.client.operation.duration"
TOKEN_USAGE: Final = "gen_ai.client.token.usage"  # noqa: S105  # a metric

# --- what is emitted -----------------------------------------------------------------------------------------------


class SpanName(NamedTuple):
    """A kind of span.

    Attributes:
        name: of its spans; some append the model's or the tool's.
        kind: OpenTelemetry's span kind.
        covers: what happens within it.
        attributes: that it may have; `error.type` besides.
        contents: attributes that it has only where the host wants contents.
    """

    name: str
    kind: str
    covers: str
    attributes: tuple[str, ...]
    contents: tuple[str, ...] = ()


class MetricName(NamedTuple):
    """A metric."""

    name: str
    instrument: str
    unit: str
    counts: str
    attributes: tuple[str, ...]


_USED: Final = (INPUT_TOKENS, OUTPUT_TOKENS)
_TURN: Final = (TURN_ID, TURN_SCOPE)

SPANS: Final = (
    SpanName(
        TURN,
        "internal",
        "one run of a turn",
        (OPERATION, CONVERSATION_ID, *_TURN, TURN_STATUS, TURN_RESUMED, *_USED),
    ),
    SpanName(
        CALL_TURN,
        "internal",
        "one run of a tool call that a flow's step makes",
        (CONVERSATION_ID, *_TURN, TURN_STATUS, TURN_RESUMED),
    ),
    SpanName(
        CHAT,
        "client",
        "one call of the model",
        (OPERATION, PROVIDER, REQUEST_MODEL, *_TURN, ROUND, ATTEMPT, OPERATION_ID, OUTCOME, *_USED),
        (INPUT_MESSAGES, OUTPUT_MESSAGES),
    ),
    SpanName(
        EXECUTE_TOOL,
        "internal",
        "one tool call behind its barrier, with its retries",
        (OPERATION, TOOL_NAME, TOOL_TYPE, TOOL_CALL_ID, *_TURN, ROUND, SLOT, FENCE, OPERATION_ID, TOOL_POLICY, OUTCOME),
        (TOOL_ARGUMENTS, TOOL_RESULT),
    ),
    SpanName(
        SEND,
        "producer",
        "one attempt at sending a turn's reply, or a message of a conversation",
        (CONVERSATION_ID, *_TURN, SEND_KEY, SENT_MESSAGE_ID, OUTCOME),
        (SENT_TEXT,),
    ),
    SpanName(
        CONVERSATION_TURN,
        "consumer",
        "the handling of one message",
        (CONVERSATION_ID, MESSAGE_NUMBER),
    ),
)

METRICS: Final = (
    MetricName(TURNS, "counter", "{run}", "runs of turns that have ended", (TURN_STATUS, ERROR_TYPE)),
    MetricName(
        EFFECTS, "counter", "{effect}", "effects that were begun, completed, or became ambiguous", (EFFECT, EVENT)
    ),
    MetricName(
        AMBIGUOUS_OPEN,
        "up-down counter",
        "{effect}",
        "effects that became ambiguous, less those that were settled",
        (EFFECT,),
    ),
    MetricName(LEASE_LOSSES, "counter", "{lease}", "leases that were lost while their owner was at work", ()),
    MetricName(APPEND_DURATION, "histogram", "s", "how long durable writes took", (STORE,)),
    MetricName(
        MODEL_DURATION, "histogram", "s", "how long model calls took", (OPERATION, PROVIDER, REQUEST_MODEL, ERROR_TYPE)
    ),
    MetricName(
        TOKEN_USAGE, "histogram", "{token}", "tokens of model calls", (OPERATION, PROVIDER, REQUEST_MODEL, TOKEN_TYPE)
    ),
)

ATTRIBUTES: Final[dict[str, str]] = {
    OPERATION: "`invoke_agent`, `chat` or `execute_tool`",
    CONVERSATION_ID: "the conversation; of a turn outside of one, its `session_id`, where it was given one",
    PROVIDER: "where the model port says it",
    REQUEST_MODEL: "where the model port says it",
    INPUT_TOKENS: "of the call; on a turn, of all calls of this run",
    OUTPUT_TOKENS: "the same",
    TOKEN_TYPE: "`input` or `output`",
    TOOL_NAME: "the tool",
    TOOL_TYPE: "`function`",
    TOOL_CALL_ID: "the provider's id of the call",
    TOOL_ARGUMENTS: "JSON",
    TOOL_RESULT: "JSON",
    INPUT_MESSAGES: "JSON, in the wire form",
    OUTPUT_MESSAGES: "JSON, in the wire form",
    ERROR_TYPE: "our error kind, else the exception's class; `cancelled`",
    TURN_ID: "the turn",
    TURN_SCOPE: "`primary`, or a delegated run's",
    TURN_STATUS: "`success`, `failed`, `reconciliation_required`, `parked`; `raised`, `cancelled` where there is no result",
    TURN_RESUMED: "true where it links to another run, which wrote the log before",
    ROUND: "of the turn, from 0",
    SLOT: "the call's place in its round, from 0",
    FENCE: "grows with each owner of the call",
    ATTEMPT: "at this round's decision, from 0, over all processes",
    OPERATION_ID: "the idempotency key of the effect",
    TOOL_POLICY: "`fail_closed`, `replay_safe`, `reconcile` or `transactional`",
    OUTCOME: "`success`, `failed`, `not_sent`, `refused`, `ambiguous`, `lost` (to another worker) or `given_back`",
    SEND_KEY: "the idempotency key of the send",
    SENT_MESSAGE_ID: "the channel's id",
    SENT_TEXT: "what is sent",
    MESSAGE_NUMBER: "in the conversation's journal",
    EFFECT: "`model`, `tool` or `send`",
    EVENT: "`begun`, `completed` or `ambiguous`",
    STORE: "the kind of store",
}
"""What each attribute says."""

LOG_FIELDS: Final[dict[str, str]] = {
    "turn": "the turn's id",
    "scope": "`primary`, or a delegated run's",
    "round": "of the turn, from 0",
    "slot": "the tool call's place in its round, from 0",
    "conversation": "the conversation's id",
}
"""What log records carry besides their text, where it is known."""
