"""What an HTTP provider's failure says of a model call: surely not answered, perhaps answered, or refused (2.17).

Both SDKs are asked by the shape of their errors, so nothing of either is imported here.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final, Literal, NoReturn, cast

from turnkeeper.engine.contract_ports import PortError
from turnkeeper.engine.outcomes import classify
from turnkeeper.errors import InvalidInput, TurnkeeperError

Phase = Literal["request_dispatch", "response_body", "stream_transport"]
"""Where in a call its answer was lost (1.8)."""

_LONGEST: Final = 600
"""Characters of what a provider said that are kept."""
_LOST_BY_A_GATEWAY: Final = frozenset({502, 504, 520, 524})
"""Said by what stands before the provider, of an answer that did not come through: it may have been made, and billed."""
_COME_AGAIN: Final = frozenset({408, 409, 425, 429})
"""Of the statuses that blame the request, those that another attempt may help."""
_REFUSALS: Final = frozenset(
    {"authentication_error", "billing_error", "invalid_request_error", "not_found_error", "permission_error"}
    | {"request_too_large", "invalid_prompt", "content_filter"}
)
"""Kinds of errors, told inside an answer's stream, that no other attempt helps."""
_UNUSABLE_ADDRESS: Final = frozenset({"InvalidURL", "UnsupportedProtocol"})
_TRANSPORT: Final = frozenset({"APIConnectionError", "RequestError", "TransportError", "StreamError"})
_KEYS: Final = re.compile(r"\b(?:sk|pk|rk|gsk|xai|key)[-_][\w.*-]{6,}|(?<=[Bb]earer )\S+")
"""What looks like a key, also if it is none of ours."""


class ModelError(PortError):
    """A provider's API brought no answer.

    Attributes:
        provider: whose API.
        status: the HTTP status, or None where there was none.
        code: the provider's own name of what went wrong, or None.
        request_id: what the provider calls the request; its support asks for it.
    """

    def __init__(
        self,
        provider: str,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        request_id: str | None = None,
        **said: Any,
    ) -> None:
        super().__init__(f"{provider}: {message}", **said)
        self.provider = provider
        self.status = status
        self.code = code
        self.request_id = request_id


class ModelRefused(ModelError):
    """The provider refuses: the request, its key, or to speak about it. Another attempt gets the same answer."""

    def __init__(self, provider: str, message: str, **said: Any) -> None:
        super().__init__(provider, message, configuration_error=True, **said)


class ModelUnavailable(ModelError):
    """There surely is no answer: nothing was sent, or the provider itself says so. Another attempt may get one."""


class AnswerLost(ModelError):
    """The provider may have answered, and billed it. The call is not made again before that is settled.

    Attributes:
        phase: where the answer was lost.
    """

    def __init__(self, provider: str, message: str, phase: Phase, **said: Any) -> None:
        metadata = {"provider": provider, "phase": phase}
        if said.get("request_id") is not None:
            metadata["requestId"] = said["request_id"]
        super().__init__(provider, message, outcome_unknown=True, metadata=metadata, **said)
        self.phase = phase


class MissingSdk(TurnkeeperError, ImportError):
    """The library that speaks to the provider is not installed.

    Attributes:
        extra: the extra of Turnkeeper that brings it.
    """

    def __init__(self, extra: str, cause: ImportError) -> None:
        super().__init__(f"{extra}: {cause}; pip install 'turnkeeper[{extra}]'")
        self.extra = extra


def raise_judged(caller: Caller, error: Exception, phase: Phase) -> NoReturn:
    """Raise what `Caller.judged` makes of an error. The SDK's own is not kept with it: it holds the request, with its key."""
    judged = caller.judged(error, phase)
    if judged is error:
        raise error
    raise judged from None


@dataclass(frozen=True)
class Caller:
    """Whose API is called, and with which client.

    Attributes:
        provider: the name in errors and references.
        client: the SDK's client. Its keys never get into an error's text.
    """

    provider: str
    client: Any

    def judged(self, error: Exception, phase: Phase) -> Exception:
        """What the SDK raised while a call was in that phase, as what it says of the call; others' errors as they are."""
        status: int | None = getattr(error, "status_code", None)
        if isinstance(status, int):
            return self._by_status(error, status)
        names = {kind.__name__ for one in _causes(error) for kind in type(one).__mro__}
        told = self._told(error)
        if any(classify(one) == "not sent" for one in _causes(error)) or "ProxyError" in names:
            return ModelUnavailable(self.provider, told)
        if names & _UNUSABLE_ADDRESS or (isinstance(error, TypeError) and phase == "request_dispatch"):
            return ModelRefused(self.provider, told)  # as the SDKs say that they have no key
        if names & _TRANSPORT or isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
            return AnswerLost(self.provider, told, phase)
        if "APIError" in names:
            return self.said(_error_of(getattr(error, "body", None)), told)
        if names & {"OpenAIError", "AnthropicError"}:
            return ModelRefused(self.provider, told)  # the SDK's own, before it sends anything: a key is missing
        return error

    def said(self, error: Mapping[str, Any], told: str | None = None, **known: Any) -> ModelError:
        """An error that the provider tells inside its answer: it has none, and says why."""
        code = _text(error.get("code")) or _text(error.get("type"))
        told = self.clean(told or f"{code or 'error'}: {error.get('message')}")
        kinds = {error.get("code"), error.get("type")}
        kind = ModelRefused if kinds & _REFUSALS else ModelUnavailable
        known["code"] = code
        return kind(self.provider, told, **known)

    def unreadable(self, why: str, **known: Any) -> AnswerLost:
        """An answer that is there, and is none that this port knows (2.17)."""
        return AnswerLost(self.provider, self.clean(f"the answer cannot be read: {why}"), "response_body", **known)

    def clean(self, text: str) -> str:
        """A text that may be logged and shown: shortened, and without anything that is or looks like a key."""
        for secret in sorted(_secrets(self.client), key=len, reverse=True):
            text = text.replace(secret, "[key]")
        return _KEYS.sub("[key]", text)[:_LONGEST]

    def _by_status(self, error: Exception, status: int) -> ModelError:
        response: Any = getattr(error, "response", None)
        headers: Mapping[str, str] = {} if response is None else response.headers
        body = _error_of(getattr(error, "body", None))
        code = _text(body.get("code")) or _text(body.get("type"))
        known: dict[str, Any] = {
            "status": status,
            "code": code,
            "request_id": headers.get("x-request-id") or headers.get("request-id"),
        }
        if status < 400:  # the stream had begun
            return self.said(body, **known)
        what = body.get("message") or getattr(error, "message", "")
        told = self.clean(f"HTTP {status}{f' {code}' if code else ''}: {what}")
        if status in _LOST_BY_A_GATEWAY:
            return AnswerLost(self.provider, told, "request_dispatch", **known)
        if status >= 500 or status in _COME_AGAIN:
            return ModelUnavailable(self.provider, told, retry_after=retry_after(headers), **known)
        return ModelRefused(self.provider, told, **known)

    def _told(self, error: Exception) -> str:
        """The names of the errors, from the SDK's down to the operating system's, and what the last of them says."""
        causes = list(_causes(error))
        names = " from ".join(dict.fromkeys(type(one).__name__ for one in causes))
        return self.clean(f"{names}: {causes[-1]}")


def _causes(error: Exception) -> Iterator[Exception]:
    """The error, and what it was raised from."""
    seen: set[int] = set()
    one: BaseException | None = error
    while isinstance(one, Exception) and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__


def _error_of(body: Any) -> Mapping[str, Any]:
    """The object that tells of the error, where the body has one: alone, or under `error`."""
    if not isinstance(body, dict):
        return {}
    told = cast("dict[str, Any]", body)
    inner: Any = told.get("error")
    return cast("dict[str, Any]", inner) if isinstance(inner, dict) else told


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _secrets(client: Any) -> set[str]:
    """What the client proves itself with: its keys, and headers that by their names hold some."""
    found: list[Any] = [getattr(client, name, None) for name in ("api_key", "auth_token", "admin_api_key")]
    try:
        headers: Mapping[str, Any] = client.default_headers
    except Exception:  # an SDK that finds no key refuses to make any headers
        headers = {}
    for name, value in headers.items():
        if isinstance(value, str) and re.search("auth|key|token|secret|cookie", name, re.IGNORECASE):
            found += [value, value.rpartition(" ")[2]]
    return {one for one in found if isinstance(one, str) and len(one) >= 4}


def retry_after(headers: Mapping[str, str]) -> float | None:
    """The seconds that a provider asks to wait, or None where it does not say."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        said = headers.get(name)
        if said is None:
            continue
        try:
            seconds = float(said) * unit
            if math.isfinite(seconds):
                return max(seconds, 0.0)
        except ValueError:
            pass
        try:
            return max(parsedate_to_datetime(said).timestamp() - time.time(), 0.0)
        except ValueError:
            continue
    return None


def checked_options(options: Mapping[str, Any] | None, known: Iterable[str], taken: Iterable[str]) -> dict[str, Any]:
    """More fields of each request, as the SDK's method takes them.

    Raises:
        InvalidInput: the method does not take one, or the port fills it in itself. Found out here, it is no doubt later.
    """
    given = dict(options or {})
    for name in given:
        if name in set(taken):
            raise InvalidInput(f"options.{name}", "is filled in by this port")
        if name not in set(known):
            raise InvalidInput(
                f"options.{name}", "is not known to the SDK; what it does not know goes into `extra_body`"
            )
    return given
