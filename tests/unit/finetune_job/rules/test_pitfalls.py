"""The decision table is complete, names only what exists, and its page is up to date."""

import ast
import functools
from pathlib import Path

from finetune_job.rules.book import rule_by_id
from tests.pitfalls.catalogue.entry import COUNT, Avoided, Changed, Entry, Refused, Reproduced, entries
from tests.pitfalls.catalogue.page import page

ROOT = Path(__file__).parents[4]
PREFLIGHT = ROOT / "trainer_image/finetune_trainer"


@functools.cache
def functions(module: str) -> frozenset[str]:
    tree = ast.parse((ROOT / module).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@functools.cache
def preflight_sources() -> str:
    return "".join(path.read_text() for path in sorted(PREFLIGHT.rglob("*.py")))


def named_by(entry: Entry) -> tuple[str, ...]:
    shown = entry.evidence.tests if isinstance(entry.evidence, Reproduced | Changed) else ()
    decided = entry.decision.tests if isinstance(entry.decision, Refused | Avoided) else ()
    return (*shown, *decided)


def test_every_pitfall_stands_in_the_table_once():
    assert [entry.number for entry in entries()] == list(range(1, COUNT + 1))
    assert len({entry.name for entry in entries()}) == COUNT


def test_every_rule_and_finding_exists():
    refused = [entry for entry in entries() if isinstance(entry.decision, Refused)]
    for entry in refused:
        decision = entry.decision
        assert isinstance(decision, Refused)
        assert decision.rules or decision.preflight or decision.schema, entry.name
        assert all(rule_by_id(name) for name in decision.rules), (entry.name, decision.rules)
        assert all(f'"{name}"' in preflight_sources() for name in decision.preflight), (entry.name, decision.preflight)
        assert decision.rules or decision.tests, f"{entry.name}: no test shows the refusal"


def test_every_test_exists():
    for entry in entries():
        for test in named_by(entry):
            module, _, name = test.partition("::")
            assert (ROOT / module).is_file(), (entry.name, module)
            assert name in functions(module), (entry.name, test)


def test_what_is_shown_and_what_is_avoided_name_their_tests():
    for entry in entries():
        assert named_by(entry) or not isinstance(entry.evidence, Reproduced | Changed), entry.name
        if isinstance(entry.decision, Avoided):
            assert entry.decision.tests, entry.name


def test_the_page_is_generated_from_the_entries():
    assert (ROOT / "docs/reference/pitfalls.md").read_text() == page(), "run: make generate"
