"""What a fake model answers in each round of a conversation, and what goes wrong on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from turnkeeper.engine import yaml_text
from turnkeeper.errors import InvalidInput


class Scripted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of the parts of a script."""


class ScriptedCall(Scripted, frozen=True, kw_only=True):
    """A tool call.

    Attributes:
        name: the tool.
        arguments: an object; or a text that is sent as it is, also where it is no JSON; or null.
        id: the call's id; one of its own if None.
    """

    name: str
    arguments: Any = msgspec.field(default_factory=lambda: dict[str, Any]())
    id: str | None = None

    @property
    def text(self) -> str | None:
        """The arguments as they are sent."""
        if self.arguments is None or isinstance(self.arguments, str):
            return self.arguments
        return msgspec.json.encode(self.arguments).decode()


class Fault(Scripted, frozen=True, kw_only=True):
    """What goes wrong with one request. Unless it says a `status`, the answer was made by then, and is on the bill.

    Attributes:
        status: answered with this HTTP status.
        after_work: the status comes behind the work, as from a gateway that did not wait for it.
        retry_after: seconds, in the header of that name.
        cut_after: the connection is lost behind so many events of the stream; of an answer in one piece, in its middle.
        end_after: the stream ends in an orderly way behind so many events.
        stall_after: behind so many events nothing comes any more, until the client goes.
        error_after: behind so many events the provider says in the stream that it is overloaded.
        reset: the connection is lost before the answer begins.
        garbage: the answer is no JSON.
        slow: seconds before the answer begins.
    """

    status: int | None = None
    after_work: bool = False
    retry_after: float | None = None
    cut_after: int | None = None
    end_after: int | None = None
    stall_after: int | None = None
    error_after: int | None = None
    reset: bool = False
    garbage: bool = False
    slow: float = 0.0


class ScriptedRound(Scripted, frozen=True, kw_only=True):
    """One answer.

    Attributes:
        text: what the model says.
        thinking: its reasoning, with what only the provider can read. It has to come back untouched with the next round.
        calls: the tools that it calls, at the same time.
        finish: why it stops, where that is not the usual reason. `refusal`: `text` is the refusal.
        input_tokens, output_tokens: what it takes.
        faults: one for each request of this round, in the order of their arrival; those behind them are answered.
        polls: how often a response in the background is asked for before it is ready.
        look_up_faults: one for each time that a stored answer is asked for; those behind them are answered.
    """

    text: str = ""
    thinking: str = ""
    calls: list[ScriptedCall] = msgspec.field(default_factory=list[ScriptedCall])
    finish: Literal["length", "refusal", "content_filter"] | None = None
    input_tokens: int = 10
    output_tokens: int = 5
    faults: list[Fault] = msgspec.field(default_factory=list[Fault])
    polls: int = 0
    look_up_faults: list[Fault] = msgspec.field(default_factory=list[Fault])


class Script(Scripted, frozen=True, kw_only=True):
    """A model's answers: the answer of a request is that behind as many answers as its conversation has already."""

    rounds: list[ScriptedRound]


def load_script(path: Path) -> Script:
    """A script from a file: JSON, or YAML by its name.

    Raises:
        InvalidInput: it cannot be read, or is no script; names the path inside it.
    """
    try:
        text = path.read_text()
        tree = (
            yaml_text.parse(text, str(path)) if path.suffix in (".yaml", ".yml") else msgspec.json.decode(text.encode())
        )
        return msgspec.convert(tree, Script)
    except OSError as e:
        raise InvalidInput("SCRIPT", f"{path} cannot be read: {e.strerror}") from e
    except msgspec.MsgspecError as e:
        raise InvalidInput("SCRIPT", f"{path}: {e}") from e
