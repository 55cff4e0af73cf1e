"""Reads all documents of a YAML file as Kubernetes does, and refuses duplicate keys and values that JSON cannot represent.

The input may be hostile, so depth and number of values are counted on the parser's events before anything is built. Merge keys
can multiply the content of a file, so the keys that they add are counted, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import yaml

from finetune_job.catalogue.book import make_finding
from finetune_job.finding import INVALID_FIELD, Finding

MAX_FILE_BYTES = 16_000_000
MAX_FILE_VALUES = 500_000
MAX_BYTES = 1_500_000
"""Maximum size of one document in bytes: the API server accepts no larger objects."""
MAX_VALUES = 100_000
"""Maximum number of values in one document; an alias counts as all the values that it stands for."""
MAX_DEPTH = 64
LARGEST_INTEGER = 2**63 - 1
_MERGE = "tag:yaml.org,2002:merge"
_BOOL = "tag:yaml.org,2002:bool"


class DocumentError(Exception):
    """The text cannot be read as YAML documents."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.message)
        self.finding = finding


@dataclass(frozen=True)
class Document:
    """One document of a file."""

    number: int
    """Number of the document, from 1."""
    content: Any
    file: str = ""


def is_list(content: Any) -> bool:
    """Whether an object is a list of objects, such as `kubectl get --output yaml` writes. An empty list is not one."""
    if not isinstance(content, dict) or not str(content.get("kind")).endswith("List"):
        return False
    return isinstance(content.get("items"), list) and content["items"] != []


def objects_of(document: Document) -> list[Document]:
    """Return the objects of a list, each with the number of its document; for any other document, return that document."""
    return [replace(document, content=item) for item in document.content["items"]] if is_list(document.content) else [document]


def problem(field: str, value: object, message: str, fix: str) -> Finding:
    """Return a finding about the input itself."""
    return make_finding(INVALID_FIELD, field=field, value=str(value), message=message, fix=fix)


# libyaml's loader is ten times as fast, and its Python interface has the same constructors.
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Loader(_Base):  # type: ignore[misc]
    """Refuses keys that are given twice, and leaves dates as text, because JSON has none."""


class _Dumper(yaml.SafeDumper):
    """Quotes strings that programs for YAML 1.2 read as numbers, such as `1e-5`."""


def _quoted_if_like_a_number(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "'" if _LIKE_A_NUMBER.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_LIKE_A_NUMBER = re.compile(r"[-+.]?[0-9][-+.0-9a-zA-Z_]*")
_Dumper.add_representer(str, _quoted_if_like_a_number)


def document_text(content: Any) -> str:
    """Return an object as YAML in block style, with the keys in their given order."""
    return str(yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def _mapping(loader: Any, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Hashable, int] = {}
    own: dict[Any, Any] = {}
    merged: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        if key_node.tag == _MERGE:
            _merge(loader, value_node, merged)
            continue
        # As a key, `y` usually means a coordinate, not yes.
        is_letter = key_node.tag == _BOOL and len(key_node.value) == 1
        key = key_node.value if is_letter else loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        if not isinstance(key, str):
            raise DocumentError(problem(f"line {line}", key, "keys must be text", "put the key in quotes"))
        if key in seen:
            raise DocumentError(
                problem(
                    key or f"line {line}",
                    f"lines {seen[key]} and {line}",
                    "the key is given twice, and only one would count",
                    "remove one of the two",
                )
            )
        seen[key] = line
        own[key] = loader.construct_object(value_node, deep=True)
    return own if not merged else merged | own


def _merge(loader: Any, node: yaml.Node, merged: dict[Any, Any]) -> None:
    """Add the entries of a merge key's mappings to `merged`; the first value of a key wins. Limits the number of added keys."""
    parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
    for part in parts:
        brought = loader.construct_object(part, deep=True)
        if not isinstance(brought, dict):
            line = part.start_mark.line + 1
            raise DocumentError(problem(f"line {line}", "<<", "a merge key names mappings", "write the fields out"))
        loader.num_merged = getattr(loader, "num_merged", 0) + len(brought)
        if loader.num_merged > MAX_VALUES:
            raise DocumentError(_too_much("file"))
        for key, value in brought.items():
            merged.setdefault(key, value)


Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_OTHERWISE = ("tag:yaml.org,2002:timestamp", _INT, _FLOAT)
RESOLVERS = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _OTHERWISE]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
"""Rules that decide the types of words without quotes."""
Loader.yaml_implicit_resolvers = RESOLVERS
# Kubernetes reads y and n as yes and no, as YAML 1.1 does and PyYAML does not.
Loader.bool_values = {**_Base.bool_values, "y": True, "n": False}
Loader.add_implicit_resolver(_BOOL, re.compile(r"[yYnN]\Z"), list("yYnN"))
# 2e-4 is a number, although YAML 1.1 requires a decimal point; 1:30 is not, although YAML 1.1 reads it in base 60.
Loader.add_implicit_resolver(
    _INT, re.compile(r"[-+]?(0b[01_]+|0o?[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)\Z"), list("-+0123456789")
)
Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(r"([-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))\Z"),
    list("-+0123456789."),
)


def read_documents(text: str, file: str = "") -> list[Document]:
    """Return the non-empty documents of a file. Raises DocumentError."""
    size = len(text.encode(errors="replace"))
    if size > MAX_FILE_BYTES:
        raise DocumentError(problem("file", f"{size} bytes", f"is larger than {MAX_FILE_BYTES} bytes", "give fewer manifests"))
    try:
        _check_structure(text)
        contents = list(yaml.load_all(text, Loader=Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise DocumentError(
            problem(
                f"line {mark.line + 1}" if mark else "file",
                "not YAML",
                " ".join(str(error.problem or error.context).split()),
                "fix the YAML at that line",
            )
        ) from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise DocumentError(problem("file", "not YAML", " ".join(str(error).split()), "save the file as UTF-8 YAML")) from error
    except (LookupError, AttributeError, TypeError) as error:
        # PyYAML's constructors assume that a value fits an explicit tag such as !!float.
        raise DocumentError(problem("file", "not YAML", "a tag does not fit its value", "remove the tag")) from error
    except RecursionError as error:
        raise DocumentError(_too_much("file")) from error
    documents = [Document(number, content, file) for number, content in enumerate(contents, start=1) if content is not None]
    for document in documents:
        for count, (path, value) in enumerate(_walk(document.content, "", 0)):
            if count > MAX_VALUES:
                raise DocumentError(_too_much("file"))
            fault = _fault(value)
            if fault is not None:
                raise DocumentError(problem(path or "document", *fault))
    if not documents:
        raise DocumentError(problem("file", "empty", "holds no document", "give a file with a FineTuneJob"))
    return documents


def _check_structure(text: str) -> None:
    """Check depth, values and size before anything is built: libyaml's loader would overflow the stack on deep nesting."""
    depth = total = inside = begin = 0
    for event in yaml.parse(text, Loader=_Base):
        start: Any = event.start_mark
        end: Any = event.end_mark
        if isinstance(event, yaml.DocumentStartEvent):
            inside, begin = 0, start.index
        elif isinstance(event, yaml.DocumentEndEvent):
            size = len(text[begin : end.index].encode(errors="replace"))
            if size > MAX_BYTES:
                place = f"line {start.line + 1}"
                raise DocumentError(
                    problem(place, f"{size} bytes", f"is larger than {MAX_BYTES} bytes", "give a smaller manifest")
                )
        elif isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            total, inside = total + 1, inside + 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.NodeEvent):
            total, inside = total + 1, inside + 1
        if depth > MAX_DEPTH or inside > 2 * MAX_VALUES or total > MAX_FILE_VALUES:
            raise DocumentError(_too_much(f"line {start.line + 1}"))


def _too_much(place: str) -> Finding:
    reason = f"nested deeper than {MAX_DEPTH}, or more than {MAX_VALUES} values"
    return problem(place, "too much", reason, "write the values out, without aliases")


def _fault(value: Any) -> tuple[str, str, str] | None:
    """Return the value, the reason and the fix for a value that JSON cannot represent, and None for any other value."""
    match value:
        case str() if not _is_text(value):
            return ascii(value)[:60], "is not valid Unicode", "write it in UTF-8"
        case float() if not math.isfinite(value):
            return str(value), "is not a finite number", 'write a finite number, such as "2e-4"'
        case int() if abs(value) > LARGEST_INTEGER:
            # Python refuses to write more than 4300 decimal digits, so a longer number is written in hexadecimal.
            written = str(value) if value.bit_length() < 2_000 else f"{value:#x}"
            return written[:60], "is larger than any integer in Kubernetes", "write a smaller number"
        case None | str() | bool() | int() | float() | dict() | list():
            return None
        case _:
            kind = type(value).__name__
            return kind, f"is a {kind}, which JSON does not have", "write text, a number, true, false, a list or a mapping"


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _walk(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    if depth > MAX_DEPTH:
        raise DocumentError(_too_much(path))
    yield path, value
    if isinstance(value, dict):
        for key, inner in value.items():
            if not _is_text(key):
                raise DocumentError(problem(path or "document", ascii(key)[:60], "is not valid Unicode", "write it in UTF-8"))
            yield from _walk(inner, f"{path}.{key}" if path else key, depth + 1)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _walk(inner, f"{path}[{index}]", depth + 1)
