"""Turnkeeper: durable turns for LLM agents and chat bots. The public names, and nothing else.

Names are imported when they are first used, so that `import turnkeeper` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnkeeper.channels.console import run_console
    from turnkeeper.conversation.context import FlowContext, Reject, TimedOut
    from turnkeeper.conversation.conversations import Conversations
    from turnkeeper.conversation.flow import END, Flow
    from turnkeeper.conversation.message import Button, Content
    from turnkeeper.engine.delegation import subagent
    from turnkeeper.engine.host import Host
    from turnkeeper.engine.loop import TurnResult
    from turnkeeper.engine.outcomes import (
        DidNotHappen,
        EffectRefused,
        Happened,
        NotSent,
        OutcomeUnknown,
        StillUnknown,
    )
    from turnkeeper.engine.permissions import ApprovalPending, HumanApproval
    from turnkeeper.engine.ports import Agent, AnswerCut, ModelPort, ModelRequest, Reply, ReplyPort
    from turnkeeper.engine.tools import Tool, ToolContext, tool
    from turnkeeper.engine.usage import Budget
    from turnkeeper.engine.wire import Message, ModelInvocationResponse, ModelToolRequest, ModelToolResult, TextPart
    from turnkeeper.errors import OwnershipLost, StoreError, TurnkeeperError
    from turnkeeper.keeper import Keeper
    from turnkeeper.log.keyring import Keyring
    from turnkeeper.models.scripted import ScriptedModel
    from turnkeeper.observe.telemetry import Telemetry
    from turnkeeper.turn.session import TurnCheckpointSession

__version__ = "0.1.0"

_HOMES = {
    "channels.console": ("run_console",),
    "conversation.context": ("FlowContext", "Reject", "TimedOut"),
    "conversation.conversations": ("Conversations",),
    "conversation.flow": ("END", "Flow"),
    "conversation.message": ("Button", "Content"),
    "engine.delegation": ("subagent",),
    "engine.host": ("Host",),
    "engine.loop": ("TurnResult",),
    "engine.outcomes": ("DidNotHappen", "EffectRefused", "Happened", "NotSent", "OutcomeUnknown", "StillUnknown"),
    "engine.permissions": ("ApprovalPending", "HumanApproval"),
    "engine.ports": ("Agent", "AnswerCut", "ModelPort", "ModelRequest", "Reply", "ReplyPort"),
    "engine.tools": ("Tool", "ToolContext", "tool"),
    "engine.usage": ("Budget",),
    "engine.wire": ("Message", "ModelInvocationResponse", "ModelToolRequest", "ModelToolResult", "TextPart"),
    "errors": ("OwnershipLost", "StoreError", "TurnkeeperError"),
    "keeper": ("Keeper",),
    "log.keyring": ("Keyring",),
    "models.scripted": ("ScriptedModel",),
    "observe.telemetry": ("Telemetry",),
    "turn.session": ("TurnCheckpointSession",),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [  # as grouped above
    "END",
    "Agent",
    "AnswerCut",
    "ApprovalPending",
    "Budget",
    "Button",
    "Content",
    "Conversations",
    "DidNotHappen",
    "EffectRefused",
    "Flow",
    "FlowContext",
    "Happened",
    "Host",
    "HumanApproval",
    "Keeper",
    "Keyring",
    "Message",
    "ModelInvocationResponse",
    "ModelPort",
    "ModelRequest",
    "ModelToolRequest",
    "ModelToolResult",
    "NotSent",
    "OutcomeUnknown",
    "OwnershipLost",
    "Reject",
    "Reply",
    "ReplyPort",
    "ScriptedModel",
    "StillUnknown",
    "StoreError",
    "Telemetry",
    "TextPart",
    "TimedOut",
    "Tool",
    "ToolContext",
    "TurnCheckpointSession",
    "TurnResult",
    "TurnkeeperError",
    "run_console",
    "subagent",
    "tool",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'turnkeeper' has no attribute {name!r}")
    return getattr(import_module(f"turnkeeper.{_MODULE_OF[name]}"), name)
