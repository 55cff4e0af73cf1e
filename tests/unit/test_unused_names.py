"""Nothing in the product is there for tests alone, or for nobody."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "operator", ROOT / "trainer_image")
CALLED_BY_LIBRARIES = {
    "_WordsAreText.versioned_resolver": "ruamel.yaml",
    "_PlainDumper.ignore_aliases": "yaml",
    "FencedConnections._create_connector": "aiohttp",
    "NoProgress.purge": "kopf",
    "_Logger.warning_once": "transformers",
    "ProvenReader.seekable": "io",
}
"""Methods that no module of ours names."""
READ_BY_TESTS = {
    "RequestLimiter.num_running": "the only look at requests that are under way",
    **dict.fromkeys(("batch_job_view", "pod_view"), "releases that are taken over and rolled back, which have them, too"),
}


def unused(sources: dict[str, str]) -> Iterator[str]:
    """Names that stand in the sources only where they are defined. A decorator is a use."""
    words = Counter(word for text in sources.values() for word in re.findall(r"\w+", text))
    for text in sources.values():
        tree = ast.parse(text)
        for owner in (tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))):
            prefix = f"{owner.name}." if isinstance(owner, ast.ClassDef) else ""
            yield from (f"{prefix}{name}" for name in _defined(owner) if words[name] == 1)


def _defined(owner: ast.Module | ast.ClassDef) -> Iterator[str]:
    for node in owner.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            decorators = {each.id if isinstance(each, ast.Name) else "" for each in node.decorator_list}
            if decorators <= {"property", "cached_property", "dataclass"} and not node.name.startswith("__"):
                yield node.name
        elif isinstance(node, ast.Assign) and isinstance(owner, ast.Module):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def test_every_name_is_used_in_the_product() -> None:
    sources = {str(path): path.read_text() for folder in FOLDERS for path in folder.rglob("*.py")}
    assert set(unused(sources)) == CALLED_BY_LIBRARIES.keys() | READ_BY_TESTS.keys()


def test_an_unused_name_would_be_seen() -> None:
    functions = "LIMIT = 1\n@route\ndef shown(): ...\ndef hidden(): ...\n"
    methods = "class Queue:\n    @property\n    def size(self): ...\n    def add(self): ...\nQueue().add()"
    assert list(unused({"queue.py": functions + methods})) == ["LIMIT", "hidden", "Queue.size"]
