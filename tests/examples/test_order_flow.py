"""The order flow in real processes: killed at several points, nothing is asked twice that was answered, nobody pays twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.examples.typist import Typist, rows

At = Callable[[str], Typist]
LEDGER = "order_flow.ledger.jsonl"
ANSWERS = {
    "Which size?": "m",
    "Where shall we send it?": "Main Street 1, Bonn",
    "Order it?": "yes",
}
"""What is typed when a question is shown."""


def charges(one: Typist) -> list[int]:
    """What the bank has charged."""
    return [row["cents"] for row in rows(one.folder / LEDGER) if row["seen"] == "charge"]


def order_until(one: Typist, last: str) -> None:
    """Order, up to and with the question or message `last`."""
    one.type("hello")
    for question, answer in ANSWERS.items():
        one.read(question)
        if question == last:
            return
        one.type(answer)
    one.read(last)


def assert_ordered_once(one: Typist) -> None:
    """Everything was said once, in order, and paid once."""
    size, address, confirm, charging, ordered = one.wrote()[-5:]
    assert one.wrote()[:-5] == ["Welcome to the shirt shop!"]
    assert size == "Which size?"
    assert address == "Where shall we send it?"
    assert confirm == "A shirt in M to Main Street 1, Bonn, 21.00 EUR. Order it?"
    assert charging == "Charging your card ..."
    assert ordered.startswith("Ordered, thank you!")
    keys = [line["key"] for line in one.lines("wrote")]
    assert len(keys) == len(set(keys))
    assert charges(one) == [2100]


def test_killed_at_every_question(typist: At) -> None:
    """While it waits, and right after a message was shown."""
    one = typist("order_flow.py")
    one.start()
    one.type("hello")
    for question, answer in ANSWERS.items():
        one.read(question)
        one.start()  # killed as soon as it is shown
        one.read(question)  # and shown again, not sent again
        one.type(answer)
    one.read("Ordered, thank you!")
    one.start()
    one.finish()
    assert_ordered_once(one)


def test_killed_at_every_line_of_the_transcript(typist: At) -> None:
    """Wherever a line appears, its process dies within moments: before it is journaled, shown, or written down as sent."""
    one = typist("order_flow.py")
    said = ["hello", *ANSWERS.values()]
    done = 0
    while True:
        one.start()
        known = len(one.lines())
        spoken = len(one.lines("said"))
        if spoken < len(said) and _asks(one, spoken):
            one.type(said[spoken])
        one.wait(lambda known=known: len(one.lines()) > known or _is_over(one), "another line")
        one.kill()
        done += 1
        if _is_over(one):
            break
    one.start()
    one.finish()
    assert done > 8
    assert [line["text"] for line in one.lines("said")] == said
    assert_ordered_once(one)


def _asks(one: Typist, spoken: int) -> bool:
    """Whether the last thing sent is the question that comes behind so many things said."""
    if spoken == 0:
        return True
    sent = one.wrote()
    return bool(sent) and list(ANSWERS)[spoken - 1] in sent[-1]


def _is_over(one: Typist) -> bool:
    return any(text.startswith("Ordered") for text in one.wrote())


@pytest.mark.parametrize("seen", ["request", "charge"])
def test_killed_in_the_charge(typist: At, seen: str) -> None:
    """Before the bank charged, and between its charge and its answer: the look-up tells which."""
    one = typist("order_flow.py")
    one.start("--slow-charge", "30" if seen == "request" else "2")
    order_until(one, "Charging your card")
    one.wait(lambda: seen in [row["seen"] for row in rows(one.folder / LEDGER)], f"the bank's {seen}")
    one.start()
    one.read("Ordered, thank you!")
    one.finish()
    assert_ordered_once(one)
    # A request that the first process died in is made again under the same operation id.
    asked = [row["id"] for row in rows(one.folder / LEDGER) if row["seen"] == "request"]
    assert len(asked) == (2 if seen == "request" else 1)
    assert len(set(asked)) == 1


def test_rejected_answers(typist: At) -> None:
    one = typist("order_flow.py")
    one.start()
    one.type("hello")
    one.read("Which size?")
    one.type("XXL")
    one.read("We have S, M, L. Which one?")
    one.start()
    one.read("We have S, M, L. Which one?")
    one.type("L")
    one.read("Where shall we send it?")
    one.finish()
    assert one.wrote().count("Which size?") == 1


def test_nobody_confirms(typist: At) -> None:
    """A reminder and then the timeout, each once, although the process that set them is gone."""
    one = typist("order_flow.py")
    times = ("--remind", "1", "--timeout", "3")
    one.start(*times)
    order_until(one, "Order it?")
    one.start(*times)
    one.read("Your order waits for your yes.")
    one.start(*times)
    one.read("That took too long, nothing was ordered.")
    one.finish()
    assert one.wrote().count("Your order waits for your yes.") == 1
    assert charges(one) == []


def test_cancelled_and_started_over(typist: At) -> None:
    one = typist("order_flow.py")
    one.start()
    order_until(one, "Order it?")
    one.type("Start over")
    one.read("Which size?")
    one.start()
    one.type("cancel")
    one.read("Cancelled, nothing was ordered.")
    one.finish()
    assert one.wrote().count("Which size?") == 2
    assert charges(one) == []
    assert one.errors() == ""
