"""Executes the commands of documentation pages as a reader would, and keeps what was executed.

A test runs a page's `sh` blocks in their order by a `Reader`, or asks for a single command by `as_written`, which must be a whole
line of a block or a whole command within a sentence. Both note what was taken from the page, and what stood in for words of it;
tests/support/documented_by.yaml names the test of every command, and a test fails if it has not executed its commands
(tests/conftest.py).
"""

import functools
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tools.cluster.access import ClusterAccess

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(path for name in ("docs", "charts", "examples", "bench", "tests") for path in (ROOT / name).rglob("*.md")),
    ]
)
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)((?:    [^\s*].*\n)+)(?=\n|\Z)")
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_BLOCK_SECONDS = 300.0
MAKE = '#!/bin/sh\nexec /usr/bin/make -o environment "$@"\n'
"""`make` where the environment that runs a test is taken as it is."""


@dataclass(frozen=True)
class Block:
    """A block of code of a page."""

    language: str
    text: str
    line: int
    """Line of the page at which the text begins."""
    page: str = ""
    """Path of the page in the checkout."""

    @property
    def commands(self) -> list[str]:
        """Its lines, continued ones joined, without what is said of them."""
        joined = re.sub(r" *\\\n *", " ", self.text)
        return [command for line in joined.splitlines() if (command := re.sub(r"\s+#\s.*", "", line).strip())]

    @property
    def key(self) -> str:
        """Key of a block that is executed as a whole; with the first name in a block that is given to a command."""
        first, name = self.commands[0], re.search(r"name: ([\w-]+)", self.text)
        is_named = first.endswith("EOF'") or first.startswith("apiVersion")
        return f"{self.page}: {first}" + (f" {name[1]}" if name is not None and is_named else "")


def blocks_of(page: Path, language: str | None = "sh", section: str = "") -> list[Block]:
    """The page's blocks in that language, or in any, of all or of one section (`## NAME`)."""
    text = page.read_text()
    if section:
        before, after = text.split(f"\n## {section}\n")
        text = re.sub(r"[^\n]", "", before) + "\n\n" + after.partition("\n## ")[0]
    place = str(page.relative_to(ROOT))
    found = [
        Block(match[2], re.sub(f"^{match[1]}", "", match[3], flags=re.MULTILINE), text.count("\n", 0, match.start(3)) + 1, place)
        for match in _BLOCK.finditer(text)
    ]
    return [block for block in found if language in (None, block.language)]


def indented_blocks_of(page: Path) -> list[Block]:
    """Blocks of code without a fence: four spaces."""
    text, place = _without_fences(page), str(page.relative_to(ROOT))
    return [
        Block("", re.sub(r"^    ", "", match[1], flags=re.MULTILINE), text.count("\n", 0, match.start()) + 1, place)
        for match in _INDENTED.finditer(text)
    ]


def spans_of(page: Path) -> list[str]:
    """Return the code within sentences and tables, one line each."""
    return [" ".join(match[1].split()) for match in _SPAN.finditer(_without_fences(page))]


def _without_fences(page: Path) -> str:
    return _BLOCK.sub("", page.read_text())


@dataclass(frozen=True)
class Executed:
    """A block or a command that a test has taken from the pages."""

    key: str
    stand_ins: frozenset[str]
    """Words of the page in whose place others stood."""
    played: frozenset[str]
    """Programs in whose place others stood."""


_executed: dict[str, set[Executed]] = defaultdict(set)
"""Executed blocks by the module of the test that runs."""


def executed_by(module: str) -> set[Executed]:
    """Return what tests of a module have executed in this process."""
    return _executed[module]


@functools.cache
def _taken_from_pages() -> frozenset[str]:
    blocks = [block for page in PAGES for block in [*blocks_of(page, None), *indented_blocks_of(page)]]
    return frozenset([block.text for block in blocks]) | frozenset(
        [*(line for block in blocks for line in block.commands), *(span for page in PAGES for span in spans_of(page))]
    )


def as_written(command: str | Block, stand_ins: Mapping[str, str] | None = None, played: Iterable[str] = ()) -> str:
    """A command or a whole block of the pages, which the test executes next, with others in the place of some words.

    Raises:
        AssertionError: no page has the command, or it has not these words.
    """
    given = stand_ins or {}
    text = command if isinstance(command, str) else command.text
    assert text in _taken_from_pages(), f"no page has the command: {text}"
    assert [word for word in given if word not in text] == [], f"{text} has other words"
    module = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
    taken = {command: command} if isinstance(command, str) else {command.key: text, **{line: line for line in command.commands}}
    for key, part in taken.items():
        used = frozenset(program for program in played if re.search(rf"(?<![\w/-]){program} ", part))
        _executed[module].add(Executed(key, frozenset(word for word in given if word in part), used))
    for word, other in given.items():
        text = text.replace(word, other)
    return text


def doctor_roles(namespace: str) -> list[dict[str, Any]]:
    """The ClusterRole and the Role that `finetune doctor` needs by the page on installation, in that order."""
    page = ROOT / "docs" / "how-to" / "platform" / "install.md"
    (block,) = [block for block in blocks_of(page, "yaml") if "name: finetune-doctor" in block.text]
    cluster_role, role = yaml.safe_load_all(block.text)
    role["metadata"]["namespace"] = namespace
    return [cluster_role, role]


def path_with(directory: Path, programs: Mapping[str, str]) -> str:
    """Make scripts of these names and texts in a new directory; a PATH on which they come first."""
    directory.mkdir()
    for name, text in programs.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    return f"{directory}:{os.environ['PATH']}"


def cluster_programs(cluster: ClusterAccess) -> dict[str, str]:
    """Scripts `kubectl` and `helm` for a cluster, by their names."""
    commands = {"kubectl": cluster.kubectl_command, "helm": cluster.helm_command}
    return {name: f'#!/bin/sh\nexec {command} "$@"\n' for name, command in commands.items()}


class DocumentedCommandError(AssertionError):
    """A documented command failed; the message has its page, line and output."""


@dataclass(frozen=True)
class Reader:
    """Somebody who has `kubectl` and `helm` and follows pages from the top of a checkout."""

    checkout: Path
    environment: Mapping[str, str]
    patience_seconds: float = _BLOCK_SECONDS
    """Time limit of one block."""
    played: tuple[str, ...] = ()
    """Programs in whose place others are on PATH."""

    def run(self, page: Path, block: Block | str, stand_ins: Mapping[str, str] | None = None) -> str:
        """Run one block, which stops at its first failing command, or one command of the page; what it printed.

        Args:
            stand_ins: By words of the page, what stands in their place.

        Raises:
            DocumentedCommandError: a command failed.
        """
        text = as_written(block, stand_ins, self.played)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.checkout,
            env=dict(self.environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=self.patience_seconds,
            check=False,
        )
        if done.returncode != 0:
            place = f"{page.relative_to(ROOT)}:{block.line if isinstance(block, Block) else ''}"
            raise DocumentedCommandError(f"{place}: exit code {done.returncode}\n{text}\n{done.stdout}{done.stderr}")
        return done.stdout
