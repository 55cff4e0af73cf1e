"""`python -m tools.prose PACKAGE`: list the docstrings of a package that are no sentences or contain avoided words.

The string below an assignment also counts as a docstring. A docstring is faulty if it begins like a part of a sentence ("Of the
embeddings.", "Those that train.") and has no main clause, which is guessed from its commas and verbs. budget.toml limits the
faults of each package, and tools/budget.py checks that.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = {
    "finetune_job": "operator/finetune_job",
    "finetune_memory": "operator/finetune_memory",
    "finetune_operator": "operator/finetune_operator",
    "finetune_cli": "operator/finetune_cli",
    "finetune_trainer": "trainer_image/finetune_trainer",
}
"""The directory of each package of the product."""
CONDITIONS = ("If", "Until")
"""Words that begin a clause; the main clause follows its comma: "If the run ends, its pods stay."."""
PHRASES = ("As", "At", "Beyond", "By", "For", "From", "In", "Of", "On", "So", "To", "With", "Without")
"""Words that begin a phrase; a verb must follow its comma: "In a gang, all ranks are equal."."""
CLAUSES = ("That", "The same", "Those", "What", "Which", "Who")
"""Words that begin a subject clause, so that the sentence needs two verbs: "What is left is removed."."""
VERBS = (
    *("am", "are", "can", "cannot", "did", "do", "does", "had", "has", "have", "is", "may", "must", "need", "needs"),
    *("should", "was", "were", "will", "would"),
)
"""Verbs by which a main clause is recognised. Other verbs cannot be distinguished from nouns without a grammar."""
AVOIDED = ("anew", "nobody", "tell", "tells", "told", "wherein", "wish", "wishes")
"""Words that plain English replaces, for example by "report", "no user", "again" or "setting"."""
_FIRST_SENTENCE = re.compile(r"\A(.*?)(?:[.:;](?:\s|\Z)|\Z)", re.DOTALL)
_IS_CONDITION = re.compile(rf"(?:{'|'.join(CONDITIONS)})\b")
_IS_PHRASE = re.compile(rf"(?:{'|'.join(PHRASES)})\b")
_IS_CLAUSE = re.compile(rf"(?:{'|'.join(CLAUSES)})\b")
_VERB = re.compile(rf"\b(?:{'|'.join(VERBS)})\b")
_AVOIDED = re.compile(rf"\b(?:{'|'.join(AVOIDED)})\b", re.IGNORECASE)


@dataclass(frozen=True)
class Fault:
    """A fault of a docstring, and its place."""

    path: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.reason}"


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string that is a statement of its own."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def fault_of(text: str) -> str:
    """Return what is wrong with a docstring, or an empty text."""
    sentence = _FIRST_SENTENCE.match(text)
    assert sentence is not None
    first = sentence[1]
    if _IS_CONDITION.match(first):
        is_sentence = "," in first
    elif _IS_PHRASE.match(first):
        is_sentence = _VERB.search(first.partition(",")[2]) is not None
    elif _IS_CLAUSE.match(first):
        is_sentence = len(_VERB.findall(first)) > 1
    else:
        is_sentence = True
    if not is_sentence:
        return f"is no sentence: {' '.join(first.split())!r}"
    avoided = _AVOIDED.search(text)
    return "" if avoided is None else f"says {avoided[0]!r}: {' '.join(first.split())!r}"


def faults(package: str) -> list[Fault]:
    """List the faults of a package's docstrings, one for each docstring."""
    return [
        Fault(path, line, reason)
        for path in sorted((ROOT / PRODUCT[package]).rglob("*.py"))
        for line, text in docstrings(path.read_text(encoding="utf-8"))
        if (reason := fault_of(text))
    ]


def counted() -> dict[str, int]:
    """Count the faults of each package of the product."""
    return {package: len(faults(package)) for package in PRODUCT}


def main(packages: Sequence[str]) -> int:
    """Print the faults of the named packages, or of all. Returns the exit code 0."""
    for package in packages or PRODUCT:
        for fault in faults(package):
            print(fault)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
