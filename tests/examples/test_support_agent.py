"""The support agent in real processes: killed while it thinks, while a person has taken over, and in between."""

from __future__ import annotations

from collections.abc import Callable

from tests.examples.typist import Typist

At = Callable[[str], Typist]

TALK = [
    ("where is order 1001?", "Your order is on its way, with you on Friday. Anything else?"),
    ("I want a person", "[to the operator] A customer asks: I want a person"),
    ("My shirt is torn", "[to the operator] Customer: My shirt is torn"),
    ("/operator We send you a new one", "Operator: We send you a new one"),
    ("Thanks", "[to the operator] Customer: Thanks"),
    ("/operator /close", "Our colleague has left. I am the agent again: what can I do for you?"),
    ("hm", "You have said 5 things. Tell me an order's number, or ask for a person."),
]
"""What is typed, and the last thing that answers it. The agent's last answer shows what it knows of all that was said."""
SENT = [
    "Your order is on its way, with you on Friday. Anything else?",
    "I am getting a colleague for you.",
    *(answer for _, answer in TALK[1:]),
]


def assert_all_once(one: Typist) -> None:
    """Everything was said and sent once, in order, and nothing went wrong."""
    assert [line["text"] for line in one.lines("said")] == [text for text, _ in TALK]
    assert one.wrote() == SENT
    assert one.errors() == ""


def test_talk_without_a_kill(typist: At) -> None:
    one = typist("support_agent.py")
    one.start()
    for text, answer in TALK:
        one.type(text)
        one.read(answer)
    one.finish()
    assert_all_once(one)


def test_killed_after_every_answer(typist: At) -> None:
    """Each message is handled by another process; whoever has the customer keeps him."""
    one = typist("support_agent.py")
    for text, answer in TALK:
        one.start()
        one.type(text)
        one.read(answer)
    one.start()
    one.finish()
    assert_all_once(one)


def test_killed_while_it_thinks(typist: At) -> None:
    """The message is in the journal, so the next process answers it."""
    one = typist("support_agent.py")
    for number, (text, answer) in enumerate(TALK):
        one.start("--slow-model", "30")
        one.type(text)
        one.wait(lambda number=number: len(one.lines("taken")) == number + 1, "the message in the journal")
        one.start()
        one.read(answer)
    one.finish()
    assert_all_once(one)


def test_said_while_it_thinks(typist: At) -> None:
    """A second message is shown to the agent before it is asked again, and answered with the first one, once."""
    one = typist("support_agent.py")
    one.start("--slow-model", "1")
    one.type("where is order 1001?")
    one.wait(lambda: len(one.lines("taken")) == 1, "the message in the journal")
    one.type("and 1002?")
    one.wait(lambda: len(one.lines("taken")) == 2, "the second message in the journal")
    one.start()
    one.read("order is")
    one.finish()
    answers = one.wrote()
    assert any("waiting for its payment" in text for text in answers)
    assert len(answers) == len(set(answers))
