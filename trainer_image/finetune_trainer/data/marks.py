"""Marks around the contents of a chat, which show in the rendered text what each turn became.

Characters of Unicode's private use planes, two per message. They stand within the blank characters at the ends of a content, so
that trimming, which most templates do, removes the same as without them. Whether a template wrote the same text with marks as
without is for the caller to compare. Called by chat.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from finetune_trainer.data.records import Message

_PLANES = (0xF0000, 0x100000)
"""First characters of the two private planes."""
_NUM_MARKS = 0xFFFE
_IN_PLANE = {first: re.compile(f"[{chr(first)}-{chr(first + _NUM_MARKS - 1)}]") for first in _PLANES}


class MarkError(ValueError):
    """There are no characters left to mark with."""


@dataclass(frozen=True)
class Marks:
    """A rendered text without its marks, and where they stood in it."""

    text: str
    opened: tuple[list[int], ...]
    """By message: where its words begin; empty where it has none or the template dropped the beginning."""
    closed: tuple[list[int], ...]
    """By message: where its words end."""

    def last_closed(self, limit: int) -> tuple[int, int]:
        """Where before `limit` the last words of any message end, and the number of that message; (0, -1) where there are none."""
        ends = [(at, number) for number, places in enumerate(self.closed) for at in places if at < limit]
        return max(ends, default=(0, -1))

    def first_opened(self, start: int) -> int:
        """Where from `start` on the next words of any message begin; the end of the text where there are none."""
        return min((at for places in self.opened for at in places if at >= start), default=len(self.text))


def marked(messages: Sequence[Message], text: str, roles: frozenset[str] | None) -> tuple[list[Message], int]:
    """The messages with marks around the contents of `roles` (None: of all), and the first mark.

    text: the same chat rendered without marks; no character of it is taken as a mark. Raises MarkError.
    """
    first = next((plane for plane in _PLANES if not _IN_PLANE[plane].search(text)), None)
    if first is None or 2 * len(messages) > _NUM_MARKS:
        raise MarkError("it holds private use characters of both planes" if first is None else "it has too many turns")
    found = []
    for number, message in enumerate(messages):
        content = message["content"]
        if content and (roles is None or message["role"] in roles) and (words := content.strip()):
            start = content.index(words)
            end = start + len(words)
            opening, closing = chr(first + 2 * number), chr(first + 2 * number + 1)
            message = {**message, "content": content[:start] + opening + words + closing + content[end:]}
        found.append(message)
    return found, first


def read_marks(with_marks: str, first: int, num_messages: int) -> Marks:
    """`with_marks`: rendered from what `marked` gave with the same `first`."""
    opened: tuple[list[int], ...] = tuple([] for _ in range(num_messages))
    closed: tuple[list[int], ...] = tuple([] for _ in range(num_messages))
    for num_before, match in enumerate(_IN_PLANE[first].finditer(with_marks)):
        number, is_closing = divmod(ord(match.group()) - first, 2)
        (closed if is_closing else opened)[number].append(match.start() - num_before)
    return Marks(_IN_PLANE[first].sub("", with_marks), opened, closed)
