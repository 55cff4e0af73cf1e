"""Executes the commands of a documentation page as a reader would: its `sh` blocks, in their order, in one shell."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_BLOCK_SECONDS = 300.0


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str
    line: int
    """Of the page, of the first line of the text."""


def blocks_of(page: Path, language: str = "sh", section: str = "") -> list[Block]:
    """The page's blocks in that language, of all or of one section (`## NAME`)."""
    text = page.read_text()
    if section:
        before, after = text.split(f"\n## {section}\n")
        text = re.sub(r"[^\n]", "", before) + "\n\n" + after.partition("\n## ")[0]
    found = [Block(match[1], match[2], text.count("\n", 0, match.start(2)) + 1) for match in _BLOCK.finditer(text)]
    return [block for block in found if block.language == language]


class DocumentedCommandError(AssertionError):
    """A documented command failed; the message has its page, line and output."""


@dataclass(frozen=True)
class Reader:
    """Somebody who has `kubectl` and `helm` and follows pages from the top of a checkout."""

    checkout: Path
    environment: Mapping[str, str]

    def run(self, page: Path, block: Block) -> str:
        """Run one block, which stops at its first failing command; what it printed.

        Raises:
            DocumentedCommandError: a command failed.
        """
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            cwd=self.checkout,
            env=dict(self.environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_BLOCK_SECONDS,
            check=False,
        )
        if done.returncode != 0:
            place = f"{page.relative_to(ROOT)}:{block.line}"
            raise DocumentedCommandError(f"{place}: exit code {done.returncode}\n{block.text}\n{done.stdout}{done.stderr}")
        return done.stdout
