"""Ordinary English text for the workloads: as compressible as what agents really read, no more.

Taken from real conversations where they lie beside the project, else put together from a vocabulary with the word
frequencies of English. Either way seeded, so that every run works on the same bytes.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Final

_CONVERSATIONS: Final = Path(__file__).resolve().parents[2] / "shared" / "data" / "airline" / "conversations.jsonl"

# In the order of their frequency: the n-th word is drawn with a weight of 1/n, as words of real text are.
_WORDS: Final = """
the to and of a in is for you that it on with are your be this have from at not can will or we was if as by our please
an has but all more would about which they there been when one so what their do out other time up may only after any
over into no also than before most these should could were his her them he she its who now some new first two between
through where made because each many those how does without under during until then back while three both own same
another such must since against order account booking payment flight customer service date number amount change
request confirm ticket available price total balance refund policy address email phone details information option
options travel return departure arrival morning evening luggage delivery shipped package tracking warehouse invoice
receipt discount charge credit card certificate insurance passenger seat cabin economy business member status gold
silver regular system update error report issue problem solution support team manager agent contact reply message
answer question help thank sorry apologize understand provide receive cancel modify upgrade select choose prefer
additional currently however therefore although unfortunately certainly directly immediately recently shortly later
earlier today tomorrow yesterday week month year hour minute day night weekend january march april june july august
october november london paris berlin madrid chicago boston seattle denver houston dallas atlanta phoenix portland
street avenue road building floor city country region state airport station hotel room reservation check record file
note document page form field value list table result search found missing complete pending approved declined failed
expected required allowed limited maximum minimum average higher lower above below near far early late quick slow
large small full empty open closed broken fixed clear simple difficult possible likely certain different similar
important necessary useful available external internal local remote public private secure safe weather rain wind snow
storm temperature degree forecast cloud sunny market stock share growth quarter revenue cost margin budget plan
project schedule meeting review draft version release feature design test measure quality sample figure chart summary
conclusion reason cause effect risk benefit advantage advice example purpose process step method approach standard
rule law contract agreement term condition clause party signature deadline extension penalty fee tax rate interest
loan bank transfer deposit withdrawal currency exchange dollar euro pound item product model color size weight
material quality warranty repair replacement part battery screen cable adapter keyboard network server database
password username login session token access permission role group user profile setting preference language region
""".split()  # noqa: SIM905  # words read better than a list of strings
_WEIGHTS: Final = [1 / rank for rank in range(1, len(_WORDS) + 1)]


class Texts:
    """A seeded source of texts."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._corpus = _conversation_texts()

    @property
    def source(self) -> str:
        """Where the texts come from, for the report."""
        return "conversations of a customer service agent" if self._corpus else "a vocabulary of its own"

    def text(self, size: int) -> str:
        """Text of `size` bytes, another one at each call."""
        parts: list[str] = []
        length = 0
        while length < size:
            part = self._random.choice(self._corpus) if self._corpus else self._sentence()
            parts.append(part)
            length += len(part) + 1
        return "\n".join(parts)[:size]

    def digits(self, count: int) -> str:
        """A number, as ids and references have them."""
        return f"{self._random.randrange(10**count):0{count}d}"

    def token(self, count: int) -> str:
        """Letters and digits as in the ids that providers make up; they do not compress."""
        return "".join(self._random.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789", k=count))

    def _sentence(self) -> str:
        words: list[str] = self._random.choices(_WORDS, _WEIGHTS, k=self._random.randint(5, 18))
        if self._random.random() < 0.3:
            words.insert(self._random.randrange(len(words)), self.digits(self._random.randint(1, 6)))
        if len(words) > 9:
            words[len(words) // 2] += ","
        return " ".join(words).capitalize() + self._random.choice("...?!")


def _conversation_texts() -> list[str]:
    """Every different text that a person or the agent said, where the conversations are there. ASCII: a cut is exact."""
    if not _CONVERSATIONS.exists():
        return []
    found: dict[str, None] = {}
    for line in _CONVERSATIONS.read_text(encoding="utf-8").splitlines():
        messages: list[dict[str, Any]] = json.loads(line)["messages"]
        for message in messages:
            content = message.get("content")
            if message["role"] not in ("user", "assistant") or not isinstance(content, str):
                continue
            if content.isascii() and "###" not in content:  # a mark of the simulation, nobody's words
                found[content] = None
    return list(found)
