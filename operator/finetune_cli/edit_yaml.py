"""Edits of a YAML text that leave everything else as it stands: comments, order, quotes, blank lines.

Each edit is made in the text at the marks of the parser and checked by reading the text again; where it does not read as wanted
(aliases, tags, a layout that is not known here), the one document is written anew and the others still stand as they were.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from finetune_cli.documents import RESOLVERS, DocumentError, Loader, read_documents

_INDENT = 2
_WIDTH = 10_000
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")


@dataclass(frozen=True)
class Edit:
    """One difference between two objects."""

    path: tuple[str, ...]
    value: Any
    """New value; None removes the key."""


def differences(before: Mapping[str, Any], after: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[Edit]:
    """Edits that turn one object into the other. Lists and values are replaced whole."""
    edits = [Edit((*path, key), None) for key in before if key not in after]
    for key, value in after.items():
        old = before.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and old and value:
            edits += differences(old, value, (*path, key))
        elif key not in before or old != value or type(old) is not type(value):
            edits.append(Edit((*path, key), value))
    return edits


def edited(text: str, number: int, wanted: dict[str, Any]) -> str:
    """The text with document `number` (from 1) reading as `wanted`."""
    current: Mapping[str, Any] = next(document.content for document in read_documents(text) if document.number == number)
    for edit in differences(current, wanted):
        try:
            candidate = _with_edit(text, number, edit)
        except (_UnknownLayoutError, yaml.YAMLError):
            return written_anew(text, number, wanted)
        current = _after(current, edit)
        if not _reads_as(candidate, text, number, current):
            return written_anew(text, number, wanted)
        text = candidate
    return text


class _UnknownLayoutError(Exception):
    """This place cannot be edited in the text."""


class _MarkLoader(yaml.SafeLoader):
    """Python's own, whose marks count characters of the text."""


_MarkLoader.yaml_implicit_resolvers = RESOLVERS


class _Dumper(yaml.SafeDumper):
    """Puts everything in quotes that would be read as something else than text."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the base class names it
        return True


_Dumper.yaml_implicit_resolvers = Loader.yaml_implicit_resolvers


def _root(text: str, number: int) -> yaml.MappingNode:
    roots = list(yaml.compose_all(text, Loader=_MarkLoader))
    root = roots[number - 1]
    if not isinstance(root, yaml.MappingNode):
        raise _UnknownLayoutError
    return root


def _after(content: Mapping[str, Any], edit: Edit) -> dict[str, Any]:
    first, *rest = edit.path
    copied = dict(content)
    if rest:
        inner = copied.get(first)
        copied[first] = _after(inner if isinstance(inner, Mapping) else {}, Edit(tuple(rest), edit.value))
    elif edit.value is None:
        copied.pop(first, None)
    else:
        copied[first] = edit.value
    return copied


def _reads_as(candidate: str, text: str, number: int, wanted: Mapping[str, Any]) -> bool:
    try:
        after = {document.number: document.content for document in read_documents(candidate)}
    except DocumentError:
        return False
    before = {document.number: document.content for document in read_documents(text)}
    return json.dumps(after, sort_keys=True) == json.dumps(before | {number: wanted}, sort_keys=True)


def _with_edit(text: str, number: int, edit: Edit) -> str:
    node = _root(text, number)
    *parents, last = edit.path
    for name in parents:
        _, inner = _entry(node, name)
        if not isinstance(inner, yaml.MappingNode):
            raise _UnknownLayoutError
        node = inner
    position = next((place for place, (key, _) in enumerate(node.value) if key.value == last), None)
    if position is None:
        return _inserted(text, node, last, edit.value)
    if edit.value is None:
        return _removed(text, node, position)
    key, value = node.value[position]
    return _replaced(text, key, value, edit.value)


def _entry(node: yaml.MappingNode, name: str) -> tuple[yaml.Node, yaml.Node]:
    for key, value in node.value:
        if key.value == name:
            return key, value
    raise _UnknownLayoutError


def _end(node: yaml.Node) -> int:
    """Where the text of a node ends; a block's own mark stands behind the comments that follow it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    end: int = node.end_mark.index
    return end


def _replaced(text: str, key: yaml.Node, value: yaml.Node, new: Any) -> str:
    start, end = value.start_mark.index, _end(value)
    if isinstance(value, yaml.ScalarNode) and value.style in ("|", ">"):
        end = len(text[:end].rstrip())
    if start == end or value.start_mark.line != key.start_mark.line:
        return f"{text[: key.end_mark.index]}: {_flow(new)}{text[end:]}"
    return f"{text[:start]}{_flow(new)}{text[end:]}"


def _removed(text: str, node: yaml.MappingNode, position: int) -> str:
    key, value = node.value[position]
    if len(node.value) == 1:
        return f"{text[: node.start_mark.index]}{{}}{text[_end(node) :]}"
    if node.flow_style:
        if position + 1 < len(node.value):
            return text[: key.start_mark.index] + text[node.value[position + 1][0].start_mark.index :]
        return text[: _end(node.value[position - 1][1])] + text[_end(value) :]
    begin = key.start_mark.index - key.start_mark.column
    if text[begin : key.start_mark.index].strip():
        raise _UnknownLayoutError
    return text[:begin] + text[_line_end(text, max(_end(value), key.end_mark.index)) :]


def _inserted(text: str, node: yaml.MappingNode, name: str, value: Any) -> str:
    if node.flow_style or not node.value:
        end = node.end_mark.index - 1
        if text[end : end + 1] != "}":
            raise _UnknownLayoutError
        head = text[:end].rstrip()
        comma = "" if head.endswith(("{", ",")) else ", "
        return f"{head}{comma}{_flow(name)}: {_flow(value)}{text[end:]}"
    indent = " " * node.value[0][0].start_mark.column
    end = _line_end(text, max(_end(node), node.value[-1][0].end_mark.index))
    head = text[:end] if text[:end].endswith("\n") else f"{text[:end]}\n"
    lines = "".join(f"{indent}{line}\n" for line in _block(name, value))
    return f"{head}{lines}{text[end:]}"


def _line_end(text: str, index: int) -> int:
    if text[index - 1 : index] == "\n":
        return index
    end = text.find("\n", index)
    return len(text) if end < 0 else end + 1


def _block(name: str, value: Any) -> list[str]:
    if isinstance(value, Mapping) and value:
        inner = [line for key, each in value.items() for line in _block(key, each)]
        return [f"{_flow(name)}:", *(" " * _INDENT + line for line in inner)]
    return [f"{_flow(name)}: {_flow(value)}"]


def _flow(value: Any) -> str:
    """A value on one line."""
    match value:
        case str():
            return value if _PLAIN.fullmatch(value) and _is_read_as_text(value) else json.dumps(value, ensure_ascii=False)
        case Mapping():
            return "{" + ", ".join(f"{_flow(key)}: {_flow(inner)}" for key, inner in value.items()) + "}"
        case Sequence():
            return "[" + ", ".join(map(_flow, value)) + "]"
        case _:
            return json.dumps(value)


def _is_read_as_text(value: str) -> bool:
    return isinstance(yaml.load(value, Loader=Loader), str)  # noqa: S506 - a subclass of the safe loader


def written_anew(text: str, number: int, wanted: dict[str, Any]) -> str:
    """The document alone written anew in the place of the old one; all of them where Python's parser does not read the text."""
    try:
        root = _root(text, number)
    except yaml.YAMLError:
        contents = [wanted if document.number == number else document.content for document in read_documents(text)]
        return str(yaml.dump_all(contents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_WIDTH))
    if root.flow_style:
        written = json.dumps(wanted, indent=_INDENT, ensure_ascii=False)
    else:
        written = yaml.dump(wanted, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_WIDTH)
    return f"{text[: root.start_mark.index]}{written}{text[root.end_mark.index :]}"
