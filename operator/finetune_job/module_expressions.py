"""Facts about a regular expression on module names that can be found without compiling it."""

from __future__ import annotations

import re

_OTHER_GRAMMAR = re.compile(r"\(\?(#|[a-zA-Z-]*x)")
"""Matches comments and the flag that allows them everywhere; brackets inside comments have no meaning."""


def key_expression(key: str) -> str:
    """Return the expression that PEFT builds from a key of a pattern (peft.utils.other.get_pattern_key)."""
    return rf"(.*\.)?({key})$"


def is_plainly_malformed(text: str) -> bool:
    """Whether brackets are not closed, a backslash escapes nothing, or a repetition has nothing before it, as in `*.q_proj`.

    Looks at each character once. True only for what `re.compile` refuses; if it is False, the expression may still be malformed.
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
    """Return the position of the `]` that closes the set; -1 without one. As a set's first character, `]` closes nothing."""
    position = begin + (2 if text[begin + 1 : begin + 2] == "^" else 1)
    first = position
    while position < len(text):
        if text[position] == "]" and position > first:
            return position
        position += 2 if text[position] == "\\" else 1
    return -1
