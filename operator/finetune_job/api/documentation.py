"""What fields, members of enumerations and printed words mean: the strings below them in the source.

Read when somebody asks, because pydantic would read the source of every model at every start of a program. Words are
failure classes, exit codes of containers, and the words of status.
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
    """Field name, as manifests have it -> meaning, on one line; a field of a base class has what stands there."""
    found: dict[str, str] = {}
    for each in reversed(model.__mro__):
        if issubclass(each, BaseModel) and each is not BaseModel:
            found |= _documented_in(each.__module__).get(each.__qualname__, {})
    return {info.alias or name: found[name] for name, info in model.model_fields.items() if name in found}


@cache
def member_docs(enumeration: type[Enum]) -> dict[str, str]:
    """Value of a member -> meaning, on one line; a member without a string below it is left out."""
    found = _documented_in(enumeration.__module__).get(enumeration.__qualname__, {})
    return {str(member.value): found[name] for name, member in enumeration.__members__.items() if name in found}


@cache
def _documented_in(module: str) -> dict[str, dict[str, str]]:
    """Qualified name of a class -> name of an attribute -> the string below it."""
    found: dict[str, dict[str, str]] = {}
    _collect(ast.parse(inspect.getsource(sys.modules[module])), "", found)
    return found


def _collect(node: ast.AST, place: str, found: dict[str, dict[str, str]]) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            found[f"{place}{child.name}"] = _attributes(child)
            _collect(child, f"{place}{child.name}.", found)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            _collect(child, f"{place}{child.name}.<locals>.", found)


def _attributes(node: ast.ClassDef) -> dict[str, str]:
    found: dict[str, str] = {}
    for before, after in zip(node.body, node.body[1:], strict=False):
        target = (
            before.target if isinstance(before, ast.AnnAssign) else before.targets[0] if isinstance(before, ast.Assign) else None
        )
        if not isinstance(target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            found[target.id] = " ".join(after.value.value.split())
    return found


_ENDS_BY_OTHERS = {
    "137": "Ended by SIGKILL: HostOutOfMemory if the kubelet says OOMKilled, else Internal, or the end of its pod or node.",
    "143": "Ended by SIGTERM before the container could report: Preempted.",
    "OOMKilled": "The kubelet's reason for a container that took more memory than its limit: HostOutOfMemory.",
}
"""What Kubernetes itself says of containers."""


@dataclass(frozen=True)
class Word:
    """One word and its meaning."""

    text: str
    kind: str
    """What it is, such as `failure class`."""
    meaning: str
    failure: FailureClass | None = None
    """Of a failure class: the class."""


@cache
def words() -> tuple[Word, ...]:
    """All of them; a text may stand for several, such as `Stalled`."""
    return (
        *(Word(one, "failure class", member_docs(FailureClass)[one], one) for one in FailureClass),
        *(_exit_code(code, failure) for code, failure in sorted(CLASS_OF_EXIT_CODE.items())),
        *(Word(text, "end of a container", meaning) for text, meaning in _ENDS_BY_OTHERS.items()),
        *member_words("condition", ConditionType),
        *member_words("reason of a condition or an event", Reason),
        *member_words("phase of a job", Phase),
        *member_words("outcome of an attempt", AttemptOutcome),
    )


def member_words(kind: str, words: type[Enum]) -> list[Word]:
    """The members of an enumeration, each of which has a string below it."""
    meanings = member_docs(words)
    return [Word(str(member.value), kind, meanings[str(member.value)]) for member in words]


def _exit_code(code: int, failure: FailureClass) -> Word:
    return Word(str(code), "exit code of a container", f"{failure}: {member_docs(FailureClass)[failure]}", failure)
