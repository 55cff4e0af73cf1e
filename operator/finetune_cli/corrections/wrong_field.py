"""Describes fields that the schema refuses, finds places in documents and models, and compares names in any spelling."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from finetune_job.api.documentation import field_docs
from finetune_job.rules.rule import yaml_text

Place = tuple[int | str, ...]
"""Names and indices from the top of a document to a field."""
SURE = 0.8
"""Minimum similarity of two words that are taken to differ only by a typing error."""
_LIKE = 0.6
LONGEST_WORD = 200
"""Longest word that is compared, in characters."""


@dataclass(frozen=True)
class Proposal:
    """A way to repair a field."""

    fix: str
    """The repair in words."""
    edits: tuple[tuple[Place, Any], ...] = ()
    """Places and their new values; None removes a value. If there are none, a person has to apply the fix."""
    is_certain: bool = False
    """Whether no other meaning is possible; a program may then make the edits without asking."""
    message: str = ""
    """The reason for the refusal; empty: `reason_of` derives it from the schema."""


@dataclass(frozen=True)
class WrongField:
    """A field that the schema refuses."""

    model: type[BaseModel]
    """The model of the whole document."""
    content: Any
    """The whole document."""
    place: Place
    kind: str
    """pydantic's type of the error."""
    context: Mapping[str, Any]
    value: Any
    """The value as written; None for a field that is missing."""
    message: str = ""
    """pydantic's message."""

    @property
    def name(self) -> str:
        """The path, as in `spec.data.datasets[0].source`."""
        return path_text(self.place)

    @property
    def key(self) -> str:
        """The last name of the path."""
        return str(self.place[-1])

    @property
    def holder(self) -> type[BaseModel] | None:
        """The model that has the field."""
        return model_at(self.model, self.plain)

    @property
    def plain(self) -> Place:
        """The place without the indices after its last name."""
        place = self.place
        while place and isinstance(place[-1], int):
            place = place[:-1]
        return place

    @property
    def meaning(self) -> str:
        """The documented meaning of the field, in brackets."""
        text = field_docs(self.holder).get(str(self.plain[-1])) if self.holder is not None and self.plain else ""
        return f" ({text.rstrip('.')})" if text else ""


def path_text(place: Place) -> str:
    """Return a place in the usual notation, as in `spec.data.datasets[0].source`."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "document"


def value_at(content: Any, place: Place) -> Any:
    """Return the value at a place, or None."""
    for part in place:
        if isinstance(content, dict):
            content = content.get(part)
        elif isinstance(content, list) and isinstance(part, int) and part < len(content):
            content = content[part]
        else:
            return None
    return content


def with_value(content: Any, place: Place, value: Any) -> Any:
    """Return a copy with a new value at a place; None removes the old one. A scalar on the way to the place becomes a mapping."""
    if not place:
        return value
    head, *rest = place
    if isinstance(content, list) and isinstance(head, int):
        inner = with_value(content[head], tuple(rest), value) if head < len(content) else value
        return [*content[:head], *([] if inner is None else [inner]), *content[head + 1 :]]
    mapping = content if isinstance(content, dict) else {}
    if value is None and head not in mapping:
        return content
    inner = with_value(mapping.get(head), tuple(rest), value)
    if inner is None:
        return {name: each for name, each in mapping.items() if name != head}
    return {**mapping, head: inner}


def model_at(model: type[BaseModel], place: Place) -> type[BaseModel] | None:
    """Return the model that holds the last part of a place."""
    current: type[BaseModel] | None = model
    for part in place[:-1]:
        if not isinstance(part, int):
            current = None if current is None else inner_model(current, part)
    return current


def inner_model(model: type[BaseModel], alias: str) -> type[BaseModel] | None:
    """Return the model of a field's value, or of the entries of its list."""
    return next((_model_in(info.annotation) for info in model.model_fields.values() if info.alias == alias), None)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((inner for each in getattr(annotation, "__args__", ()) if (inner := _model_in(each)) is not None), None)


def fields_of(model: type[BaseModel] | None) -> list[str]:
    """Return the names of a model's fields as they are written in manifests."""
    return [] if model is None else [info.alias or name for name, info in model.model_fields.items()]


def letters(word: str) -> str:
    """Return a name in lower case, without dashes, underscores, dots and spaces: spellings of a name differ only in these."""
    return re.sub(r"[-_. ]", "", word).lower()


def is_alike(one: Any, other: Any) -> bool:
    """Whether two values are equal, or two strings differ only in their spelling."""
    return letters(one) == letters(other) if isinstance(one, str) and isinstance(other, str) else one == other


def nearest(written: Any, words: Iterable[str]) -> tuple[str, bool] | None:
    """Return the word that was most likely meant, and whether that is certain. An ending that all words share is ignored."""
    if not isinstance(written, str) or len(written) > LONGEST_WORD:
        return None
    known = list(words)
    shared = ""
    if len(known) > 1:
        endings = [known[0][start:].lower() for start in range(len(known[0]))]
        shared = next((ending for ending in endings if all(word.lower().endswith(ending) for word in known)), "")
    by_spelling = {word.lower().removesuffix(shared): word for word in known}
    asked = written.strip().lower().removesuffix(shared)
    same = next((word for spelling, word in by_spelling.items() if letters(spelling) == letters(asked)), None)
    if same is not None:
        return same, True
    near = difflib.get_close_matches(asked, by_spelling, n=1, cutoff=_LIKE)
    if not near:
        return None
    return by_spelling[near[0]], difflib.SequenceMatcher(None, near[0], asked).ratio() >= SURE


def nested_text(value: Any) -> str:
    """Return a value as YAML on one line."""
    if not isinstance(value, dict):
        return yaml_text(value)
    return "{" + ", ".join(f"{key}: {nested_text(item)}" for key, item in value.items()) + "}"
