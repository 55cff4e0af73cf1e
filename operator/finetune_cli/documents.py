"""YAML as Kubernetes means it: every document of a file, no key twice, no number that JSON does not have."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from finetune_job.rules.rule import Finding

MAX_BYTES = 1_500_000
"""The API server takes no larger objects."""
MAX_VALUES = 100_000
MAX_DEPTH = 64
UNREADABLE = "unreadable"
"""Stands in place of a rule's id where the input itself is at fault."""


class DocumentError(Exception):
    """The text is not usable."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.message)
        self.finding = finding


@dataclass(frozen=True)
class Document:
    """One document of a file."""

    number: int
    """From 1."""
    content: Any


def problem(field: str, value: object, message: str, fix: str) -> Finding:
    """A finding about the input itself."""
    return Finding(rule=UNREADABLE, severity="error", field=field, value=str(value), message=message, fix=fix)


class _Loader(yaml.SafeLoader):
    """Refuses keys that stand twice, and leaves dates as text, because JSON has none."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Hashable, int] = {}
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        if not isinstance(key, str):
            raise DocumentError(problem(f"line {line}", key, "keys must be text", "put the key in quotes"))
        if key in seen:
            raise DocumentError(
                problem(
                    key, f"lines {seen[key]} and {line}", "the key stands twice, and only one would count", "remove one of the two"
                )
            )
        seen[key] = line
    loader.flatten_mapping(node)
    return {loader.construct_object(key, deep=True): loader.construct_object(value, deep=True) for key, value in node.value}


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# PyYAML takes 2e-4 for text, since YAML 1.1 wants a point; Kubernetes takes it for a number, and so must we.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+\Z"), list("-+0123456789")
)


def read_documents(text: str) -> list[Document]:
    """The documents of a file, empty ones left out. Raises DocumentError."""
    size = len(text.encode(errors="replace"))
    if size > MAX_BYTES:
        raise DocumentError(problem("file", f"{size} bytes", f"is larger than {MAX_BYTES} bytes", "give the manifest alone"))
    try:
        contents = list(yaml.load_all(text, Loader=_Loader))
    except yaml.MarkedYAMLError as error:
        place = f"line {error.problem_mark.line + 1}" if error.problem_mark else "file"
        raise DocumentError(
            problem(place, "not YAML", str(error.problem or error.context), "mend the YAML at that line")
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        raise DocumentError(problem("file", "not YAML", " ".join(str(error).split()), "save the file as UTF-8 YAML")) from error
    except RecursionError as error:
        raise DocumentError(_too_much("file")) from error
    documents = [Document(number, content) for number, content in enumerate(contents, start=1) if content is not None]
    for document in documents:
        _check_values(document.content)
    if not documents:
        raise DocumentError(problem("file", "empty", "holds no document", "give a file with a FineTuneJob"))
    return documents


def _too_much(place: str) -> Finding:
    reason = f"nested deeper than {MAX_DEPTH}, or more than {MAX_VALUES} values"
    return problem(place, "too much", reason, "write the values out, without aliases")


def _check_values(content: Any) -> None:
    for count, (path, value) in enumerate(_walk(content, "", 0)):
        if count > MAX_VALUES:
            raise DocumentError(_too_much("file"))
        if isinstance(value, float) and not math.isfinite(value):
            raise DocumentError(
                problem(path or "document", value, "is not a finite number", 'write a finite number, such as "2e-4"')
            )


def _walk(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    if depth > MAX_DEPTH:
        raise DocumentError(_too_much(path))
    yield path, value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _walk(inner, f"{path}.{key}" if path else str(key), depth + 1)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _walk(inner, f"{path}[{index}]", depth + 1)
