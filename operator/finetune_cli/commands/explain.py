"""`finetune explain`: what a word stands for that the product prints."""

from __future__ import annotations

import difflib

from finetune_cli.exit_codes import ExitCode
from finetune_cli.render.explanation import entry_text, overview_text, rule_text, transition_text, word_text
from finetune_job.api.documentation import member_docs
from finetune_job.catalogue.book import ENTRIES, entry_by_id
from finetune_job.catalogue.words import Word, words
from finetune_job.names import Role
from finetune_job.rules.book import RULES, rule_by_id
from finetune_job.rules.cel import TRANSITIONS

NEAR = 3
"""Most suggestions for an unknown word."""


def overview() -> str:
    """All findings, by topic."""
    return overview_text(RULES)


def explain(asked: str) -> str:
    """Text about everything that the word stands for; empty if it stands for nothing.

    asked: the id of a finding, a failure class with or without the role that it is reported of (`train/NonFinite`), an exit code, a
    condition or a reason; in any case, with `-`, `_` or blanks in ids.
    """
    role, slash, rest = asked.strip().partition("/")
    word = rest if slash and role in set(Role) else asked.strip()
    return "\n".join([*_finding_texts(_as_id(word)), *(word_text(each) for each in _words() if _same(each.text, word))])


def nearest(asked: str) -> list[str]:
    """The known words that are most like an unknown one."""
    ids = [*(rule.id for rule in RULES), *(entry.id for entry in ENTRIES), *(each.rule for each in TRANSITIONS)]
    known = {text.casefold(): text for text in [*ids, *(each.text for each in _words())] if not text.isdigit()}
    found = [near for form in (_as_id(asked), asked.strip().casefold()) for near in difflib.get_close_matches(form, known, n=NEAR)]
    return [known[near] for near in dict.fromkeys(found)][:NEAR]


def _finding_texts(identifier: str) -> list[str]:
    rule, entry = rule_by_id(identifier), entry_by_id(identifier)
    return [
        *([rule_text(rule)] if rule is not None else []),
        *([entry_text(entry)] if entry is not None else []),
        *(transition_text(each) for each in TRANSITIONS if each.rule == identifier),
    ]


def _words() -> tuple[Word, ...]:
    meanings = member_docs(ExitCode)
    return (*words(), *(Word(str(code.value), "exit code of finetune", meanings[str(code.value)]) for code in ExitCode))


def _as_id(word: str) -> str:
    return word.strip().lower().replace("_", "-").replace(" ", "-")


def _same(text: str, asked: str) -> bool:
    return text.casefold() == asked.casefold()
