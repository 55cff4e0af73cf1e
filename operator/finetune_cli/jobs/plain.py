"""Texts of strangers for a terminal: no control characters, no escapes, no more than fits."""

from __future__ import annotations

MOST = 4096
"""Characters of a text that is shown; longer ones are cut."""
_CUT = "..."


def plain(text: object, most: int = MOST) -> str:
    """The text on one line: runs of white space become a blank, what does not print becomes its escape, as in Python."""
    cut = " ".join(str(text)[: 2 * most].split())
    shown = harmless(cut)
    return shown if len(shown) <= most else shown[: max(most - len(_CUT), 0)] + _CUT


def harmless(line: str) -> str:
    """A line with the escapes of what does not print, except tabs."""
    if line.isprintable():
        return line
    return "".join(one if one.isprintable() or one == "\t" else one.encode("unicode_escape").decode() for one in line)
