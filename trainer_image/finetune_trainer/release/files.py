"""The files of a release, and their names at each kind of destination.

A directory (`pvc://`, `s3://`) has `adapter/` and `merged/` with the model card next to them. A repository (`hf://`, `oci://`) is
itself a model: the merged model, or the adapter if nothing was merged, is at its top, where loaders look.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from finetune_job.api.base import HubPath, RegistryPath, parse_destination
from finetune_job.layout import OutputLayout
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.files import open_beneath

_NAMES = OutputLayout(Path())
ADAPTER, MERGED = _NAMES.adapter.name, _NAMES.merged.name
CARD, PROVENANCE, CHECKSUMS = _NAMES.model_card.name, _NAMES.provenance.name, _NAMES.checksums.name
SIGNATURE = f"{CHECKSUMS}.sig"
"""Signature of the checksums. Publishing creates it, so it is not among the results."""
VERIFICATION, VERIFICATION_PAGE = _NAMES.verification.name, _NAMES.verification_page.name
REPORT, REPORT_DATA = _NAMES.report.name, _NAMES.report_data.name
BESIDE = (CARD, PROVENANCE, REPORT, REPORT_DATA, VERIFICATION, VERIFICATION_PAGE)
"""Files next to the directories of weights. SHA256SUMS lists them; the last two exist only if something was merged."""
WEIGHT_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class ReleaseLayout:
    """The kinds of results, and which of them is at the top of the destination."""

    has_adapter: bool
    has_merged: bool
    is_repository: bool

    @property
    def top(self) -> str | None:
        """Directory of the results whose files go to the top of the destination; None if all files keep their directories."""
        if not self.is_repository:
            return None
        return MERGED if self.has_merged else ADAPTER

    @property
    def directories(self) -> tuple[str, ...]:
        """Directories of weights, in the order in which they are published."""
        return tuple(name for name, is_there in ((ADAPTER, self.has_adapter), (MERGED, self.has_merged)) if is_there)

    @property
    def needs_adapter_card(self) -> bool:
        """Whether the adapter is in a directory of its own, whose readers do not see the model card."""
        return self.has_adapter and self.top != ADAPTER

    def at_destination(self, local: str) -> str:
        """Return the name at the destination of a result named `local`. Both names are relative and use slashes."""
        first, _, rest = local.partition("/")
        return rest if rest and first == self.top else local

    def in_results(self, name: str) -> str:
        """Return the name that a file at the destination has in the results."""
        first, slash, _ = name.partition("/")
        keeps_name = name in BESIDE or (bool(slash) and first in self.directories and first != self.top)
        return name if self.top is None or keeps_name else f"{self.top}/{name}"


def release_layout(plan: RunPlan) -> ReleaseLayout:
    """Return the layout of the results that the plan publishes."""
    destination = parse_destination(plan.publish.destination) if plan.publish else plan.output
    return ReleaseLayout(
        has_adapter=plan.has_adapter, has_merged=plan.has_merged, is_repository=isinstance(destination, HubPath | RegistryPath)
    )


@dataclass(frozen=True)
class ReleaseFile:
    """One file of a release, with the digest that proves it."""

    claim: Path
    """Mount of the claim that holds the results."""
    path: str
    """Path on the claim, with slashes."""
    name: str
    """Name at the destination, with slashes, relative to its root."""
    size: int
    sha256: str

    @property
    def local(self) -> Path:
        return self.claim / self.path

    def open(self) -> BufferedReader:
        """Open the file for reading. No link is followed, since other pods may write to the claim. Raises OSError."""
        return open_beneath(self.claim, self.path)


@dataclass(frozen=True)
class Release:
    """Everything that is published, in order: weights, then their descriptions, and `manifest` as the last file."""

    files: tuple[ReleaseFile, ...]
    manifest: ReleaseFile
    """SHA256SUMS: if it is at the destination, every other file is there."""
    facts: Mapping[str, str]
    """Facts for annotations and commit messages: job, base model and its revision, plan digest."""
