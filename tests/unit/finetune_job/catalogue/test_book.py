"""The catalogue and the sources name the same findings, and each entry has its test."""

from __future__ import annotations

import ast
from enum import Enum
from pathlib import Path

import pytest

from finetune_cli.generate_findings import page
from finetune_job.api.documentation import member_docs
from finetune_job.catalogue.book import ENTRIES, UndeclaredFindingError, entry_by_id, make_finding
from finetune_job.failures import FailureClass
from finetune_job.reasons import AttemptOutcome, ConditionType, Phase, Reason
from finetune_job.rules.book import RULES
from finetune_job.rules.cel import CONDITIONS
from finetune_job.rules.cel.condition import TRANSITIONS, Transition
from finetune_job.rules.rule import Rule
from tests.unit.finetune_job.catalogue.sources import collected_ids, findings_made_by_hand, product

ROOT = Path(__file__).parents[4]
RULE_IDS = {rule.id for rule in RULES}
ENTRY_IDS = {entry.id for entry in ENTRIES}


def test_every_id_in_the_sources_is_declared() -> None:
    undeclared = {identifier: place for identifier, place in collected_ids().items() if identifier not in ENTRY_IDS | RULE_IDS}
    assert undeclared == {}


def test_every_entry_is_made_somewhere() -> None:
    assert ENTRY_IDS - set(collected_ids()) == set()


def test_the_collection_sees_literals_helpers_constants_and_records() -> None:
    """One of each way in which the sources hand an id on."""
    assert set(collected_ids()) >= {
        "claim-too-small",
        "saved-module-unknown",
        "model-file-unusable",
        "chat-marker-split",
        "memory-estimate-exceeds-pod",
        "rehearsal-not-done",
        "invalid-field",
        "trainable-tokens-overlap",
    }


def test_findings_are_made_in_one_way() -> None:
    assert findings_made_by_hand(product()) == []


def test_no_id_means_two_things() -> None:
    ids = [*(rule.id for rule in RULES), *(each.rule for each in TRANSITIONS), *(entry.id for entry in ENTRIES)]
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


@pytest.mark.parametrize("identifier", sorted(ENTRY_IDS))
def test_an_entry_is_whole_and_its_test_expects_it(identifier: str) -> None:
    entry = entry_by_id(identifier)
    assert entry is not None
    assert entry.title
    assert entry.why.endswith(".")
    assert entry.fix
    assert not entry.fix.endswith(".")
    assert bool(entry.reproduction) != bool(entry.not_reproduced)
    if entry.reproduction:
        assert identifier in texts_of(entry.reproduction)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_rule_has_a_reproduction_or_says_why_it_has_none(rule: Rule) -> None:
    """Which tests may be named is up to tests/unit/finetune_job/rules/test_reproductions.py."""
    assert bool(rule.reproduction and rule.reproduction.test) != bool(rule.not_reproduced)


@pytest.mark.parametrize("transition", TRANSITIONS, ids=lambda transition: transition.rule)
def test_a_refused_change_names_the_test_that_makes_it(transition: Transition) -> None:
    assert any(transition.rule in text for text in texts_of(transition.reproduction))


def texts_of(reproduction: str) -> set[str]:
    """Texts in a test, in what it is called with, and in the constants of its module."""
    path, _, test = reproduction.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert test in functions, f"{path} has no {test}"
    others = [node for node in tree.body if not isinstance(node, ast.FunctionDef)]
    nodes = [node for part in (functions[test], *others) for node in ast.walk(part)]
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_the_page_is_generated_from_the_catalogue() -> None:
    assert (ROOT / "docs/reference/findings.md").read_text() == page(), "run: make generate"


@pytest.mark.parametrize("words", [FailureClass, ConditionType, Reason, Phase, AttemptOutcome])
def test_every_word_of_status_has_a_meaning(words: type[Enum]) -> None:
    assert [word.value for word in words if word.value not in member_docs(words)] == []
