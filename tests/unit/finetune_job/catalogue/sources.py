"""Ids of findings as the sources write them: every text that reaches the first argument of `make_finding`.

A function that passes a parameter on as the id is followed to its callers, and so is a record whose field `rule` holds the id.
What cannot be followed raises AssertionError: write the id so that a reader can follow it, too.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeGuard

ROOT = Path(__file__).parents[4]
SOURCES = (ROOT / "operator", ROOT / "trainer_image")
MAKER = "make_finding"
Function = ast.FunctionDef | ast.AsyncFunctionDef
MADE_BY_HAND = {
    "operator/finetune_job/catalogue/book.py": "make_finding itself",
    "operator/finetune_job/rules/rule.py": "the rule book",
    "operator/finetune_operator/decide/stopped.py": "the end of a role: `finetune explain preflight/UserData` explains the class",
    "operator/finetune_job/finding.py": "shortens the id, too",
}
"""Modules that may build a Finding without the catalogue."""


@dataclass
class Source:
    """One module."""

    path: Path
    tree: ast.Module
    constants: dict[str, list[ast.expr]] = field(default_factory=dict)
    """All values of each name that the module assigns."""
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
    is_class: bool = False


@cache
def collected_ids() -> dict[str, str]:
    """Id -> a place where it is written, in the product."""
    return collect(product())


def collect(modules: dict[str, Source]) -> dict[str, str]:
    """The same of these modules, by dotted name. Raises AssertionError for an id that cannot be followed."""
    sinks = {Sink(MAKER, 0, "identifier")}
    found: dict[str, str] = {}
    done: set[Sink] = set()
    while sinks - done:
        sink = (sinks - done).pop()
        done.add(sink)
        for module in modules.values():
            if sink.path not in (None, module.path):
                continue
            _refuse_hidden_calls(sink, module)
            for call in module.calls.get(sink.name, []):
                for value in _alternatives(_argument(call, sink)):
                    new = _resolve(value, call, module, modules, found)
                    if new is not None:
                        sinks.add(new)
    return found


def findings_made_by_hand(modules: dict[str, Source]) -> list[str]:
    """Places outside MADE_BY_HAND that build a Finding, or give one another id."""
    return [
        f"{module.path}:{node.lineno}"
        for module in modules.values()
        if str(module.path) not in MADE_BY_HAND
        for node in ast.walk(module.tree)
        if _makes_a_finding(node)
    ]


def _makes_a_finding(node: ast.AST) -> TypeGuard[ast.expr]:
    match node:
        case ast.Call(func=ast.Name("Finding") | ast.Attribute(attr="Finding")):
            return True
        case ast.Call(func=ast.Attribute(ast.Name("Finding"), "model_validate"), args=[ast.Dict(), *_]):
            return True
        case ast.Attribute(ast.Name("Finding"), "model_construct"):
            return True
        case ast.keyword("update", ast.Dict(keys)):
            return any(isinstance(key, ast.Constant) and key.value == "rule" for key in keys)
        case ast.alias("Finding", str()):
            return True
    return False


@cache
def product() -> dict[str, Source]:
    """All modules of the product, by dotted name."""
    modules = {}
    for root in SOURCES:
        for path in sorted(root.rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            modules[name] = parsed(path.relative_to(ROOT), path.read_text())
    return modules


def parsed(path: Path, text: str) -> Source:
    """One module."""
    module = Source(path, ast.parse(text))
    for node in ast.walk(module.tree):
        if isinstance(node, Function):
            arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            module.functions.append((node.name, [each.arg for each in arguments if each.arg not in {"self", "cls"}], node))
        elif isinstance(node, ast.ClassDef):
            fields = [
                each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            ]
            module.functions.append((node.name, fields, node))
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            _assign(module, node.targets[0], node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            _assign(module, node.target, node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            module.calls.setdefault(name, []).append(node)
    return module


def _assign(module: Source, target: ast.expr, value: ast.expr) -> None:
    if isinstance(target, ast.Name):
        module.constants.setdefault(target.id, []).append(value)
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, its in zip(target.elts, value.elts, strict=False):
            _assign(module, one, its)


def _refuse_hidden_calls(sink: Sink, module: Source) -> None:
    """A function of findings is called by its own name, and never handed to others."""
    called = {id(call.func) for call in module.calls.get(sink.name, [])}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.alias) and node.name == sink.name:
            assert node.asname is None, f"{module.path}: {sink.name} is imported under another name"
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if name == sink.name and not sink.is_class:
            assert id(node) in called, f"{module.path}:{node.lineno}: {sink.name} is not called here"


def _argument(call: ast.Call, sink: Sink) -> ast.expr:
    named = next((each.value for each in call.keywords if each.arg == sink.parameter), None)
    return named if named is not None else call.args[sink.position]


def _alternatives(value: ast.expr) -> list[ast.expr]:
    return [*_alternatives(value.body), *_alternatives(value.orelse)] if isinstance(value, ast.IfExp) else [value]


def _resolve(value: ast.expr, call: ast.Call, module: Source, modules: dict[str, Source], found: dict[str, str]) -> Sink | None:
    """Note a text in `found`, or say which argument it comes from."""
    place = f"{module.path}:{call.lineno}"
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        found.setdefault(value.value, place)
        return None
    if isinstance(value, ast.Attribute):
        return _field(value.attr, module, modules, place)
    assert isinstance(value, ast.Name), f"{place}: write the id as a text"
    for name, parameters, node in module.functions:
        if value.id in parameters and isinstance(node, Function) and call in ast.walk(node):
            is_local = name.startswith("_") or node not in module.tree.body
            return Sink(name, parameters.index(value.id), value.id, module.path if is_local else None)
    for text in _alternatives(_constant(value.id, module, modules)):
        assert isinstance(text, ast.Constant), f"{place}: {value.id} is not a text"
        found.setdefault(text.value, place)
    return None


def _field(attribute: str, module: Source, modules: dict[str, Source], place: str) -> Sink:
    """The one record of the same folder that has such a field."""
    sinks = [
        Sink(name, fields.index(attribute), attribute, is_class=True)
        for other in modules.values()
        for name, fields, node in other.functions
        if other.path.parent == module.path.parent and isinstance(node, ast.ClassDef) and attribute in fields
    ]
    assert len(sinks) == 1, f"{place}: classes next to it with a field {attribute}: {[sink.name for sink in sinks]}"
    return sinks[0]


def _constant(name: str, module: Source, modules: dict[str, Source]) -> ast.expr:
    values = module.constants.get(name, [])
    if values:
        assert len({ast.unparse(value) for value in values}) == 1, f"{module.path}: {name} has several values"
        return values[0]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and node.module in modules and name in {alias.name for alias in node.names}:
            return _constant(name, modules[node.module], modules)
    raise AssertionError(f"{module.path}: where {name} comes from is not seen")
