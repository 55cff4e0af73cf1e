"""docs/explanation/architecture.md, docs/reference/layers.md and docs/explanation/security.md say what is there."""

import ast
import re
import tomllib
from pathlib import Path

from tools import layers_page

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
QUESTIONS = 21
NAME = re.compile(r"`((?:finetune_\w+|tests)/[\w/]+(?:\.py)?)(?:::(\w+))?`")


def found(path: str) -> Path | None:
    places = [source / path for source in (ROOT / "operator", ROOT / "trainer_image", ROOT)]
    return next((place for place in places if place.exists()), None)


def top_level_names(module: Path) -> set[str]:
    names = set()
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def test_every_module_and_name_on_the_page_exists() -> None:
    mentioned = NAME.findall(PAGE)
    assert len(mentioned) > 60
    missing = [path for path, _ in mentioned if found(path) is None]
    assert missing == []
    unknown = [f"{path}::{name}" for path, name in mentioned if name and name not in top_level_names(found(path) or ROOT)]
    assert unknown == []


def test_each_question_is_answered_by_a_module() -> None:
    section = PAGE.split("## Questions")[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.endswith("|") and "?" in line.split("|")[1]]
    assert len(rows) == QUESTIONS
    assert [question for question, answer in rows if not NAME.search(answer)] == []


def test_the_picture_of_the_layers_is_that_of_the_contracts() -> None:
    assert (ROOT / "docs" / "reference" / "layers.md").read_text() == layers_page.page(), "run `make generate`"


def test_every_package_has_a_law_for_each_of_its_modules() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    laws = [contract for contract in contracts if contract["type"] == "layers" and contract.get("exhaustive")]
    packages = [path.parent.name for folder in ("operator", "trainer_image") for path in (ROOT / folder).glob("*/__init__.py")]
    assert len(packages) == 5
    assert sorted(container for law in laws for container in law["containers"]) == sorted(packages)


def test_every_threat_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "explanation" / "security.md").read_text()
    rows = [line for line in page.split("## Threats")[1].split("\n## ")[0].splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    assert [row for row in rows if not NAME.search(row.split("|")[-2])] == []
    unknown = [
        f"{path}::{name}" for path, name in NAME.findall(page) if name and name not in top_level_names(found(path) or ROOT)
    ]
    assert unknown == []
    assert [path for path, _ in NAME.findall(page) if found(path) is None] == []
