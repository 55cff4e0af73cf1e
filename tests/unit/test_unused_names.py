"""Nothing in the product is there for tests alone, or for nobody."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "operator", ROOT / "trainer_image")
KEEPS_A_FUNCTION = {"property", "cached_property", "dataclass", "cache", "staticmethod", "classmethod", "contextmanager"}
"""Decorators that hand a function to nobody."""
CALLED_BY_LIBRARIES = {
    "PartResult.__pydantic_config__": "pydantic",
    "_WordsAreText.versioned_resolver": "ruamel.yaml",
    "_PlainDumper.ignore_aliases": "yaml",
    "FencedConnections._create_connector": "aiohttp",
    "NoStorage.purge": "kopf",
    "NoStorage.touch": "kopf",
    "VerbGroup.format_commands": "typer",
    "_Logger.warning_once": "transformers",
    "ProvenReader.seekable": "io",
    "Reason._missing_": "enum",
    "Chart.x_ticks": "the template of the report",
    **dict.fromkeys(("MergeReport.num_changed_tensors", "MergeReport.num_adapter_tensors"), "dataclasses.asdict"),
}
"""What no module of ours names, and who does."""
READ_BY_TESTS = dict.fromkeys(
    ("batch_job_view", "pod_view"), "releases that are taken over and rolled back, which have them, too"
)


def unused(sources: dict[str, str]) -> Iterator[str]:
    """Names that no source reads. A decorator is a use; a text, a comment, a parameter of that name and an import are none."""
    trees = [ast.parse(text) for text in sources.values()]
    used = {name for tree in trees for node in ast.walk(tree) for name in _uses(node)}
    for tree in trees:
        for owner in (tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))):
            prefix = f"{owner.name}." if isinstance(owner, ast.ClassDef) else ""
            yield from (f"{prefix}{name}" for name in _defined(owner) if name not in used)


def _uses(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()):
            yield name
        case ast.alias(name=name, asname=str()):
            yield name
        case ast.MatchClass(kwd_attrs=names):
            yield from names


def _defined(owner: ast.Module | ast.ClassDef) -> Iterator[str]:
    """Functions, classes, constants, and fields of dataclasses; those of pydantic's models are read as JSON."""
    has_fields = isinstance(owner, ast.Module) or "dataclass" in _decorators(owner)
    for node in owner.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if _decorators(node) <= KEEPS_A_FUNCTION and not node.name.startswith("__"):
                yield node.name
        elif isinstance(node, ast.Assign) and isinstance(owner, ast.Module):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            yield from (name for name in names if name != "__all__")
        elif isinstance(node, ast.AnnAssign) and has_fields and isinstance(node.target, ast.Name):
            yield node.target.id


def _decorators(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> set[str]:
    called = [each.func if isinstance(each, ast.Call) else each for each in node.decorator_list]
    return {each.id if isinstance(each, ast.Name) else ast.unparse(each) for each in called}


def test_every_name_is_used_in_the_product() -> None:
    sources = {str(path): path.read_text() for folder in FOLDERS for path in folder.rglob("*.py")}
    assert set(unused(sources)) == CALLED_BY_LIBRARIES.keys() | READ_BY_TESTS.keys()
