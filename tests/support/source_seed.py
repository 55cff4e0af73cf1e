"""Random cases that are the same for the same tree, and others after each change of the product."""

import hashlib
from argparse import ArgumentParser
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_SOURCES = ("operator/finetune_job", "trainer_image/finetune_trainer", "tests/sweep")
_SEEDED_BY = ("operator", "trainer_image")


def sources_digest(directories: Iterable[str] = _SOURCES) -> str:
    """SHA-256 over the Python sources that decide what a case comes to."""
    digest = hashlib.sha256()
    for directory in directories:
        for path in sorted((ROOT / directory).rglob("*.py")):
            digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def seed_of_the_sources() -> int:
    """Each change of the product draws its own random cases, and the same tree the same ones."""
    return int(sources_digest(_SEEDED_BY)[:8], 16)


def add_seed(parser: ArgumentParser) -> None:
    """`--seed`, which the sources decide unless it is given."""
    parser.add_argument("--seed", type=int, default=seed_of_the_sources(), help="unset: drawn by a digest of the sources")
