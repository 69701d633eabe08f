"""The service whose latency is measured: one step that answers. Its processes import it as `bench.service_app:service`."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from turnkeeper.channels.webhook import WebhookChannel, webhook_app
from turnkeeper.conversation.context import FlowContext
from turnkeeper.conversation.flow import Flow
from turnkeeper.service import Running, Service

SECRET = os.environ.get("WEBHOOK_SECRET", "")

flow = Flow("echo")


@flow.step
async def answer(c: FlowContext) -> None:
    """Say the same."""
    await c.send(c.message.text)


@asynccontextmanager
async def webhook() -> AsyncGenerator[Any]:
    """Answers go to the benchmark."""
    async with WebhookChannel(os.environ["WEBHOOK_REPLIES"], SECRET) as channel:
        yield channel


async def front(running: Running) -> None:
    """Messages come in at PORT."""
    app = webhook_app(running.bot, SECRET)
    config = uvicorn.Config(app, host="127.0.0.1", port=int(os.environ["PORT"]), log_level="warning", access_log=False)
    await uvicorn.Server(config).serve()


service = Service(flow, {"webhook": webhook}, front=front)
