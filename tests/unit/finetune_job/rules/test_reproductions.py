"""A rule counts as reproduced only by tests that say so themselves: by the mark `reproduces` of tests/pitfalls/conftest.py.

The tests are read, not run: `make test` runs them as a suite of their own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from finetune_job.rules.book import RULES

ROOT = Path(__file__).parents[4]
PITFALLS = Path("tests/pitfalls")


@dataclass(frozen=True)
class MarkedTest:
    """A test that shows what rules are about."""

    name: str
    """`path::test_name`."""
    rules: tuple[str, ...]
    mentioned: frozenset[str]
    """Texts in the test, and in what it uses of its module, the mark left out."""


def marked_tests(path: Path, source: str) -> list[MarkedTest]:
    """Those of a module."""
    module = ast.parse(source)
    names = _defined(module)
    found = []
    for node in module.body:
        mark = _mark(node) if isinstance(node, ast.FunctionDef) else None
        if isinstance(node, ast.FunctionDef) and mark is not None:
            rules = tuple(_texts(mark)) or tuple(_rules_of_the_table(node))
            node.decorator_list.remove(mark)
            found.append(MarkedTest(f"{path}::{node.name}", rules, frozenset(_reached(node, names))))
    return found


def _defined(module: ast.Module) -> dict[str, ast.stmt]:
    """Functions, classes and constants by name."""
    found: dict[str, ast.stmt] = {}
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return found


def _mark(test: ast.FunctionDef) -> ast.expr | None:
    for decorator in test.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if ast.unparse(called) == "pytest.mark.reproduces":
            return decorator
    return None


def _texts(node: ast.AST) -> Iterator[str]:
    return (each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str))


def _rules_of_the_table(test: ast.FunctionDef) -> Iterator[str]:
    """What the parameter `rule` is in each row, in the order of the table."""
    rows = []
    for decorator in test.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.parametrize":
            parameters = list(_texts(decorator.args[0]))
            if "rule" in parameters and isinstance(decorator.args[1], ast.List):
                rows += [ast.literal_eval(row.elts[parameters.index("rule")]) for row in decorator.args[1].elts]  # type: ignore[attr-defined]
    return iter(dict.fromkeys(rows))


def _reached(test: ast.stmt, names: dict[str, ast.stmt]) -> set[str]:
    """Texts of the test and of all that it uses: constants, functions, and fixtures, which are parameters."""
    texts, waiting, seen = set[str](), [test], set[str]()
    while waiting:
        node = waiting.pop()
        texts |= set(_texts(node))
        used = {
            each.id if isinstance(each, ast.Name) else each.arg for each in ast.walk(node) if isinstance(each, ast.Name | ast.arg)
        }
        waiting += [names[name] for name in used - seen if name in names]
        seen |= used
    return texts


MARKED = [
    test
    for path in sorted((ROOT / PITFALLS).glob("test_*.py"))
    for test in marked_tests(path.relative_to(ROOT), path.read_text(encoding="utf-8"))
]
REPRODUCED = {rule.id: set(rule.reproduction.test.split()) for rule in RULES if rule.reproduction is not None}


@pytest.mark.parametrize("rule", REPRODUCED)
def test_a_rule_names_exactly_the_tests_that_are_marked_with_it(rule: str):
    assert REPRODUCED[rule] == {test.name for test in MARKED if rule in test.rules}


@pytest.mark.parametrize("test", MARKED, ids=lambda test: test.name.removeprefix(f"{PITFALLS}/"))
def test_a_marked_test_is_about_rules_of_the_book(test: MarkedTest):
    assert test.rules, "the mark names no rule, and no table of the test does"
    assert set(test.rules) <= set(REPRODUCED)
    assert set(test.rules) <= test.mentioned, "the test does not look at what these rules say"


def test_what_is_observed_is_written_down():
    assert [rule.id for rule in RULES if rule.reproduction is not None and not rule.reproduction.observed] == []


def test_a_mark_is_read_with_what_its_test_uses():
    source = """
RULE = "one-rule"
OTHER = "another-rule"

@pytest.fixture
def spoken_of():
    return plans("third-rule")

@pytest.mark.reproduces("one-rule", "fourth-rule")
def test_one(spoken_of):
    assert RULE in spoken_of

def test_not_marked():
    assert OTHER
"""
    (found,) = marked_tests(Path("tests/pitfalls/test_x.py"), source)
    assert found == MarkedTest(
        "tests/pitfalls/test_x.py::test_one", ("one-rule", "fourth-rule"), frozenset({"one-rule", "third-rule"})
    )


def test_a_mark_without_names_stands_for_the_rules_of_the_table():
    source = """
@pytest.mark.reproduces
@pytest.mark.parametrize(("setting", "rule"), [("a", "one-rule"), ("b", "another-rule"), ("c", "one-rule")])
def test_one(setting, rule):
    assert plans(rule, setting)
"""
    (found,) = marked_tests(Path("tests/pitfalls/test_x.py"), source)
    assert found.rules == ("one-rule", "another-rule")
