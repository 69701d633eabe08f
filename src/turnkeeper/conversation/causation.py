"""What a message means for a flow's checkpoint (flows.md F4, rules C1 to C9): pure."""

from __future__ import annotations

from typing import Literal

from msgspec.structs import replace

from turnkeeper.conversation import commands as c
from turnkeeper.conversation.state import Answer, ConversationState, Inbound, Row

Mode = Literal["begin", "resume", "answer", "continue", "woken", "unasked", "cancel", "reminder", "settle"]
"""What its owner does with a claimed message.

begin: run the flow that it begins. resume: run the step again from its start. answer: run the step again, its waits are
given the answers in the row. continue: give it to the continuation that this process holds. woken: its wait is lost, run the
step again; the message is no answer. unasked: nothing waits for it. cancel: end the flow. reminder: a timer has fired that
no wait has set. settle: nothing is left to do.
"""


def row_after(state: ConversationState, message: Inbound, claim: c.Claim, instance: str) -> tuple[Mode, Row | None]:
    """What the message is for, and the row that has to be written before any code runs for it, if there is one.

    `instance` names the flow that the message would begin.
    """
    row = state.row
    if row is not None and row.handover is not None and row.handover.kind == "stub":
        return "cancel", None
    if row is not None and row.inbound == message.number:
        return _replayed(row)
    flow = state.flow
    if message.timer:
        if flow is None or flow.timer != message.timer:
            return "reminder", None
        return _answered(flow, message, claim)
    if flow is None:
        return _begun(message, claim, state, instance)
    match claim.intent:
        case "restart":
            return _begun(message, claim, state, instance)
        case "cancel":
            return "cancel", None
        case "unasked":
            return "unasked", None
        case _:
            pass
    if message.number <= flow.watermark:
        # C8. Also where the wait is lost: what was begun for this message beside the flow is found again by its keys.
        return "unasked", None
    return _answered(flow, message, claim)


def _replayed(row: Row) -> tuple[Mode, Row | None]:
    """C3: this row captures the message; it is not delivered to the flow again."""
    if row.ended is not None or row.parked:
        return "settle", None
    return "resume", None if row.handover is None else replace(row, handover=None)


def _begun(message: Inbound, claim: c.Claim, state: ConversationState, instance: str) -> tuple[Mode, Row | None]:
    """C1."""
    start = claim.start
    if start is None:
        return "unasked", None
    row = Row(
        start.flow,
        start.version,
        start.step,
        instance,
        state=start.state,
        inbound=message.number,
        cause=(message.number, 0),
        first_wait=start.first_wait,
        message=_as_answer(message),
        earlier=state.superseded if message.number >= state.superseded_by else (),
        trace=claim.trace,
    )
    return "begin", row


def _as_answer(message: Inbound) -> Answer:
    return Answer(message.number, message.kind, message.message, message.at)


def _answered(flow: Row, message: Inbound, claim: c.Claim) -> tuple[Mode, Row | None]:
    answer = _as_answer(message)
    live = claim.live == flow.revision
    if flow.parked:
        # C4: the answer is kept before any code sees it; the step's sends go on counting from where they did.
        answers = (answer,) if flow.first_wait else (*flow.answers, answer)
        taken = replace(
            flow,
            answers=answers,
            inbound=message.number,
            parked=False,
            prompts=(),
            timer="",
            handover=None,
            trace=claim.trace,
        )
        return ("continue" if live else "answer"), taken
    if live:
        # The seed's mode keeps no later answer: who goes on without this process asks again (C3).
        return "continue", replace(flow, answers=(), inbound=message.number, prompts=(), timer="", trace=claim.trace)
    if message.timer:
        return "reminder", None
    # C5: the wait was lost with its process. The message wakes the flow and is no answer.
    woken = replace(
        flow,
        answers=(),
        inbound=message.number,
        cause=(message.number, 0),
        message=_as_answer(message),
        prompts=(),
        timer="",
        handover=None,
        trace=claim.trace,
    )
    return "woken", woken
