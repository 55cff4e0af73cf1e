"""Puts marks around the contents of a chat and the names of called tools, to find each turn in the rendered text.

Marks are characters of Unicode's private use planes, four per message. They are placed inside the leading and trailing white
space of a content, so that a template that trims contents removes the same characters as without marks. The caller must check
that a template writes the same text with and without marks. Called by chat.py and template_probe.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune_trainer.data.records import Message, called_name
from finetune_trainer.data.render_chat import ChatError

_PLANES = (0xF0000, 0x100000)
"""First characters of the two private use planes."""
_NUM_MARKS = 0xFFFE
_IN_PLANE = {first: re.compile(f"([{chr(first)}-{chr(first + _NUM_MARKS - 1)}])") for first in _PLANES}


@dataclass(frozen=True)
class SentinelPositions:
    """A rendered text without its marks, and the positions of the marks."""

    text: str
    opened: tuple[list[int], ...]
    """Positions where the words of each message begin; empty if it has none or the template dropped the beginning."""
    closed: tuple[list[int], ...]
    """Positions where the words of each message end."""
    called: tuple[list[int], ...]
    """Positions where the names of called tools of each message end; empty if names were not marked."""

    def last_closed(self, limit: int) -> tuple[int, int]:
        """The last position before `limit` where words end, and the number of their message; (0, -1) if there is none."""
        ends = [(at, number) for number, places in enumerate(self.closed) for at in places if at < limit]
        return max(ends, default=(0, -1))

    def first_opened(self, start: int) -> int:
        """The first position from `start` on where words begin; the end of the text if there is none."""
        return min((at for places in self.opened for at in places if at >= start), default=len(self.text))


def with_sentinels(
    messages: Sequence[Message], text: str, roles: frozenset[str] | None, *, calls: bool = False
) -> tuple[list[Message], int]:
    """The messages with marks around the contents of `roles` (None: of all roles), and the code point of the first mark.

    text: the same chat rendered without marks; no character of it is used as a mark. calls: also mark the names of called tools.
    Raises ChatError if no characters are left for marks.
    """
    # Most texts are ASCII, as Python knows without searching, and so hold no private use characters.
    first = _PLANES[0] if text.isascii() else next((plane for plane in _PLANES if not _IN_PLANE[plane].search(text)), None)
    if first is None or 4 * len(messages) > _NUM_MARKS:
        reason = "it holds private use characters of both planes" if first is None else "it has too many turns"
        raise ChatError("messages", reason, "remove the private use characters from the record, or some of its turns")
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
    """Find the marks in `with_marks`, a text rendered from the messages that `with_sentinels` returned with `first`."""
    opened: tuple[list[int], ...] = tuple([] for _ in range(2 * num_messages))
    closed: tuple[list[int], ...] = tuple([] for _ in range(2 * num_messages))
    # Even elements are texts, odd ones are marks.
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
