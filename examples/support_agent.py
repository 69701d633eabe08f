"""A support agent in the console, with hand-over to a person. It needs no keys: a script stands for the model.

    python examples/support_agent.py [--store URL] [--transcript FILE]

Ask for an order ("where is order 1001?"), or for a person. From then on the console is shared: what you type is said by the
customer, `/operator …` by the operator, and `/operator /close` gives the customer back to the agent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
from pathlib import Path
from typing import Any

from turnkeeper import Agent, Flow, FlowContext, ModelInvocationResponse, ModelRequest, ScriptedModel, run_console, tool
from turnkeeper.models.scripted import calls

ORDERS = {"1001": "on its way, with you on Friday", "1002": "waiting for its payment"}
OPERATOR = "/operator"


@tool(replay_safe=True)
def find_order(number: str) -> str:
    """How an order stands. Only reads, so it may run again."""
    return ORDERS.get(number, "not known")


@tool(replay_safe=True)
def hand_over(topic: str) -> dict[str, str]:
    """Give the customer to a person. Only says so: the flow does it."""
    return {"topic": topic}


def scripted(request: ModelRequest) -> Any:
    """What a model would decide."""
    said = request.messages[-1]
    asked = next(one.text for one in reversed(request.messages) if one.role == "user")
    if said.role == "tool":
        if said.metadata["name"] == "hand_over":
            return "I am getting a colleague for you."
        return f"Your order is {said.text}. Anything else?"
    if number := re.search(r"\d{4}", asked):
        return calls(("find_order", {"number": number[0]}))
    if re.search(r"person|human|operator", asked, re.IGNORECASE):
        return calls(("hand_over", {"topic": asked}))
    said_so_far = sum(one.role == "user" for one in request.messages)
    return f"You have said {said_so_far} things. Tell me an order's number, or ask for a person."


class SlowModel:
    """Anything with an async `invoke` is a model; this one thinks for a while."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._script = ScriptedModel(scripted)

    async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
        """Answer."""
        await asyncio.sleep(self._seconds)
        return await self._script.invoke(request)


def support_flow(*, slow: float = 0, lease_seconds: float = 5) -> Flow:
    """The agent answers each message in a turn of its own, and is shown what else is said while it thinks."""
    agent = Agent(SlowModel(slow), tools=[find_order, hand_over], lease_seconds=lease_seconds)
    flow = Flow("support", initial=lambda: {"history": []}, while_running="steer")

    # A step for each message: what is asked and answered in a step is kept until it ends, and a long chat in one step would
    # run again from its first message.
    @flow.step
    async def answer(c: FlowContext) -> str:
        answered = await c.run(agent, [*c.state["history"], {"role": "user", "content": c.message.text}])
        c.state["history"] = answered.messages
        if answered.text:
            await c.send(answered.text)
        for result in answered.tool_results:
            if result.name == "hand_over":
                await c.send(f"[to the operator] A customer asks: {result.output['topic']}")
                return "relay"
        return "listen"

    @flow.step
    async def listen(c: FlowContext) -> str:
        await c.ask()
        return "answer"

    @flow.step
    async def relay(c: FlowContext) -> str:
        said = await c.ask()
        by_operator = said.startswith(OPERATOR)
        text = said.removeprefix(OPERATOR).strip()
        if by_operator and text == "/close":
            await c.send("Our colleague has left. I am the agent again: what can I do for you?")
            return "listen"
        await c.send(f"Operator: {text}" if by_operator else f"[to the operator] Customer: {text}")
        # The agent is to know afterwards what was agreed.
        said_by = {"role": "assistant", "content": f"(our colleague) {text}"}
        c.state["history"].append(said_by if by_operator else {"role": "user", "content": text})
        return "relay"

    return flow


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="Talk to a support agent in the console.")
    parser.add_argument("--store", default="sqlite:///support_agent.db", help="where the conversation is kept")
    parser.add_argument("--transcript", type=Path, default=Path("support_agent.jsonl"), help="what was said")
    parser.add_argument("--slow-model", type=float, default=0, help="seconds that the model thinks")
    parser.add_argument("--lease", type=float, default=5, help="seconds until a killed process counts as dead")
    given = parser.parse_args()
    flow = support_flow(slow=given.slow_model, lease_seconds=given.lease)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run_console(flow, given.store, "support", given.transcript, lease_seconds=given.lease))


if __name__ == "__main__":
    main()
