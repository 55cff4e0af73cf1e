"""Output of `finetune data`: counts, lengths, and records with their trained parts in colour or in brackets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finetune_cli.local.look import Look
from finetune_cli.render.verdicts import finding_text

BAR = 40
"""Length of the longest bar in characters."""
LONGEST_SHOWN = 4000
"""Maximum number of characters of a record that are shown."""
MOST_KEYS = 12
"""Maximum number of unread keys that are named."""
_LEARNT, _PLAIN = "\x1b[32m", "\x1b[0m"
_CONTROL = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: "\u2421"}
"""Visible symbols for characters in records that a terminal would interpret as commands."""


def look_text(look: Look, *, in_colour: bool) -> str:
    """Return the whole output as text. `in_colour`: whether trained parts are marked by colour."""
    lines: list[str] = []
    has_tokenizer = not look.why_no_tokens
    for source in look.sources:
        lines += _source_lines(source, has_tokenizer)
    if look.records:
        key = f"{_LEARNT}learnt{_PLAIN}" if in_colour else "[[learnt]]"
        lines += ["", f"First records ({key}):" if has_tokenizer else "First records:"]
        for record in look.records:
            tokens = f", {_counted(record['tokens'], 'token')}" if has_tokenizer else ""
            dropped = ", too long and dropped" if record["is_dropped"] else ""
            heading = f"--- {record['split']}: {record['place']}{tokens}{dropped}"
            lines += ["", heading, _record_text(record, in_colour=in_colour)]
    if not has_tokenizer:
        lines += ["", f"{look.why_no_tokens}, so tokens are not counted and templates not rendered."]
    lines += [finding_text(finding) for finding in look.findings]
    return "\n".join(lines).lstrip("\n") + "\n"


def _source_lines(source: Mapping[str, Any], has_tokenizer: bool) -> list[str]:
    records = ("" if source["is_whole"] else "the first ") + _counted(source["records"], "record")
    lines = ["", f"{source['split']}: {source['source']} ({_counted(source['files'], 'file')}): {records}"]
    if has_tokenizer:
        dropped = f"{_counted(source['dropped'], 'record')} too long and dropped"
        lines.append(f"  {_counted(source['tokens'], 'token')}, {source['supervised']} of them learnt; {dropped}")
    if source["unread"]:
        shown = [f"{str(key).translate(_CONTROL)} (of {count})" for key, count in list(source["unread"].items())[:MOST_KEYS]]
        more = len(source["unread"]) - len(shown)
        lines.append(f"  keys that are not read: {', '.join(shown)}{f' and {more} more' if more else ''}")
    if source["repeated"]:
        lines.append(f"  {source['repeated']} repeat{'s' if source['repeated'] == 1 else ''} an earlier one")
    if source["held_out"]:
        lines.append(f"  {source['held_out']} {'is' if source['held_out'] == 1 else 'are'} also held out")
    lengths = {int(bound): count for bound, count in source["lengths"].items()}
    most = max(lengths.values(), default=1)
    for bound, count in lengths.items():
        lines.append(f"  {f'up to {bound}':>13} tokens {'#' * max(1, round(BAR * count / most))} {count}")
    return lines


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _record_text(record: Mapping[str, Any], *, in_colour: bool) -> str:
    text, left = "", LONGEST_SHOWN
    before, behind = (_LEARNT, _PLAIN) if in_colour else ("[[", "]]")
    for piece, is_learnt in record["pieces"]:
        shown = str(piece)[:left].translate(_CONTROL)
        left -= len(shown)
        text += f"{before}{shown}{behind}" if is_learnt and shown else shown
        if left <= 0:
            return f"{text}..."
    return text


def look_document(look: Look) -> dict[str, Any]:
    """Return, as plain data, what was found in the records."""
    return {
        "accepted": not look.is_refused,
        "findings": [finding.model_dump(mode="json") for finding in look.findings],
        "sources": look.sources,
        "records": look.records,
        "hasTokenizer": not look.why_no_tokens,
    }
