"""The files of a release, as a destination is given them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ReleaseFile:
    """One file and what proves it."""

    local: Path
    name: str
    """At the destination, with slashes, relative to its root."""
    size: int
    sha256: str


@dataclass(frozen=True)
class Release:
    """Everything that is published, in order: weights first, then what describes them; `manifest` is the last file of all."""

    files: tuple[ReleaseFile, ...]
    manifest: ReleaseFile
    """SHA256SUMS: whoever sees it at the destination may rely on every other file being there."""
    facts: Mapping[str, str]
    """For annotations and commit messages: job, base model and its revision, plan digest."""
