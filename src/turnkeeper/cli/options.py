"""What several commands take: annotated types of their parameters."""

from __future__ import annotations

from typing import Annotated, Final

from cyclopts import Parameter

StoreUrl = Annotated[str, Parameter(name="--store", env_var="TURNKEEPER_STORE", help="The store's URL.")]
Json = Annotated[bool, Parameter(name="--json", negative="", help="Print one JSON document.")]
JsonLines = Annotated[bool, Parameter(name="--json", negative="", help="Print one JSON object a line.")]
TurnId = Annotated[str, Parameter(help="The turn's id.")]
ConversationId = Annotated[str, Parameter(help="The conversation's id.")]
Scope = Annotated[str, Parameter(help="primary, or a delegated run's id.")]
RoundIndex = Annotated[int, Parameter(help="The round of the call, from 0.")]
SlotIndex = Annotated[int, Parameter(help="The place of the call in its round, from 0.")]
Limit = Annotated[int, Parameter(help="Most to print; 0 for all.")]
OlderThan = Annotated[str, Parameter(help="Age of the last change: 90s, 15m, 12h, 7d.")]
Who = Annotated[str | None, Parameter(help="Who decided; asked for on a terminal.")]
Why = Annotated[str | None, Parameter(help="The evidence; asked for on a terminal.")]
ServiceTarget = Annotated[str, Parameter(help="The service, as module:attribute.")]

DEFAULT_STORE: Final = "sqlite:///turnkeeper.db"
