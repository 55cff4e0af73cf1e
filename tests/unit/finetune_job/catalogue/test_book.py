"""The catalogue and the sources name the same findings, and each entry has its test."""

import ast
import re
from enum import Enum
from pathlib import Path

import pytest

from finetune_job.api.documentation import member_docs
from finetune_job.catalogue.book import UndeclaredFindingError, entries, make_finding
from finetune_job.failures import FailureClass
from finetune_job.reasons import AttemptOutcome, ConditionType, Phase, Reason
from finetune_job.rules.book import RULES
from finetune_job.rules.cel import CONDITIONS
from finetune_job.rules.cel.condition import TRANSITIONS, Transition
from tests.unit.finetune_job.texts_of_tests import texts_of
from tools.pages.findings import page

ROOT = Path(__file__).parents[4]
OTHER_WORDS = {
    *("utf-8", "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-validations"),
    *("x-kubernetes-preserve-unknown-fields", "weights-and-biases", "finetune-operator", "model-card", "output-directory"),
    *("quiet-model", "exact-alone", "base-with-added-tokens", "base-form", "max-shard-size"),
}
"""Words with dashes, in modules that speak of findings, that are no ids."""


def words_with_dashes(source: str) -> set[str]:
    texts = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text for text in texts if re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", text)}


IDS = {
    path: words_with_dashes(path.read_text())
    for root in ("operator", "trainer_image")
    for path in (ROOT / root).rglob("*.py")
    if "finding" in path.read_text().lower()
}
"""Ids of findings as the modules of the product write them, and OTHER_WORDS."""
RULE_IDS = {rule.id for rule in RULES}
ENTRY_IDS = set(entries())


def test_every_id_in_the_sources_is_declared() -> None:
    undeclared = {(text, str(path)) for path, texts in IDS.items() for text in texts - ENTRY_IDS - RULE_IDS - OTHER_WORDS}
    assert undeclared == set()


def test_every_entry_is_made_somewhere() -> None:
    assert ENTRY_IDS - set().union(*IDS.values()) == set()


def test_findings_are_made_by_the_catalogue_and_the_rule_book() -> None:
    makers = {
        str(path.relative_to(ROOT)) for path in IDS if re.search(r"\bFinding\(", path.read_text().split("class Finding(")[-1])
    }
    assert makers == {
        "operator/finetune_job/catalogue/book.py",
        "operator/finetune_job/rules/book.py",
        # The end of a role, as `finetune explain preflight/UserData` says.
        "operator/finetune_operator/decide/stages/stopped.py",
    }


def test_no_id_means_two_things() -> None:
    ids = [*(rule.id for rule in RULES), *(each.rule for each in TRANSITIONS), *entries()]
    assert sorted(ids) == sorted(set(ids))
    assert {condition.rule for condition in CONDITIONS} <= set(ids)


def test_an_undeclared_finding_cannot_be_made() -> None:
    said = {"field": "spec.model.source", "value": "x", "message": "m", "fix": "f"}
    with pytest.raises(UndeclaredFindingError, match="no-such-finding"):
        make_finding("no-such-finding", **said)
    with pytest.raises(UndeclaredFindingError, match="severity"):
        make_finding("data-empty", **said, severity="warning")
    with pytest.raises(UndeclaredFindingError, match="severity"):
        make_finding("trained-token-unread", **said)


def test_severity_comes_from_the_catalogue_and_changes_become_fields() -> None:
    said = {"field": "spec.model.source", "value": "x", "message": "m", "fix": "f"}
    assert make_finding("data-empty", **said).severity == "error"
    assert make_finding("data-records-dropped", **said).severity == "warning"
    assert make_finding("trained-token-unread", **said, severity="warning").severity == "warning"
    assert make_finding("qlora-storage-not-param-dtype", **said).severity == "error"
    changed = make_finding("packing-leaks", **said, changes={"spec.data.packing": False})
    assert [(change.field, change.value) for change in changed.changes] == [("spec.data.packing", False)]
    assert changed.is_proposal is None
    assert make_finding("packing-leaks", **said, is_proposal=True).is_proposal is True


@pytest.mark.parametrize("identifier", sorted(ENTRY_IDS))
def test_an_entry_is_whole_and_its_test_expects_it(identifier: str) -> None:
    entry = entries()[identifier]
    assert entry.why.endswith(".")
    assert entry.fix
    assert not entry.fix.endswith(".")
    if entry.reproduction:
        assert identifier in texts_of(entry.reproduction)


@pytest.mark.parametrize("transition", TRANSITIONS, ids=lambda transition: transition.rule)
def test_a_refused_change_names_the_test_that_makes_it(transition: Transition) -> None:
    assert any(transition.rule in text for text in texts_of(transition.reproduction))


def test_the_page_is_generated_from_the_catalogue() -> None:
    assert (ROOT / "docs/reference/findings.md").read_text() == page(), "run: make generate"


@pytest.mark.parametrize("words", [FailureClass, ConditionType, Reason, Phase, AttemptOutcome])
def test_every_word_of_status_has_a_meaning(words: type[Enum]) -> None:
    assert [word.value for word in words if word.value not in member_docs(words)] == []
