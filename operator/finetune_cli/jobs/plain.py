"""Makes untrusted text safe for a terminal: without control characters, and not too long."""

from __future__ import annotations

MOST = 4096
"""Maximum number of characters of a text that are shown; a longer text is cut."""
_CUT = "..."


def plain(text: object, most: int = MOST) -> str:
    """Return the text on one line: runs of white space become a space, and unprintable characters become Python's escapes."""
    cut = " ".join(str(text)[: 2 * most].split())
    shown = harmless(cut)
    return shown if len(shown) <= most else shown[: max(most - len(_CUT), 0)] + _CUT


def harmless(line: str) -> str:
    """Return a line with unprintable characters, except tabs, replaced by Python's escapes."""
    if line.isprintable():
        return line
    return "".join(sign if sign.isprintable() or sign == "\t" else sign.encode("unicode_escape").decode() for sign in line)
