"""A support agent as a service. `python app.py` talks to it here; README.md says how to deploy it."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio

from turnkeeper import Agent, Flow, FlowContext, ModelInvocationResponse, ModelRequest, run_console, tool
from turnkeeper.engine.wire import ModelToolRequest, chat_form
from turnkeeper.models.scripted import text
from turnkeeper.service import Running, Service

ORDERS = {"4711": "on its way", "4712": "delivered on Monday"}


@tool(replay_safe=True)
def order_status(order: str) -> str:
    """Where an order is. It only reads, so it may run again after a crash."""
    return ORDERS.get(order, "unknown")


@tool
def refund(order: str) -> str:
    """Refund an order. It must never happen twice: after a crash in its middle the turn waits until somebody has looked."""
    return f"order {order} is refunded"


class OfflineModel:
    """Stands for a model, so that this runs without a key. With OPENAI_API_KEY, a real one is used."""

    async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
        """Look for an order's number, and say what the tool found."""
        last: dict[str, Any] = chat_form(request.messages[-1])
        if last["role"] == "tool":
            return text(f"Your order is {last['content']}.")
        order = next((word.strip(".,!?") for word in last["content"].split() if word.strip(".,!?").isdigit()), None)
        if order is None:
            return text("Tell me the number of your order, please.")
        name = "refund" if "refund" in last["content"].lower() else "order_status"
        return ModelInvocationResponse(tool_requests=[ModelToolRequest(id="1", name=name, arguments={"order": order})])


def model() -> Any:
    """The model: OpenAI's where there is a key, and what stands for one where there is none."""
    if "OPENAI_API_KEY" not in os.environ:
        return OfflineModel()
    from openai import AsyncOpenAI

    from turnkeeper.models.openai import OpenAIResponses

    return OpenAIResponses(AsyncOpenAI(), os.environ.get("OPENAI_MODEL", "gpt-5.5"))


agent = Agent(model(), [order_status, refund], instructions="You help customers of a shop with their orders.")
flow = Flow("support")


@flow.step
async def talk(c: FlowContext) -> Any:
    """One message, one answer; then the next one."""
    said = {"role": "user", "content": c.message.text}
    answer = await c.run(agent, [*c.state.get("history", []), said])
    # The instructions are put before each turn's conversation anew.
    c.state["history"] = [message for message in answer.messages if message["role"] != "system"]
    await c.send(answer.text or "I have nothing to say to that.")
    await c.ask()
    return talk


SECRET = os.environ.get("WEBHOOK_SECRET", "")
REPLIES = os.environ.get("WEBHOOK_REPLIES", "")


@asynccontextmanager
async def webhook() -> AsyncGenerator[Any]:
    """Answers go to the address in WEBHOOK_REPLIES."""
    from turnkeeper.channels.webhook import WebhookChannel

    async with WebhookChannel(REPLIES, SECRET) as channel:
        yield channel


async def front(running: Running) -> None:
    """Messages come in at /webhook, signed with WEBHOOK_SECRET."""
    import uvicorn

    from turnkeeper.channels.webhook import webhook_app

    app = webhook_app(running.bot, SECRET)
    await uvicorn.Server(uvicorn.Config(app, host="0.0.0.0", port=int(os.environ.get("PORT", "8080")))).serve()  # noqa: S104


service = Service(flow, {"webhook": webhook}, front=front)


if __name__ == "__main__":
    anyio.run(run_console, flow, service.store, "console", "console.jsonl")
