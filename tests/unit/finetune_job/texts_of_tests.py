"""The texts in a test, by which rules and findings are known to be what the test is about. Tests are read, not run."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]


@cache
def _definitions(path: str) -> dict[str, ast.stmt]:
    """Functions, classes and constants of a module by name."""
    found: dict[str, ast.stmt] = {}
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return found


def texts_of(test: str) -> set[str]:
    """Texts of `path::test`, and of all that it uses of its module: constants, functions, and fixtures, which are parameters.

    Of a table of cases (tests/support/cases.py), these are the words of its file.
    """
    path, _, name = test.partition("::")
    definitions = _definitions(path)
    assert name in definitions, f"{path} has no {name}"
    texts, waiting, seen = set[str](), [definitions[name]], {name}
    while waiting:
        nodes = list(ast.walk(waiting.pop()))
        texts |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        if any(isinstance(node, ast.Call) and ast.unparse(node).startswith("table(__file__") for node in nodes):
            texts |= set(re.findall(r"[\w-]+", (ROOT / path).with_suffix(".yaml").read_text(encoding="utf-8")))
        used = {node.id if isinstance(node, ast.Name) else node.arg for node in nodes if isinstance(node, ast.Name | ast.arg)}
        waiting += [definitions[other] for other in used - seen if other in definitions]
        seen |= used
    return texts
