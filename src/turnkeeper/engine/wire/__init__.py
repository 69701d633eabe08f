"""Wire types of the engine, as the portable contract names them (engine-contract.md section 1). camelCase on the wire."""

from __future__ import annotations

from turnkeeper.engine.wire.base import Wire, to_builtins
from turnkeeper.engine.wire.chat import chat_form, message_from
from turnkeeper.engine.wire.checkpoint import EngineCheckpoint, ResumeContext
from turnkeeper.engine.wire.commit import EngineTurnStatus, TurnCommit, TurnEngineResult
from turnkeeper.engine.wire.context import (
    ContextCandidate,
    ContextRequest,
    DelegatedStateReference,
    Disposition,
    InvocationContextDecision,
    InvocationContextState,
    ModelInvocationContextSnapshot,
    Portability,
)
from turnkeeper.engine.wire.event import EngineEvent, EngineEventKind
from turnkeeper.engine.wire.invocation import (
    InvocationUsage,
    ModelInvocationRequest,
    ModelInvocationResponse,
    ModelReconciliationState,
)
from turnkeeper.engine.wire.message import (
    AudioPart,
    ContentPart,
    FilePart,
    ImagePart,
    Message,
    Part,
    Role,
    TextPart,
)
from turnkeeper.engine.wire.policy import (
    FinalOutputPolicyRequest,
    FinalOutputPolicyResult,
    HostPolicyRequest,
    HostPolicyResult,
    RetryPolicyRequest,
)
from turnkeeper.engine.wire.stream import (
    Chunk,
    ErrorChunk,
    FailureChunk,
    FailureOutcome,
    StreamChunk,
    StreamFailure,
    TextChunk,
    ThinkingChunk,
    ToolCall,
    ToolChunk,
    UsageChunk,
)
from turnkeeper.engine.wire.tool import EnginePermissionDecision, ModelToolRequest, ModelToolResult, Outcome

__all__ = [
    "AudioPart",
    "Chunk",
    "ContentPart",
    "ContextCandidate",
    "ContextRequest",
    "DelegatedStateReference",
    "Disposition",
    "EngineCheckpoint",
    "EngineEvent",
    "EngineEventKind",
    "EnginePermissionDecision",
    "EngineTurnStatus",
    "ErrorChunk",
    "FailureChunk",
    "FailureOutcome",
    "FilePart",
    "FinalOutputPolicyRequest",
    "FinalOutputPolicyResult",
    "HostPolicyRequest",
    "HostPolicyResult",
    "ImagePart",
    "InvocationContextDecision",
    "InvocationContextState",
    "InvocationUsage",
    "Message",
    "ModelInvocationContextSnapshot",
    "ModelInvocationRequest",
    "ModelInvocationResponse",
    "ModelReconciliationState",
    "ModelToolRequest",
    "ModelToolResult",
    "Outcome",
    "Part",
    "Portability",
    "ResumeContext",
    "RetryPolicyRequest",
    "Role",
    "StreamChunk",
    "StreamFailure",
    "TextChunk",
    "TextPart",
    "ThinkingChunk",
    "ToolCall",
    "ToolChunk",
    "TurnCommit",
    "TurnEngineResult",
    "UsageChunk",
    "Wire",
    "chat_form",
    "message_from",
    "to_builtins",
]
