"""Validators that do not take an answer: what is asked next (C6)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conversation.driving import replica
from tests.conversation.platform import Platform
from turnkeeper.conversation.context import FlowContext, Reject
from turnkeeper.conversation.flow import Flow
from turnkeeper.conversation.message import Button, Content, Message
from turnkeeper.stores.sqlite import SqliteStore

pytestmark = pytest.mark.anyio


def reject(message: Message) -> str:
    raise Reject("Yes or no?")


def reject_silently(message: Message) -> str:
    raise Reject


def number(message: Message) -> int:
    return int(message.text)


PROMPT = Content(text="Sure?", buttons=(Button("Yes"), Button("No")))


@pytest.mark.parametrize(
    ("prompt", "validate", "asked"),
    [
        (PROMPT, reject, Content(text="Yes or no?", buttons=PROMPT.buttons)),
        (PROMPT, reject_silently, PROMPT),
        (PROMPT, number, PROMPT),
        (None, reject, Content(text="Yes or no?")),
        (None, number, Content(text="Please try again.")),
    ],
)
async def test_what_is_asked_next(prompt: Content | None, validate: Any, asked: Content) -> None:
    """The words of a `Reject`; never those of an error that was not meant for people. Buttons stay with the question."""
    flow = Flow("f")

    @flow.step
    async def only(c: FlowContext) -> None:
        await c.ask(prompt, validate=validate)

    platform = Platform()
    store = await SqliteStore.open(":memory:")
    async with replica(store, flow, platform) as person:
        await person.says("hi")
        await person.says("what?")
    await store.close()
    assert platform.seen[-1][2] == asked
