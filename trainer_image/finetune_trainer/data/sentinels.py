"""Marks around the contents of a chat and the names of called tools, which show where each turn is in the rendered text.

Marks are characters of Unicode's private use planes, four per message. They stand inside the blanks at the ends of a content, so
that trimming, which most templates do, removes the same as without them. The caller must compare whether a template wrote the
same text with marks as without. Called by chat.py and template_probe.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune_trainer.data.records import Message, called_name

_PLANES = (0xF0000, 0x100000)
"""First characters of the two private use planes."""
_NUM_MARKS = 0xFFFE
_IN_PLANE = {first: re.compile(f"([{chr(first)}-{chr(first + _NUM_MARKS - 1)}])") for first in _PLANES}


class SentinelError(ValueError):
    """No characters are left for marks."""


@dataclass(frozen=True)
class SentinelPositions:
    """A rendered text without its marks, and the positions of the marks."""

    text: str
    opened: tuple[list[int], ...]
    """Starts of the words of each message; empty if it has none or the template dropped the beginning."""
    closed: tuple[list[int], ...]
    """Ends of the words of each message."""
    called: tuple[list[int], ...]
    """Ends of the names of called tools in each message; empty if names were not marked."""

    def last_closed(self, limit: int) -> tuple[int, int]:
        """Where the last words before `limit` end, and the number of their message; (0, -1) if there are none."""
        ends = [(at, number) for number, places in enumerate(self.closed) for at in places if at < limit]
        return max(ends, default=(0, -1))

    def first_opened(self, start: int) -> int:
        """Where the first words from `start` on begin; the end of the text if there are none."""
        return min((at for places in self.opened for at in places if at >= start), default=len(self.text))


def with_sentinels(
    messages: Sequence[Message], text: str, roles: frozenset[str] | None, *, calls: bool = False
) -> tuple[list[Message], int]:
    """The messages with marks around the contents of `roles` (None: of all roles), and the first mark.

    text: the same chat rendered without marks; its characters are not used as marks. calls: mark the names of called tools, too.
    Raises SentinelError.
    """
    # Most texts are ASCII, which Python knows without a search.
    first = _PLANES[0] if text.isascii() else next((plane for plane in _PLANES if not _IN_PLANE[plane].search(text)), None)
    if first is None or 4 * len(messages) > _NUM_MARKS:
        raise SentinelError("it holds private use characters of both planes" if first is None else "it has too many turns")
    marked = []
    for number, message in enumerate(messages):
        content = message["content"]
        if content and (roles is None or message["role"] in roles) and (words := content.strip()):
            start = content.index(words)
            end = start + len(words)
            message = {**message, "content": content[:start] + _between(first, number, words) + content[end:]}
        if calls and message.get("tool_calls"):
            marked_calls = [_with_marked_name(call, first, len(messages) + number) for call in message["tool_calls"]]
            message = {**message, "tool_calls": marked_calls}
        marked.append(message)
    return marked, first


def read_sentinels(with_marks: str, first: int, num_messages: int) -> SentinelPositions:
    """Find the marks in a rendered text. with_marks: rendered from the messages of `with_sentinels`, which also returned
    `first`.
    """
    opened: tuple[list[int], ...] = tuple([] for _ in range(2 * num_messages))
    closed: tuple[list[int], ...] = tuple([] for _ in range(2 * num_messages))
    # Texts and marks alternate.
    parts = _IN_PLANE[first].split(with_marks)
    at = 0
    for before, mark in zip(parts[::2], parts[1::2], strict=False):
        at += len(before)
        number, is_closing = divmod(ord(mark) - first, 2)
        (closed if is_closing else opened)[number].append(at)
    return SentinelPositions("".join(parts[::2]), opened[:num_messages], closed[:num_messages], closed[num_messages:])


def _between(first: int, number: int, text: str) -> str:
    return chr(first + 2 * number) + text + chr(first + 2 * number + 1)


def _with_marked_name(call: Mapping[str, Any], first: int, number: int) -> Mapping[str, Any]:
    name = called_name(call)
    if not name:
        return call
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": {**function, "name": _between(first, number, name)}}
    return {**call, "name": _between(first, number, name)}
