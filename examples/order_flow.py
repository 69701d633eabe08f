"""An order taken in the console: kill it wherever you like, start it again, and it goes on where it stood.

    python examples/order_flow.py [--store URL] [--transcript FILE]

Say anything to begin. `cancel` ends the order, `start over` begins it anew. What the "bank" has seen stands in the ledger.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turnkeeper import (
    END,
    Button,
    Content,
    DidNotHappen,
    Flow,
    FlowContext,
    Happened,
    Reject,
    TimedOut,
    ToolContext,
    run_console,
    tool,
)
from turnkeeper.conversation.message import Message

PRICES = {"S": 1900, "M": 2100, "L": 2300}


class Bank:
    """Stands for a payment provider: an append-only ledger file, one JSON object a line."""

    def __init__(self, ledger: Path, slow: float) -> None:
        self._ledger = ledger
        self._slow = slow

    def charge(self, operation_id: str, cents: int) -> str:
        """Charge, and give a receipt. `slow` seconds lie before the charge, and as many between it and the answer."""
        self._write(operation_id, seen="request", cents=cents)
        time.sleep(self._slow)
        self._write(operation_id, seen="charge", cents=cents)
        time.sleep(self._slow)
        return receipt_of(operation_id)

    def find(self, operation_id: str) -> str | None:
        """The receipt of a charge, if it was made."""
        charged = any(row["id"] == operation_id and row["seen"] == "charge" for row in self._rows())
        return receipt_of(operation_id) if charged else None

    def _rows(self) -> Iterator[dict[str, Any]]:
        if self._ledger.exists():
            yield from map(json.loads, self._ledger.read_text().splitlines())

    def _write(self, operation_id: str, **row: Any) -> None:
        file = os.open(self._ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, json.dumps({"id": operation_id, **row}).encode() + b"\n")
            os.fsync(file)
        finally:
            os.close(file)


def receipt_of(operation_id: str) -> str:
    """A bank's receipt number."""
    return f"R-{operation_id[-8:]}"


def a_size(message: Message) -> str:
    """A validator: gives the value of the answer, or rejects it with what is asked next."""
    size = (message.value or message.text).strip().upper()
    if size not in PRICES:
        raise Reject(f"We have {', '.join(PRICES)}. Which one?")
    return size


def an_address(message: Message) -> str:
    """A street with a number, and a town."""
    address = " ".join(message.text.split())
    if "," not in address or not any(one.isdigit() for one in address):
        raise Reject("Street and number, then a comma and the town, please.")
    return address


def yes_or_no(message: Message) -> bool:
    """A button, or the word."""
    word = (message.value or message.text).strip().casefold()
    if word not in ("yes", "no"):
        raise Reject("Yes or no?")
    return word == "yes"


def order_flow(bank: Bank, *, timeout: float, remind: float) -> Flow:
    """The flow: each step is a plain async function, and runs again from its start after a crash."""
    flow = Flow("order", cancel_words=["cancel"], restart_words=["start over"])

    async def look_up(context: ToolContext) -> Happened | DidNotHappen:
        # Conclusive, as this bank lives in our process: a charge that is not in the ledger died with it.
        receipt = bank.find(context.operation_id)
        return DidNotHappen() if receipt is None else Happened(receipt)

    @tool(reconcile=look_up)
    def charge(cents: int, context: ToolContext) -> str:
        """Charge the customer's card. Must never happen twice."""
        return bank.charge(context.operation_id, cents)

    @flow.step
    async def what(c: FlowContext) -> None:
        await c.send("Welcome to the shirt shop!")
        sizes = tuple(Button(size) for size in PRICES)
        c.state["size"] = await c.ask(Content(text="Which size?", buttons=sizes), validate=a_size)
        c.state["address"] = await c.ask("Where shall we send it?", validate=an_address)

    @flow.step
    async def confirm(c: FlowContext) -> str | None:
        order = c.state
        await c.remind("unconfirmed", "Your order waits for your yes.", after=remind)
        try:
            sure = await c.ask(
                Content(
                    text=f"A shirt in {order['size']} to {order['address']}, {PRICES[order['size']] / 100:.2f} EUR. Order it?",
                    buttons=(Button("Yes", "yes"), Button("No", "no")),
                ),
                validate=yes_or_no,
                timeout=timeout,
            )
        except TimedOut:
            await c.send("That took too long, nothing was ordered.")
            return END
        await c.forget("unconfirmed")
        if not sure:
            await c.send("Nothing was ordered.")
            return END
        return None

    @flow.step
    async def pay(c: FlowContext) -> None:
        await c.send("Charging your card ...")
        receipt = await c.do(charge, cents=PRICES[c.state["size"]])
        await c.send(f"Ordered, thank you! Order {c.uuid().hex[:6]}, receipt {receipt}.")

    @flow.on_cancel
    async def cancelled(c: FlowContext) -> None:
        await c.forget("unconfirmed")
        await c.send("Cancelled, nothing was ordered.")

    return flow


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="Order a shirt in the console.")
    parser.add_argument("--store", default="sqlite:///order_flow.db", help="where the conversation is kept")
    parser.add_argument("--transcript", type=Path, default=Path("order_flow.jsonl"), help="what was said")
    parser.add_argument("--ledger", type=Path, default=Path("order_flow.ledger.jsonl"), help="what the bank has seen")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds until an order has to be confirmed")
    parser.add_argument("--remind", type=float, default=600, help="seconds until an unconfirmed order is reminded of")
    parser.add_argument("--slow-charge", type=float, default=0, help="seconds before and behind the charge")
    parser.add_argument("--lease", type=float, default=5, help="seconds until a killed process counts as dead")
    given = parser.parse_args()
    flow = order_flow(Bank(given.ledger, given.slow_charge), timeout=given.timeout, remind=given.remind)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run_console(flow, given.store, "order", given.transcript, lease_seconds=given.lease))


if __name__ == "__main__":
    main()
