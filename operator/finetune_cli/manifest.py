"""Manifests as people write them -> jobs and profiles; what does not fit the schema becomes findings, one for each field.

Stricter than reading an object of the API server, which has already refused wrong types: "2" is not a number here, and 1 is not
true.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from finetune_job.api.documentation import field_docs
from finetune_job.api.job import FineTuneJob
from finetune_job.api.profile import FineTuneProfile
from finetune_job.catalogue.book import make_finding
from finetune_job.finding import UNREADABLE, Finding
from finetune_job.methods import METHODS
from finetune_job.rules.method_configuration.lora import REFUSED_INITS
from finetune_job.rules.rule import format_value

M = TypeVar("M", bound=BaseModel)


_METADATA = (
    "annotations", "creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "finalizers", "generateName",
    "generation", "labels", "managedFields", "name", "namespace", "ownerReferences", "resourceVersion", "selfLink", "uid",
)  # fmt: skip
"""Fields of every object of Kubernetes."""
_REFUSED_WORDS = frozenset({*map(str, REFUSED_INITS), *(str(kind) for kind, method in METHODS.items() if method.refused)})
"""Values that the schema has so that a rule can say why they are refused: nobody is advised to write them."""
_TYPE_FIXES = {
    "int_type": "write a whole number, without quotes",
    "int_from_float": "write a whole number",
    "bool_type": "write true or false, without quotes",
    "string_type": "put the value in quotes",
    "list_type": "write a list, as in [a, b]",
    "dict_type": "write a mapping of keys to values",
    "model_type": "write a mapping of fields to values",
}


def parse_job(content: Any) -> FineTuneJob | list[Finding]:
    """The job, or every way in which the document is none."""
    return _unknown_metadata(content) or _parse(FineTuneJob, _with_generated_name(content))


def _with_generated_name(content: Any) -> Any:
    """With a name like the one that Kubernetes makes of metadata.generateName: five characters more than 58 of it at most."""
    metadata = content.get("metadata") if isinstance(content, dict) else None
    if not isinstance(metadata, dict) or metadata.get("name") is not None:
        return content
    beginning = metadata.get("generateName")
    if not isinstance(beginning, str) or not beginning:
        return content
    return content | {"metadata": metadata | {"name": f"{beginning[:58]}xxxxx"}}


def _unknown_metadata(content: Any) -> list[Finding]:
    """The models leave what metadata holds to Kubernetes, which refuses these."""
    metadata = content.get("metadata") if isinstance(content, dict) else None
    if not isinstance(metadata, dict):
        return []
    found = []
    for name in metadata:
        if name not in _METADATA:
            near = difflib.get_close_matches(name, _METADATA, n=1, cutoff=0.6)
            fix = f"write {near[0]}" if near else f"remove metadata.{name}, or make it a label or an annotation"
            found.append(_unreadable(f"metadata.{name}", _value(metadata[name]), "there is no such field", fix))
    return found


def parse_profile(content: Any) -> FineTuneProfile | list[Finding]:
    """The profile, or every way in which the document is none."""
    return _parse(FineTuneProfile, content)


def _parse(model: type[M], content: Any) -> M | list[Finding]:
    try:
        # JSON is where strictness and the words of enumerations go together.
        return model.model_validate_json(json.dumps(content), strict=True, by_alias=True, by_name=False)
    except ValidationError as error:
        return _findings(model, error)


def _findings(model: type[BaseModel], error: ValidationError) -> list[Finding]:
    found: dict[str, Finding] = {}
    for details in error.errors(include_url=False):
        location = [part for part in details["loc"] if part != "[key]"]
        field = _path(location)
        # Several complaints about one field come from the same mistake; the first names it.
        found.setdefault(field, _finding(model, field, location, dict(details)))
    return list(found.values())


def _path(location: Sequence[int | str]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "document"


def _finding(model: type[BaseModel], field: str, location: Sequence[int | str], details: dict[str, Any]) -> Finding:
    kind, context = details["type"], details.get("ctx") or {}
    value = _value(details.get("input"))
    allowed = _fields_beside(model, location)
    match kind:
        case "extra_forbidden":
            near = difflib.get_close_matches(str(location[-1]), allowed, n=1, cutoff=0.6)
            fix = f"write {near[0]}" if near else f"remove {field}; allowed here: {', '.join(sorted(allowed))}"
            return _unreadable(field, value, "there is no such field", fix)
        case "missing":
            return _unreadable(field, "unset", "is required", _meaning(model, location))
        case "enum" | "literal_error":
            expected = str(context.get("expected"))
            words = re.findall(r"'([^']*)'", expected)
            meant = _nearest(details.get("input"), words)
            if meant in _REFUSED_WORDS:
                accepted = ", ".join(word for word in words if word not in _REFUSED_WORDS)
                return _unreadable(
                    field, value, f"is not one of {expected}", f"write one of {accepted}; {meant} is not supported"
                )
            return _unreadable(field, value, f"is not one of {expected}", f"write {meant or expected}")
        case "list_type" if isinstance(details.get("input"), str):
            items = [item for item in re.split(r"[\s,]+", details["input"]) if item] or ["a", "b"]
            return _unreadable(field, value, "is a text, not a list", _shortened(f"write [{', '.join(items)}]"))
        case "value_error":
            reason, _, fix = str(context.get("error")).partition("; ")
            return _unreadable(field, value, reason, fix or _meaning(model, location))
        case "string_pattern_mismatch":
            return _unreadable(field, value, f"does not match {context.get('pattern')}", _meaning(model, location))
        case _:
            reason = str(details["msg"]).removeprefix("Input ")
            return _unreadable(field, value, reason, _TYPE_FIXES.get(kind) or _meaning(model, location))


def _unreadable(field: str, value: str, message: str, fix: str) -> Finding:
    return make_finding(UNREADABLE, field=field, value=value, message=message, fix=fix)


def _value(written: Any) -> str:
    if isinstance(written, dict):
        return "a mapping"
    return _shortened(json.dumps(written) if isinstance(written, str) else format_value(written))


def _shortened(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}..."


def _nearest(written: Any, words: Sequence[str]) -> str | None:
    """The word that was most likely meant, whatever its capitals. What all words end with does not tell them apart."""
    if not isinstance(written, str):
        return None
    endings = [words[0][start:].lower() for start in range(len(words[0]))] if len(words) > 1 else []
    shared = next((ending for ending in endings if all(word.lower().endswith(ending) for word in words)), "")
    by_lower = {word.lower().removesuffix(shared): word for word in words}
    near = difflib.get_close_matches(written.strip().lower().removesuffix(shared), by_lower, n=1, cutoff=0.6)
    return by_lower[near[0]] if near else None


def _model_at(model: type[BaseModel], location: Sequence[int | str]) -> type[BaseModel] | None:
    """The model that holds the last part of a location."""
    current: type[BaseModel] | None = model
    for part in location[:-1]:
        if isinstance(part, int) or current is None:
            return None
        current = _inner(current, part)
    return current


def _inner(model: type[BaseModel], alias: str) -> type[BaseModel] | None:
    for info in model.model_fields.values():
        if info.alias == alias:
            candidates = [info.annotation, *getattr(info.annotation, "__args__", ())]
            return next((each for each in candidates if isinstance(each, type) and issubclass(each, BaseModel)), None)
    return None


def _fields_beside(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    holder = _model_at(model, location)
    return [] if holder is None else [info.alias or name for name, info in holder.model_fields.items()]


def _meaning(model: type[BaseModel], location: Sequence[int | str]) -> str:
    """What the field is for, as its documentation says."""
    names = list(location)
    while names and isinstance(names[-1], int):
        names.pop()
    holder = _model_at(model, names) if names else None
    meaning = field_docs(holder).get(str(names[-1])) if holder is not None else None
    return meaning or "see kubectl explain finetunejob"
