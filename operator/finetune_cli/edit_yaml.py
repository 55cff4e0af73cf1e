"""Changes one document of a YAML text, but keeps its comments, order, quotes and block style, and all other documents.

ruamel.yaml keeps the layout. Only `documents` interprets words without quotes; here they stay text from reading to writing.
`documents` reads every text first, so its limits also apply to everything that reaches ruamel.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import CommentMark, YAMLError
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString, PlainScalarString
from ruamel.yaml.tokens import CommentToken

from finetune_cli.documents import DocumentError, Loader, read_documents

_WIDTH = 10_000_000
"""Maximum length of a line: large enough that ruamel never breaks lines."""
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_JSON_INDENT = re.compile(r"\{\n( +)")
_CHILD = re.compile(r"^( *)[^\s#-][^\n]*:[ \t]*(?:#[^\n]*)?\r?\n(?:[ \t]*(?:#[^\n]*)?\r?\n)*+(?=( *)(- +|[^\s-]))", re.MULTILINE)
"""Matches a key whose line holds no value, at most a comment, and the start of the key's value on a later line."""
_UNKNOWN_LAYOUT = (YAMLError, ValueError, TypeError, LookupError, AttributeError, AssertionError, NotImplementedError)
"""Errors that ruamel raises for layouts that it does not support, and for changes that do not fit tags, aliases or merge keys."""


class _WordsAreText(VersionedResolver):
    @property
    def versioned_resolver(self) -> dict[str, list[tuple[str, re.Pattern[str]]]]:
        return {"": [("tag:yaml.org,2002:null", re.compile(""))]}


def edit_document(text: str, number: int, wanted: dict[str, Any]) -> str:
    """Return the text with document `number` (from 1) changed so that it reads as `wanted`.

    If the layout does not allow the change (an alias, a merge key), this document is written without its comments.

    Raises:
        DocumentError: the text is not readable, or exceeds the bounds of manifests.
    """
    contents = {document.number: document.content for document in read_documents(text)}
    start, end = _span(text, number)
    head, tail = text[:start], text[end:]
    if head.rpartition("\n")[2] and not text.startswith("{", start):
        # A document after `--- !!map` is written without the tag, and has to start on the next line.
        head += "\n"
    changed = head + _changed(text[start:end], contents[number], wanted) + tail
    try:
        read = {document.number: document.content for document in read_documents(changed)}
        if json.dumps(read, sort_keys=True) == json.dumps(contents | {number: wanted}, sort_keys=True):
            return changed
    except DocumentError:
        pass
    return f"{head}{_dumped(_new(wanted), '')}\n{tail}"


def _span(text: str, number: int) -> tuple[int, int]:
    """Return where a document's content starts and ends, in characters: after its `---`, and after the comments at its end."""
    count, start = 0, -1
    for event in yaml.parse(text, Loader=Loader):
        mark: Any = event.start_mark
        if isinstance(event, yaml.DocumentStartEvent):
            count, start = count + 1, -1
        elif count == number and isinstance(event, yaml.DocumentEndEvent):
            return start, mark.index
        elif count == number and start < 0:
            start = mark.index
            line = text[:start].rpartition("\n")[2]
            start -= 0 if line.strip() else len(line)
    raise ValueError(f"the text has no document {number}")


def _changed(chunk: str, before: Mapping[str, Any], wanted: dict[str, Any]) -> str:
    """Return the changed text of one document. The caller has to check that it reads as wanted."""
    with suppress(ValueError):
        # ruamel would lose the line breaks of a JSON document, so JSON is written without it.
        json.loads(chunk)
        indent = _JSON_INDENT.match(chunk)
        tail = chunk[len(chunk.rstrip()) :]
        return json.dumps(wanted, indent=len(indent[1]) if indent else None, ensure_ascii=False) + tail
    try:
        root = _round_trip(chunk).load(chunk)
        _change(root, before, wanted)
        return _dumped(root, chunk)
    except _UNKNOWN_LAYOUT:
        return chunk


def _round_trip(chunk: str) -> YAML:
    """Return a reader and writer that indents mappings, list items and dashes as the text indents the first of each."""
    mapping, dash, sequence = 2, 0, 2
    children = [(len(child[2]) - len(child[1]), child[3]) for child in _CHILD.finditer(chunk)]
    for column, begin in reversed(children):
        if begin.startswith("-"):
            dash, sequence = column, column + len(begin)
        elif column > 0:
            mapping = column
    made = YAML()
    made.Resolver = _WordsAreText
    made.preserve_quotes = True
    made.width = _WIDTH
    made.indent(mapping=mapping, sequence=sequence, offset=dash)
    return made


def _dumped(root: Any, layout: str) -> str:
    """Return a document as text, with the indentation and the line endings of `layout`."""
    stream = io.StringIO()
    _round_trip(layout).dump(root, stream)
    written = stream.getvalue()
    if layout[-1:] != "\n":
        written = written.removesuffix("\n")
    return written.replace("\n", "\r\n") if "\r\n" in layout else written


def _change(node: Any, before: Any, after: Any) -> None:
    """Change a node, whose value reads as `before`, to read as `after`."""
    if isinstance(before, list):
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            _change_entry(node, index, old, new)
        return
    for key, new in after.items():
        if key not in before:
            last = next(reversed(node), None)
            following = "" if last is None else _take_following(node, last)
            node[_scalar(key)] = _new(new)
            _put_following(node, key, following)
        else:
            _change_entry(node, key, before[key], new)
    for key in before:
        if key not in after:
            _remove(node, key)


def _change_entry(node: Any, key: Any, old: Any, new: Any) -> None:
    # Compared as text, because 1 == True and 1 == 1.0 in Python.
    if json.dumps(old, sort_keys=True) == json.dumps(new, sort_keys=True):
        return
    is_inside = bool(old) and bool(new) and type(old) is type(new)
    if is_inside and (isinstance(old, dict) or (isinstance(old, list) and len(old) == len(new))):
        _change(node[key], old, new)
        return
    following = _take_following(node, key)
    # Comments between a key and its value's first entry are removed with the value; the comment on the key's line stays.
    token = _token(node, key)
    if token is not None:
        token.value = token.value.partition("\n")[0] + "\n"
    if isinstance(node, CommentedMap) and key in node.ca.items:
        node.ca.items[key][3] = None
    node[key] = _new(new)
    _put_following(node, key, following)


def _remove(node: CommentedMap, key: str) -> None:
    keys = list(node)
    position = keys.index(key)
    following = _take_following(node, key)
    del node[key]
    # Comment lines above this entry, which entries that were removed before it have left behind.
    above = (node.ca.items.pop(key, None) or [None, None])[1] or []
    if position > 0:
        _put_following(node, keys[position - 1], following)
    elif len(keys) > 1 and (above or following):
        first = node.ca.items.setdefault(keys[1], [None, None, None, None])
        left = [CommentToken(following, CommentMark(0), None)] if following else []
        first[1] = [*above, *left, *(first[1] or [])]


# ruamel keeps the comments after an entry in one token: the rest of its line, and the lines down to the next entry. Those lines
# belong to the next entry, so they are detached from an entry that is removed, replaced or no longer the last.


def _token(node: Any, key: Any) -> Any:
    comments = node.ca.items.get(key)
    return None if comments is None else comments[0 if isinstance(node, CommentedSeq) else 2]


def _last_entry(node: Any, key: Any) -> tuple[Any, Any]:
    """Return the node and key of the innermost entry at which the text of an entry ends."""
    value = node[key]
    while isinstance(value, CommentedMap | CommentedSeq) and value and not value.fa.flow_style():
        node, key = value, (next(reversed(value)) if isinstance(value, CommentedMap) else len(value) - 1)
        value = node[key]
    return node, key


def _take_following(node: Any, key: Any) -> str:
    """Remove and return the comment lines after an entry."""
    node, key = _last_entry(node, key)
    token = _token(node, key)
    if token is None:
        return ""
    head, line_end, following = token.value.partition("\n")
    if isinstance(node[key], LiteralScalarString):
        head, line_end, following = "", "", token.value
    if head:
        token.value = head + line_end
    else:
        node.ca.items[key][0 if isinstance(node, CommentedSeq) else 2] = None
    return str(following)


def _put_following(node: Any, key: Any, following: str) -> None:
    """Append comment lines after an entry."""
    if not following:
        return
    node, key = _last_entry(node, key)
    token = _token(node, key)
    if token is not None:
        token.value += following
        return
    begin = "" if isinstance(node[key], LiteralScalarString) else "\n"
    place = node.ca.items.setdefault(key, [None, None, None, None])
    place[0 if isinstance(node, CommentedSeq) else 2] = CommentToken(begin + following, CommentMark(0), None)


def _new(value: Any) -> Any:
    """Return a value for ruamel, which then writes mappings in block style and lists on one line."""
    if isinstance(value, Mapping):
        return CommentedMap((_scalar(key), _new(inner)) for key, inner in value.items())
    if isinstance(value, list):
        items = CommentedSeq(map(_new, value))
        items.fa.set_flow_style()
        return items
    return _scalar(value)


def _scalar(value: Any) -> Any:
    # ruamel would give a plain str the quotes of the value that it replaces.
    if not isinstance(value, str):
        return PlainScalarString(json.dumps(value))
    is_plain = _PLAIN.fullmatch(value) and isinstance(yaml.load(value, Loader=Loader), str)  # noqa: S506 - a safe loader
    return PlainScalarString(value) if is_plain else DoubleQuotedScalarString(value)
