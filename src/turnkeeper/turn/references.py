"""References of a commit to the decision and the results of its round: what stands there is not stored once more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

from turnkeeper.log import frames, values


class References(Sequence[Any]):
    """What a commit may refer to, by number: each frame as a whole, then every long string in them, in order.

    Looked at only where something refers to it. A frame that is None holds nothing, and has its number all the same.
    """

    def __init__(self, sources: Sequence[bytes | None], thaw: Callable[[bytes], Any] = values.thaw) -> None:
        """
        Args:
            sources: the frames.
            thaw: what gives the value of one of them, to look for strings in.
        """
        self._sources = sources
        self._thaw = thaw
        self._strings: list[str] | None = None

    def _found(self) -> list[str]:
        if self._strings is None:
            self._strings = [
                string
                for source in self._sources
                if source is not None
                for string in values.strings_of(self._thaw(source))
            ]
        return self._strings

    def __len__(self) -> int:
        return len(self._sources) + len(self._found())

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if index >= len(self._sources):
            return self._found()[index - len(self._sources)]
        source = self._sources[index]
        if source is None:
            raise IndexError(f"reference {index} is to a result that is not there")
        return values.thaw(source)

    def freeze(self, items: list[Any], field: str) -> bytes:
        """A list as a frame, with references for items that are a whole source, and for strings in all others.

        Raises:
            InvalidInput: an item cannot be kept; names the path.
            ValueTooLarge: they are too large together.
        """
        wholes = [None if source is None else frames.decode(source) for source in self._sources]
        kept: list[Any] = []
        others = False
        for number, item in enumerate(items):
            whole = _position(item, wholes)
            others |= whole is None
            # As an item of a list, so that it may be nested as deeply as there.
            (copy,) = values.storable([item], field, first=number) if whole is None else (values.reference(whole),)
            kept.append(copy)
        return values.seal(kept, field, shared=self._numbers() if others else None)

    def freeze_text(self, text: str, field: str) -> bytes:
        """A text as a frame, as a reference where it stands in a source.

        Raises:
            ValueTooLarge: it is too large.
        """
        return values.freeze(text, field, shared=self._numbers())

    def _numbers(self) -> dict[str, int]:
        first = len(self._sources)
        return {string: first + index for index, string in reversed(list(enumerate(self._found())))}


def _position(item: Any, wholes: list[bytes | None]) -> int | None:
    """Which of the wholes the item is: told by its bytes, which differ for 1 and True, and without a look into it."""
    try:
        packed = values.pack(item)
    except Exception:  # whatever makes it impossible to keep: it is told where the item is copied
        return None
    return wholes.index(packed) if packed in wholes else None
