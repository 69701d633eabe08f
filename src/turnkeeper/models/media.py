"""Images, files and sound in a conversation, as HTTP providers take them."""

from __future__ import annotations

from turnkeeper.engine.wire import AudioPart, FilePart, ImagePart
from turnkeeper.models.failures import ModelRefused

Media = ImagePart | FilePart | AudioPart


def is_url(source: str) -> bool:
    """Whether a part's source is an address; otherwise it is base64."""
    return source.startswith(("http://", "https://"))


def data_url(part: Media, provider: str) -> str:
    """A part's source as an address, of the data itself where the part has it.

    Raises:
        ModelRefused: it has data, and does not say of which type.
    """
    if is_url(part.source) or part.source.startswith("data:"):
        return part.source
    media_type, data = typed_data(part, provider)
    return f"data:{media_type};base64,{data}"


def typed_data(part: Media, provider: str) -> tuple[str, str]:
    """A part's media type, and its data in base64.

    Raises:
        ModelRefused: it does not say of which type it is.
    """
    head, _, data = part.source.rpartition(",")
    media_type = part.media_type or head.removeprefix("data:").partition(";")[0]
    if not media_type:
        kind = type(part).__name__.removesuffix("Part").lower()
        raise ModelRefused(provider, f"the data of the {kind} in the conversation needs a media type")
    return media_type, data
