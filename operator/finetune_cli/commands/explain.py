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
from finetune_job.catalogue.book import entries
from finetune_job.chat_templates import TEMPLATE_FORMS
from finetune_job.fields import FieldFacts, all_fields
from finetune_job.names import Role
from finetune_job.rules.book import RULES, rule_by_id
from finetune_job.rules.cel.condition import TRANSITIONS

MAX_SUGGESTIONS = 3
"""Maximum number of suggestions for an unknown word."""
_CHECK = "check of finetune doctor"
_TEMPLATE = "spec.data.chatTemplate"


def explain(asked: str) -> list[Explained]:
    """Return all meanings of a word; empty if the word is unknown.

    asked: the id of a finding, a failure class with or without the role that reports it (`train/NonFinite`), an exit code, a word
    of a status (condition, reason, phase, outcome of an attempt), a verdict of `finetune validate`, a check of `finetune doctor`,
    a value of a field, or a field by its path, the end of its path, or its name in another tool. Case does not
    matter, and `-`, `_` and spaces in ids are equivalent.
    """
    role, slash, rest = asked.strip().partition("/")
    word = rest if slash and role in set(Role) else asked.strip()
    identifier = _as_id(word)
    meanings: list[Explained] = [each for each in (rule_by_id(identifier), entries().get(identifier)) if each is not None]
    meanings += [transition for transition in TRANSITIONS if transition.rule == identifier]
    meanings += [each for each in _words() if each.text.casefold() in (word.casefold(), identifier)]
    # Only names of checks can also be names of fields, so no other known word is looked up among the fields.
    if not all(isinstance(meaning, Word) and meaning.kind == _CHECK for meaning in meanings):
        return [*meanings, *_values(word, "spec.")]
    # Take the field with exactly this path or, if there is none, the fields whose paths end with it.
    path = _path(word)
    fields = [field for field in all_fields() if _path(field.path) == path]
    fields = fields or [field for field in all_fields() if f".{_path(field.path)}".endswith(f".{path}")]
    of_another_tool = "" if meanings or fields else answer_without_value(word)
    others = [Word(word, "setting of other tools", of_another_tool)] if of_another_tool else []
    return [*meanings, *fields, *_values(word), *others]


def nearest(asked: str) -> list[str]:
    """Return the known words that are most similar to an unknown word; for a path, only fields."""
    fields = {_path(form): field.path for field in all_fields() for form in (field.path, field.path.rpartition(".")[2])}
    ids = [*(rule.id for rule in RULES), *entries(), *(transition.rule for transition in TRANSITIONS)]
    known = {text.casefold(): text for text in [*ids, *(word.text for word in _words())] if not text.isdigit()}
    known = fields if "." in asked else fields | known
    candidates = [
        near
        for form in (_as_id(asked), _path(asked), _path(asked).rpartition(".")[2])
        for near in difflib.get_close_matches(form, known, n=MAX_SUGGESTIONS)
    ]
    return list(dict.fromkeys(known[near] for near in candidates))[:MAX_SUGGESTIONS]


def _words() -> tuple[Word, ...]:
    return (
        *words(),
        *member_words("exit code of finetune", ExitCode),
        *member_words("verdict of finetune validate", DocumentOutcome),
        *member_words(_CHECK, CheckId),
        *(Word(name, "chat template", f"A value of {_TEMPLATE}: {what}") for name, what in TEMPLATE_FORMS.items()),
    )


def _values(asked: str, part: str = "") -> list[Word]:
    """Find values of the fields whose path starts with `part`. Each value is listed once, with all fields that take it."""
    fields: dict[str, list[FieldFacts]] = {}
    for field in (each for each in all_fields() if each.path.startswith(part)):
        for value in field.values:
            if value.casefold() == asked.casefold():
                fields.setdefault(value, []).append(field)
    return [
        Word(value, f"value of {', '.join(dict.fromkeys(field.path for field in takers))}", takers[0].meaning)
        for value, takers in fields.items()
    ]


def _path(asked: str) -> str:
    """Return a path without indices of lists, in lower case."""
    return re.sub(r"\[\d*\]", "", asked.strip().strip(".")).casefold()


def _as_id(word: str) -> str:
    return word.strip().lower().replace("_", "-").replace(" ", "-")
