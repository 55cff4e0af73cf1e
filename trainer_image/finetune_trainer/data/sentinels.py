"""Marks around the contents of a chat and the names of the tools it calls, which show in the rendered text what each turn became.

Characters of Unicode's private use planes, four per message. They stand within the blank characters at the ends of a content, so
that trimming, which most templates do, removes the same as without them. Whether a template wrote the same text with marks as
without is for the caller to compare. Called by chat.py and template_probe.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune_trainer.data.records import Message, called_name

_PLANES = (0xF0000, 0x100000)
"""First characters of the two private planes."""
_NUM_MARKS = 0xFFFE
_IN_PLANE = {first: re.compile(f"([{chr(first)}-{chr(first + _NUM_MARKS - 1)}])") for first in _PLANES}


class SentinelError(ValueError):
    """There are no characters left to mark with."""


@dataclass(frozen=True)
class SentinelPositions:
    """A rendered text without its marks, and where they stood in it."""

    text: str
    opened: tuple[list[int], ...]
    """By message: where its words begin; empty where it has none or the template dropped the beginning."""
    closed: tuple[list[int], ...]
    """By message: where its words end."""
    called: tuple[list[int], ...]
    """By message: where the name of a tool that it calls ends, each time that it is written; empty where names were not
    marked."""

    def last_closed(self, limit: int) -> tuple[int, int]:
        """Where before `limit` the last words of any message end, and the number of that message; (0, -1) where there are
        none.
        """
        ends = [(at, number) for number, places in enumerate(self.closed) for at in places if at < limit]
        return max(ends, default=(0, -1))

    def first_opened(self, start: int) -> int:
        """Where from `start` on the next words of any message begin; the end of the text where there are none."""
        return min((at for places in self.opened for at in places if at >= start), default=len(self.text))


def with_sentinels(
    messages: Sequence[Message], text: str, roles: frozenset[str] | None, *, calls: bool = False
) -> tuple[list[Message], int]:
    """The messages with marks around the contents of `roles` (None: of all), and the first mark.

    text: the same chat rendered without marks; no character of it is taken as a mark. calls: the names of called tools are
    marked, too. Raises SentinelError.
    """
    # Most texts are ASCII, which Python knows without looking through them.
    first = _PLANES[0] if text.isascii() else next((plane for plane in _PLANES if not _IN_PLANE[plane].search(text)), None)
    if first is None or 4 * len(messages) > _NUM_MARKS:
        raise SentinelError("it holds private use characters of both planes" if first is None else "it has too many turns")
    found = []
    for number, message in enumerate(messages):
        content = message["content"]
        if content and (roles is None or message["role"] in roles) and (words := content.strip()):
            start = content.index(words)
            end = start + len(words)
            message = {**message, "content": content[:start] + _between(first, number, words) + content[end:]}
        if calls and message.get("tool_calls"):
            named = [_with_marked_name(call, first, len(messages) + number) for call in message["tool_calls"]]
            message = {**message, "tool_calls": named}
        found.append(message)
    return found, first


def read_sentinels(with_marks: str, first: int, num_messages: int) -> SentinelPositions:
    """`with_marks`: rendered from what `with_sentinels` gave with the same `first`."""
    opened: tuple[list[int], ...] = tuple([] for _ in range(2 * num_messages))
    closed: tuple[list[int], ...] = tuple([] for _ in range(2 * num_messages))
    # Texts and marks in turn.
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
