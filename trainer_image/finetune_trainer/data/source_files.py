"""A source that a manifest names -> its files, and why they cannot be used.

Light: what looks at the first records of a source (roles/look.py) imports it as well as what prepares all of them (sources.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune_job.finding import Finding
from finetune_trainer.data.findings import (
    TRAIN,
    VALIDATION,
    SplitSource,
    shared_files,
    split_missing,
    unreadable,
    unsplit_files,
)
from finetune_trainer.data.read import record_files
from finetune_trainer.data.splits import split_files


@dataclass(frozen=True)
class SourceFiles:
    """The files of a source that are read, in order."""

    named: SplitSource
    files: tuple[Path, ...] = ()
    error: OSError | None = None
    """It cannot be read."""
    refusal: Finding | None = None
    """Its files are not what the manifest says."""
    warnings: tuple[Finding, ...] = ()

    @property
    def problem(self) -> Finding | None:
        """Why there is nothing to read."""
        return unreadable(self.named, self.error) if self.error is not None else self.refusal


def find_files(named: SplitSource, splits: Sequence[str], *, is_chosen: bool) -> SourceFiles:
    """splits: as in DatasetPlan. is_chosen: the user named the split."""
    try:
        files = tuple(record_files(named.path))
    except OSError as error:
        return SourceFiles(named, error=error)
    if not splits or not named.path.is_dir():
        return SourceFiles(named, files)
    divided = split_files(named.path, files, splits)
    if not divided.taken or (is_chosen and not divided.found):
        return SourceFiles(named, refusal=split_missing(named, splits, divided.found))
    warnings = (unsplit_files(named, divided.split, divided.unnamed),) if divided.unnamed else ()
    return SourceFiles(named, divided.taken, warnings=warnings)


def find_shared(sources: Iterable[tuple[SplitSource, Collection[Path], Collection[str]]]) -> dict[SplitSource, Finding]:
    """Held-out sources with a file of the training data, by its place or by its bytes. Of each source: files, and their digests
    as far as they are known.
    """
    known = list(sources)
    found: dict[SplitSource, Finding] = {}
    for held_out, files, digests in known:
        if held_out.split != VALIDATION:
            continue
        own = {file.resolve() for file in files}
        for named, trained_on, their_digests in known:
            if named.split == TRAIN:
                pairs = zip(trained_on, their_digests or [""] * len(trained_on), strict=True)
                shared = [file for file, digest in pairs if file.resolve() in own or (digest and digest in digests)]
                if shared:
                    found.setdefault(held_out, shared_files(named, held_out, shared))
    return found
