"""`finetune explain`: the meaning of a word that the product prints or reads."""

from __future__ import annotations

import difflib
import re

from finetune_cli.checks.cluster import CheckId
from finetune_cli.checks.validate import DocumentOutcome
from finetune_cli.corrections.foreign import answer_without_value
from finetune_cli.exit_codes import ExitCode
from finetune_cli.render.explanations import Explained
from finetune_job.api.documentation import Word, member_words, words
from finetune_job.catalogue.book import ENTRIES, entry_by_id
from finetune_job.chat_templates import TEMPLATE_FORMS
from finetune_job.fields import FieldFacts, all_fields
from finetune_job.names import Role
from finetune_job.rules.book import RULES, rule_by_id
from finetune_job.rules.cel.condition import TRANSITIONS

MAX_SUGGESTIONS = 3
"""Most suggestions for an unknown word."""
_CHECK = "check of finetune doctor"
_TEMPLATE = "spec.data.chatTemplate"


def explain(asked: str) -> list[Explained]:
    """Find everything that a word stands for; empty if it stands for nothing.

    asked: the id of a finding, a failure class with or without the role that it is reported of (`train/NonFinite`), an exit code,
    a word of status (condition, reason, phase, outcome of an attempt), a verdict of `finetune validate`, a check of `finetune
    doctor`, a value that a field takes, or a field by its path, the end of its path, or its name in another tool; in any case,
    with `-`, `_` or blanks in ids.
    """
    role, slash, rest = asked.strip().partition("/")
    word = rest if slash and role in set(Role) else asked.strip()
    meanings = [*_findings(_as_id(word)), *(each for each in _words() if each.text.casefold() in (word.casefold(), _as_id(word)))]
    # Of all words only checks have the names of fields; words of the status are told as such.
    if not all(isinstance(each, Word) and each.kind == _CHECK for each in meanings):
        return [*meanings, *_values(word, "spec.")]
    fields = _fields(word)
    return [*meanings, *fields, *_values(word), *([] if meanings or fields else _of_another_tool(word))]


def nearest(asked: str) -> list[str]:
    """The known words that are most like an unknown one; for a path those of fields alone."""
    fields = {form: each.path for each in all_fields() for form in _forms(each)}
    ids = [*(rule.id for rule in RULES), *(entry.id for entry in ENTRIES), *(each.rule for each in TRANSITIONS)]
    known = {text.casefold(): text for text in [*ids, *(each.text for each in _words())] if not text.isdigit()}
    known = fields if "." in asked else fields | known
    candidates = [
        near
        for form in (_as_id(asked), _path(asked), _path(asked).rpartition(".")[2])
        for near in difflib.get_close_matches(form, known, n=MAX_SUGGESTIONS)
    ]
    return list(dict.fromkeys(known[near] for near in candidates))[:MAX_SUGGESTIONS]


def _findings(identifier: str) -> list[Explained]:
    entries: list[Explained | None] = [rule_by_id(identifier), entry_by_id(identifier)]
    return [each for each in (*entries, *(each for each in TRANSITIONS if each.rule == identifier)) if each is not None]


def _words() -> tuple[Word, ...]:
    return (
        *words(),
        *member_words("exit code of finetune", ExitCode),
        *member_words("verdict of finetune validate", DocumentOutcome),
        *member_words(_CHECK, CheckId),
        *(Word(name, "chat template", f"A value of {_TEMPLATE}: {what}") for name, what in TEMPLATE_FORMS.items()),
    )


def _fields(asked: str) -> list[FieldFacts]:
    """Fields of this path, or, if there is none, fields whose path ends with it."""
    path = _path(asked)
    whole = [each for each in all_fields() if _path(each.path) == path]
    return whole or [each for each in all_fields() if f".{_path(each.path)}".endswith(f".{path}")]


def _values(asked: str, part: str = "") -> list[Word]:
    """Values of fields of a part; each is listed once, with all fields that take it."""
    fields: dict[str, list[FieldFacts]] = {}
    for field in (each for each in all_fields() if each.path.startswith(part)):
        for value in field.values:
            if value.casefold() == asked.casefold():
                fields.setdefault(value, []).append(field)
    return [
        Word(value, f"value of {', '.join(dict.fromkeys(field.path for field in takers))}", takers[0].meaning)
        for value, takers in fields.items()
    ]


def _of_another_tool(asked: str) -> list[Word]:
    meaning = answer_without_value(asked)
    return [Word(asked, "setting of other tools", meaning)] if meaning else []


def _forms(field: FieldFacts) -> tuple[str, str]:
    return _path(field.path), _path(field.path.rpartition(".")[2])


def _path(asked: str) -> str:
    """A path without indices of lists, and in one case."""
    return re.sub(r"\[\d*\]", "", asked.strip().strip(".")).casefold()


def _as_id(word: str) -> str:
    return word.strip().lower().replace("_", "-").replace(" ", "-")
