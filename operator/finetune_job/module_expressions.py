"""Checks on regular expressions for module names that do not compile the expression."""

from __future__ import annotations

import re

_OTHER_GRAMMAR = re.compile(r"\(\?(#|[a-zA-Z-]*x)")
"""Matches a comment or the verbose flag, which allows comments anywhere: brackets within comments must not be counted."""


def key_expression(key: str) -> str:
    """Return the regular expression that PEFT builds from a key of `rankPattern` or `alphaPattern` (get_pattern_key)."""
    return rf"(.*\.)?({key})$"


def is_plainly_malformed(text: str) -> bool:
    """Whether brackets are not closed, a backslash escapes nothing, or a repetition has nothing before it, as in `*.q_proj`.

    Reads each character once. If this returns True, `re.compile` would fail; if False, the expression may still be malformed.
    """
    if _OTHER_GRAMMAR.search(text):
        return False
    depth, position, begins = 0, 0, True
    while position < len(text):
        letter = text[position]
        if letter in "*+" and begins:
            return True
        begins = letter in "(|"
        if letter == "[":
            position = _end_of_set(text, position)
            if position < 0:
                return True
        elif letter == "\\":
            position += 1
            if position == len(text):
                return True
        elif letter == "(":
            depth += 1
        elif letter == ")":
            depth -= 1
            if depth < 0:
                return True
        position += 1
    return depth > 0


def _end_of_set(text: str, begin: int) -> int:
    """Return the position of the `]` that closes the set; -1 if there is none. A `]` right at a set's start is a literal."""
    position = begin + (2 if text[begin + 1 : begin + 2] == "^" else 1)
    first = position
    while position < len(text):
        if text[position] == "]" and position > first:
            return position
        position += 2 if text[position] == "\\" else 1
    return -1
