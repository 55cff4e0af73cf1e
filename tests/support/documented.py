"""Executes the commands of a documentation page as a reader would: its `sh` blocks, in their order, in one shell."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

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


def doctor_roles(namespace: str) -> list[dict[str, Any]]:
    """The ClusterRole and the Role that `finetune doctor` needs by the page on installation, in that order."""
    page = ROOT / "docs" / "platform" / "install.md"
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


class DocumentedCommandError(AssertionError):
    """A documented command failed; the message has its page, line and output."""


@dataclass(frozen=True)
class Reader:
    """Somebody who has `kubectl` and `helm` and follows pages from the top of a checkout."""

    checkout: Path
    environment: Mapping[str, str]
    patience_seconds: float = _BLOCK_SECONDS
    """For one block."""

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
            timeout=self.patience_seconds,
            check=False,
        )
        if done.returncode != 0:
            place = f"{page.relative_to(ROOT)}:{block.line}"
            raise DocumentedCommandError(f"{place}: exit code {done.returncode}\n{block.text}\n{done.stdout}{done.stderr}")
        return done.stdout
