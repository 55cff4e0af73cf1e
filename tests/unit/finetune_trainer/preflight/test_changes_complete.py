"""Each finding of preflight has changes that a test applies, or a reason why no program can fix it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from finetune_job.catalogue.book import Gate, entries
from tests.support.cases import table
from tests.unit.finetune_job.texts_of_tests import texts_of

ROOT = Path(__file__).parents[4]
_CASES = Path(__file__).with_name("test_changes_clear_their_finding.py")
TESTS = {identifier: test for test, ids in table(__file__, "APPLIED").items() for identifier in ids}
APPLIED = {*TESTS, *(case[0] for case in table(str(_CASES), "CASES"))}
WITHOUT = {identifier for ids in table(__file__, "WITHOUT").values() for identifier in ids}
RULES_TOO = {
    "added-tokens-untrained",
    "qlora-storage-not-param-dtype",
    "target-parameters-all-layers",
    "trainable-tokens-overlap",
}
"""Ids of the rule book that preflight uses with changes of its own."""


def test_every_finding_of_preflight_is_applied_or_has_a_reason() -> None:
    ids = {entry.id for entry in entries().values() if entry.gate in (Gate.PREFLIGHT, Gate.REHEARSAL)}
    assert ids | RULES_TOO == APPLIED | WITHOUT
    assert APPLIED.isdisjoint(WITHOUT)


def test_what_the_sources_give_changes_is_applied() -> None:
    """An id next to `changes` in one call; helpers that are handed both are in the list above."""
    written = _ids_with_changes()
    assert {"packing-leaks", "target-module-not-adapted", "attention-not-supported"} <= written
    assert written <= APPLIED


def _ids_with_changes() -> set[str]:
    found = set()
    for path in [*(ROOT / "trainer_image").rglob("*.py"), *(ROOT / "operator/finetune_memory").rglob("*.py")]:
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or not call.args or not any(each.arg == "changes" for each in call.keywords):
                continue
            first = call.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                found.add(first.value)
    return found


@pytest.mark.parametrize("identifier", sorted(TESTS))
def test_the_test_that_applies_changes_exists_and_names_the_finding(identifier: str) -> None:
    texts = texts_of(TESTS[identifier])
    assert identifier in texts or _CASES.name not in TESTS[identifier]
