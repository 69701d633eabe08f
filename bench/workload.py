"""The workload W(rounds, tools, size): turns as an agent's host would have them, as plain messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from bench.texts import Texts


class Round(NamedTuple):
    """One model decision, and a result for each tool call in it."""

    decision: dict[str, Any]
    results: list[dict[str, Any]]

    @property
    def calls(self) -> list[tuple[str, str, str]]:
        """(provider's call id, tool name, arguments) of every tool call."""
        return [
            (call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in self.decision["tool_calls"]
        ]


class Turn(NamedTuple):
    """One turn from the inbound message to the reply."""

    trace_id: str
    messages: list[dict[str, Any]]
    tool_names: list[str]
    runtime: dict[str, Any]
    rounds: list[Round]
    final: str

    @property
    def payload(self) -> int:
        """Bytes of the JSON that keeps every message, decision and result once, in the shortest form."""
        kept: list[Any] = [*self.messages, self.final]
        for round_ in self.rounds:
            kept += [round_.decision, *round_.results]
        return len(json.dumps(kept, ensure_ascii=False, separators=(",", ":")).encode())


class Shape(NamedTuple):
    """W(rounds, tools, size): `size` is the bytes of each tool result."""

    rounds: int
    tools: int
    size: int

    @property
    def effects(self) -> int:
        """What cannot be undone in a turn: model calls, with the one that answers; tool calls; the reply's sending."""
        return self.rounds + 1 + self.rounds * self.tools + 1

    def __str__(self) -> str:
        return f"W({self.rounds}, {self.tools}, {self.size / 1024:g} KiB)"


TURN = Shape(3, 2, 2048)
"""The turn that is measured beside the floor."""


def stream(shape: Shape, count: int, seed: int = 1) -> Iterator[Turn]:
    """`count` different turns, the same ones for the same seed, each made when it is wanted."""
    texts = Texts(seed)
    return (_turn(shape, texts, f"bench-{seed}-{number}") for number in range(count))


def turns(shape: Shape, count: int, seed: int = 1) -> list[Turn]:
    """The same, all made at once."""
    return list(stream(shape, count, seed))


def _turn(shape: Shape, texts: Texts, trace_id: str) -> Turn:
    names = [f"look_up_{kind}" for kind in ("order", "customer", "invoice", "shipment", "policy")]
    return Turn(
        trace_id,
        [{"role": "system", "content": texts.text(1500)}, {"role": "user", "content": texts.text(200)}],
        names,
        {"inbound": {"channel": "web", "event": texts.token(24)}},
        [_round(shape, texts, names) for _ in range(shape.rounds)],
        texts.text(400),
    )


def _round(shape: Shape, texts: Texts, names: list[str]) -> Round:
    ids = [f"call_{texts.token(24)}" for _ in range(shape.tools)]
    calls = [
        {
            "id": call_id,
            "type": "function",
            "function": {
                "name": names[index % len(names)],
                "arguments": json.dumps({"id": texts.digits(8), "reason": texts.text(60)}),
            },
        }
        for index, call_id in enumerate(ids)
    ]
    decision = {"role": "assistant", "content": texts.text(120), "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": call_id, "content": texts.text(shape.size)} for call_id in ids]
    return Round(decision, results)
