"""The tests mirror the product: a module's test is found by its name.

`finetune_trainer/merge/plan.py` is tested by `tests/unit/finetune_trainer/merge/test_plan.py`, and by `test_plan_<aspect>.py` if
one file is not enough. test_layout.yaml names the test of each module that has none by its name.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from tests.support.cases import table

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "tests/unit"
FOLDERS = (ROOT / "operator", ROOT / "trainer_image")
PACKAGES = ("finetune_job", "finetune_memory", "finetune_operator", "finetune_cli", "finetune_trainer")
SMALL_LINES = 60
"""Modules up to this long are tested by those that use them."""

COVERED_BY: dict[str, str] = table(__file__, "COVERED_BY")


@cache
def modules() -> dict[str, Path]:
    """The product's modules by their path under operator/ or trainer_image/."""
    return {
        str(path.relative_to(folder)): path
        for folder in FOLDERS
        for package in PACKAGES
        for path in sorted((folder / package).rglob("*.py"))
    }


def is_large(path: Path) -> bool:
    return path.name != "__init__.py" and len(path.read_text(encoding="utf-8").splitlines()) > SMALL_LINES


def has_a_test_by_name(module: str) -> bool:
    folder, stem = (UNIT / module).parent, Path(module).stem.strip("_")
    return (folder / f"test_{stem}.py").exists() or any(folder.glob(f"test_{stem}_*.py"))


def large_modules_without_a_test_by_name() -> list[str]:
    return [module for module, path in modules().items() if is_large(path) and not has_a_test_by_name(module)]


def entry_of(module: str) -> str:
    return next((pattern for pattern in COVERED_BY if fnmatch(module, pattern)), "")


def test_every_large_module_has_a_test():
    assert [module for module in large_modules_without_a_test_by_name() if not entry_of(module)] == []


def test_every_entry_is_needed():
    needed = {entry_of(module) for module in large_modules_without_a_test_by_name()}
    assert sorted(set(COVERED_BY) - needed) == [], "these modules have a test by their name, are small, or do not exist"


@cache
def imported(path: Path) -> frozenset[Path]:
    """Modules of the product and the tests that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    files = [f"{name.replace('.', '/')}{ending}" for name in found for ending in (".py", "/__init__.py")]
    return frozenset(folder / file for file in files for folder in (*FOLDERS, ROOT) if (folder / file).is_file())


def reached(test: Path) -> set[Path]:
    """What a test imports, and what that imports."""
    found, waiting = set[Path](), [test]
    while waiting:
        new = imported(waiting.pop()) - found
        found |= new
        waiting += new
    return found


def test_a_covering_test_reaches_its_modules():
    missed = {}
    for module in large_modules_without_a_test_by_name():
        test = UNIT / COVERED_BY[entry_of(module)]
        if not test.is_file() or modules()[module] not in reached(test):
            missed[module] = COVERED_BY[entry_of(module)]
    assert missed == {}


def test_no_two_classes_have_the_same_name():
    places = defaultdict(list)
    for module, path in modules().items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
