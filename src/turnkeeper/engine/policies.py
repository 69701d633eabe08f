"""The host's say in a turn: the conversation before a model call, the messages of a round, the final output (1.14, 1.16)."""

from __future__ import annotations

from collections.abc import Sequence

from turnkeeper.engine.checkpoints import stable_prefix
from turnkeeper.engine.contract_ports import HostPolicyError, HostPolicyPort
from turnkeeper.engine.host import Host
from turnkeeper.engine.journal import Journal
from turnkeeper.engine.outcomes import awaited
from turnkeeper.engine.transcript import check_pairs, common_prefix, result_text, tool_exchange
from turnkeeper.engine.wire import (
    FinalOutputPolicyRequest,
    HostPolicyRequest,
    Message,
    ModelInvocationResponse,
    ModelToolResult,
    to_builtins,
)
from turnkeeper.log import values
from turnkeeper.turn import commands as c


class HostSaidNo(Exception):
    """One of the host's ports refused, failed or broke its contract; the run fails with this kind (2.16)."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


async def apply_policy(
    journal: Journal, policy: HostPolicyPort, round_index: int, *, messages: Sequence[Message]
) -> None:
    """Let the host change the conversation before a model call; what it changed is durable before the call.

    Raises:
        HostSaidNo: it refused, failed, or made a conversation that no provider accepts.
    """
    state = journal.state
    identity = journal.identity
    prefix = stable_prefix(state, identity, journal.read)
    request = HostPolicyRequest(
        session_id=identity.session_id or "",
        turn_id=state.trace_id,
        iteration=round_index,
        messages=list(messages),
        stable_prefix_messages=prefix,
        inputs=identity.inputs,
    )
    try:
        result = await awaited(policy.before_model(request))
        if not result.messages:
            raise HostPolicyError("policy_error", "the conversation must not be empty")
        if not 0 <= result.stable_prefix_messages <= len(result.messages):
            raise HostPolicyError("policy_error", "the stable prefix is longer than the messages")
        check_pairs(result.messages)
    except HostPolicyError as e:
        raise HostSaidNo(e.error_kind, str(e)) from e
    except Exception as e:
        raise HostSaidNo("policy_error", f"{type(e).__name__}: {e}") from e
    keep = common_prefix(messages, result.messages)
    told = result.stable_prefix_messages
    # A provider that was asked before has no more of it than what stayed the same (field case 08).
    asked_before = state.model_calls > 0 or identity.begun_with is not None
    prefix_now = min(told, keep) if asked_before else told
    if list(result.messages) == list(messages) and prefix_now == prefix:
        return
    tail = values.freeze([to_builtins(message) for message in result.messages[keep:]], "messages")
    metadata = None if result.metadata is None else values.freeze(result.metadata, "metadata")
    await journal.ask(c.ApplyPolicy(round_index, keep, tail, prefix_now, metadata))


async def final_output(
    journal: Journal, policy: HostPolicyPort, text: str | None, *, messages: Sequence[Message]
) -> str | None:
    """The final output as the host wants it.

    Raises:
        HostSaidNo: it refused or failed.
    """
    state = journal.state
    identity = journal.identity
    request = FinalOutputPolicyRequest(
        session_id=identity.session_id or "",
        turn_id=state.trace_id,
        iteration=state.current_round,
        messages=list(messages),
        output=text,
        inputs=identity.inputs,
    )
    try:
        output = (await awaited(policy.before_commit(request))).output
    except HostPolicyError as e:
        raise HostSaidNo(e.error_kind, str(e)) from e
    except Exception as e:
        raise HostSaidNo("policy_error", f"{type(e).__name__}: {e}") from e
    return None if output is None else result_text(output)


def exchange_of(
    host: Host, response: ModelInvocationResponse, results: Sequence[ModelToolResult], round_index: int
) -> list[Message]:
    """The messages of a finished round, which providers have to accept, whoever makes them.

    Raises:
        HostSaidNo: the host's formatter failed, or left a call without its result. The results are durable.
    """
    if host.conversation is None:
        exchange = tool_exchange(response, results, round_index)
        check_pairs(exchange)
        return exchange
    try:
        exchange = list(host.conversation.format_tool_exchange(response, results))
        check_pairs(exchange)
    except Exception as e:
        raise HostSaidNo("conversation_format_error", f"{type(e).__name__}: {e}") from e
    return exchange
