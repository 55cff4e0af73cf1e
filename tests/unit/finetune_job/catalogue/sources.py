"""Ids of findings as the sources write them: every text that reaches the first argument of `make_finding`.

A function that passes a parameter on as the id is followed to its callers, and so is a record whose field `rule` holds the id.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[4]
SOURCES = (ROOT / "operator", ROOT / "trainer_image")
MAKER = "make_finding"


@dataclass
class Source:
    """One module."""

    path: Path
    tree: ast.Module
    constants: dict[str, ast.expr] = field(default_factory=dict)
    """Names that the module assigns, or imports from another."""
    functions: list[tuple[str, list[str], ast.AST]] = field(default_factory=list)
    """Name, parameters and node of each function; of a class its fields."""
    calls: dict[str, list[ast.Call]] = field(default_factory=dict)
    """By the last part of the name that is called."""


@dataclass(frozen=True)
class Sink:
    """An argument that becomes the id of a finding. path: empty for names that every module may call."""

    name: str
    position: int
    parameter: str
    path: Path | None = None


@cache
def collected_ids() -> dict[str, str]:
    """Id -> a place where it is written. Raises AssertionError for an id that cannot be followed."""
    modules = _modules()
    sinks = {Sink(MAKER, 0, "identifier")}
    found: dict[str, str] = {}
    done: set[Sink] = set()
    while sinks - done:
        sink = (sinks - done).pop()
        done.add(sink)
        for module in modules.values():
            if sink.path not in (None, module.path):
                continue
            for call in module.calls.get(sink.name, []):
                for value in _alternatives(_argument(call, sink)):
                    new = _resolve(value, call, module, modules, found)
                    if new is not None:
                        sinks.add(new)
    return found


def finding_calls() -> list[str]:
    """Places that build a Finding by hand, but for `make_finding`, the rule book, and the end of a role.

    The id of the last is the role and a failure class: `finetune explain preflight/UserData` explains the class.
    """
    operator = ROOT / "operator"
    allowed = {
        operator / "finetune_job/catalogue/book.py",
        operator / "finetune_job/rules/rule.py",
        operator / "finetune_operator/decide/stopped.py",
    }
    return [
        f"{module.path.relative_to(ROOT)}:{call.lineno}"
        for module in _modules().values()
        if module.path not in allowed
        for call in module.calls.get("Finding", [])
    ]


@cache
def _modules() -> dict[str, Source]:
    modules = {}
    for root in SOURCES:
        for path in sorted(root.rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            modules[name] = _module(path)
    return modules


def _module(path: Path) -> Source:
    module = Source(path, ast.parse(path.read_text()))
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef):
            module.functions.append((node.name, [each.arg for each in (*node.args.posonlyargs, *node.args.args)], node))
        elif isinstance(node, ast.ClassDef):
            fields = [
                each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            ]
            module.functions.append((node.name, fields, node))
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            _assign(module, node.targets[0], node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            module.calls.setdefault(name, []).append(node)
    return module


def _assign(module: Source, target: ast.expr, value: ast.expr) -> None:
    if isinstance(target, ast.Name):
        module.constants.setdefault(target.id, value)
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, its in zip(target.elts, value.elts, strict=False):
            _assign(module, one, its)


def _argument(call: ast.Call, sink: Sink) -> ast.expr:
    named = next((each.value for each in call.keywords if each.arg == sink.parameter), None)
    return named if named is not None else call.args[sink.position]


def _alternatives(value: ast.expr) -> list[ast.expr]:
    return [*_alternatives(value.body), *_alternatives(value.orelse)] if isinstance(value, ast.IfExp) else [value]


def _resolve(value: ast.expr, call: ast.Call, module: Source, modules: dict[str, Source], found: dict[str, str]) -> Sink | None:
    """Note a text in `found`, or say which argument it comes from."""
    place = f"{module.path.relative_to(ROOT)}:{call.lineno}"
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        found.setdefault(value.value, place)
        return None
    if isinstance(value, ast.Attribute):
        return _field(value.attr, module, modules, place)
    assert isinstance(value, ast.Name), f"{place}: write the id as a text"
    for name, parameters, node in module.functions:
        if value.id in parameters and isinstance(node, ast.FunctionDef) and call in ast.walk(node):
            is_local = name.startswith("_") or node not in module.tree.body
            return Sink(name, parameters.index(value.id), value.id, module.path if is_local else None)
    for text in _alternatives(_constant(value.id, module, modules)):
        assert isinstance(text, ast.Constant), f"{place}: {value.id} is not a text"
        found.setdefault(text.value, place)
    return None


def _field(attribute: str, module: Source, modules: dict[str, Source], place: str) -> Sink:
    """The record of the same folder that has such a field."""
    for other in modules.values():
        for name, fields, node in other.functions:
            if other.path.parent == module.path.parent and isinstance(node, ast.ClassDef) and attribute in fields:
                return Sink(name, fields.index(attribute), attribute)
    raise AssertionError(f"{place}: nothing next to it has a field {attribute}")


def _constant(name: str, module: Source, modules: dict[str, Source]) -> ast.expr:
    if name in module.constants:
        return module.constants[name]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and node.module in modules and name in {alias.name for alias in node.names}:
            return _constant(name, modules[node.module], modules)
    raise AssertionError(f"{module.path}: where {name} comes from is not seen")
