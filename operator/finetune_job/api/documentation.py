"""The meaning of fields, enumeration members and printed words, taken from the strings below them in the source.

The source is read on demand, because pydantic would read it for each model at every start of a program. Words are failure
classes, exit codes of containers, and the words of status.
"""

from __future__ import annotations

import ast
import inspect
import sys
from dataclasses import dataclass
from enum import Enum
from functools import cache

from pydantic import BaseModel

from finetune_job.failures import CLASS_OF_EXIT_CODE, FailureClass
from finetune_job.reasons import AttemptOutcome, ConditionType, Phase, Reason


@cache
def field_docs(model: type[BaseModel]) -> dict[str, str]:
    """Map each field's name in manifests to its meaning, on one line; an inherited field has that of its base class."""
    texts: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            texts |= _documented_in(base.__module__).get(base.__qualname__, {})
    return {info.alias or name: texts[name] for name, info in model.model_fields.items() if name in texts}


@cache
def member_docs(enumeration: type[Enum]) -> dict[str, str]:
    """Map each member's value to its meaning, on one line; a member without a string below it is left out."""
    texts = _documented_in(enumeration.__module__).get(enumeration.__qualname__, {})
    return {str(member.value): texts[name] for name, member in enumeration.__members__.items() if name in texts}


@cache
def _documented_in(module: str) -> dict[str, dict[str, str]]:
    """Map each class's qualified name to the names of its attributes and the strings below them."""
    texts: dict[str, dict[str, str]] = {}
    _collect(ast.parse(inspect.getsource(sys.modules[module])), "", texts)
    return texts


def _collect(node: ast.AST, place: str, texts: dict[str, dict[str, str]]) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            texts[f"{place}{child.name}"] = _attributes(child)
            _collect(child, f"{place}{child.name}.", texts)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            _collect(child, f"{place}{child.name}.<locals>.", texts)


def _attributes(node: ast.ClassDef) -> dict[str, str]:
    texts: dict[str, str] = {}
    for before, after in zip(node.body, node.body[1:], strict=False):
        target = (
            before.target if isinstance(before, ast.AnnAssign) else before.targets[0] if isinstance(before, ast.Assign) else None
        )
        if not isinstance(target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            texts[target.id] = " ".join(after.value.value.split())
    return texts


_ENDS_BY_OTHERS = {
    "137": "Killed by SIGKILL: HostOutOfMemory if the kubelet says OOMKilled, else Internal, or the end of its pod or node.",
    "143": "Terminated by SIGTERM before the container could report: Preempted.",
    "OOMKilled": "The kubelet's reason for a container that took more memory than its limit: HostOutOfMemory.",
}
"""Exit code or reason of a container that something else has killed -> meaning."""


@dataclass(frozen=True)
class Word:
    """One word and its meaning."""

    text: str
    kind: str
    """The kind of the word, such as `failure class`."""
    meaning: str
    failure: FailureClass | None = None
    """The failure class, if the word is one."""


@cache
def words() -> tuple[Word, ...]:
    """List all words; one text may have several entries, such as `Stalled`."""
    return (
        *(Word(failure, "failure class", member_docs(FailureClass)[failure], failure) for failure in FailureClass),
        *(_exit_code(code, failure) for code, failure in sorted(CLASS_OF_EXIT_CODE.items())),
        *(Word(text, "end of a container", meaning) for text, meaning in _ENDS_BY_OTHERS.items()),
        *member_words("condition", ConditionType),
        *member_words("reason of a condition or an event", Reason),
        *member_words("phase of a job", Phase),
        *member_words("outcome of an attempt", AttemptOutcome),
    )


def member_words(kind: str, words: type[Enum]) -> list[Word]:
    """List the members of an enumeration, each of which has a string below it, as words."""
    meanings = member_docs(words)
    return [Word(str(member.value), kind, meanings[str(member.value)]) for member in words]


def _exit_code(code: int, failure: FailureClass) -> Word:
    return Word(str(code), "exit code of a container", f"{failure}: {member_docs(FailureClass)[failure]}", failure)
