"""Every word that the product prints beside findings: failure classes, exit codes of containers, condition types and reasons.

What a word means is the string below it where it is declared (`failures.py`, `reasons.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from finetune_job.api.documentation import member_docs
from finetune_job.failures import CLASS_OF_EXIT_CODE, FailureClass
from finetune_job.reasons import ConditionType, Reason


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
        *_members("condition", ConditionType),
        *_members("reason of a condition or an event", Reason),
    )


def _members(kind: str, words: type[ConditionType | Reason]) -> list[Word]:
    meanings = member_docs(words)
    return [Word(member.value, kind, meanings[member.value]) for member in words]


def _exit_code(code: int, failure: FailureClass) -> Word:
    return Word(str(code), "exit code of a container", f"{failure}: {member_docs(FailureClass)[failure]}", failure)
