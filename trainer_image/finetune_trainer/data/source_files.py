"""Finds the files of a source that a manifest names, or the reason why they cannot be used.

A file's split is recognised by the same words in its name as in the datasets library, so both read a directory in the same way.
This module imports little, since it is also used to look at the first records of a source (roles/look.py), not only to prepare
all records (sources.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune_job.finding import Finding
from finetune_trainer.data.findings import TRAIN, VALIDATION, SplitSource, shared_files, split_missing, unreadable, unsplit_files
from finetune_trainer.data.read import record_files

_WORDS: Mapping[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLIT_OF_WORD = {word: split for split, words in _WORDS.items() for word in words}
_SHARD = re.compile(r"(?P<split>.+)-\d{5}-of-\d{5}$")
_SEPARATOR = re.compile(r"[^a-z]+")


@dataclass(frozen=True)
class SourceFiles:
    """The files of a source that are to be read, in order."""

    named: SplitSource
    files: tuple[Path, ...] = ()
    error: OSError | None = None
    """The error, if the source cannot be read."""
    refusal: Finding | None = None
    """The finding, if the files contradict the manifest."""
    warnings: tuple[Finding, ...] = ()

    @property
    def problem(self) -> Finding | None:
        """The reason why the source cannot be read; None if it can."""
        return unreadable(self.named, self.error) if self.error is not None else self.refusal


def find_files(named: SplitSource, splits: Sequence[str], *, is_chosen: bool) -> SourceFiles:
    """Find the files of a source. splits: as in DatasetPlan. is_chosen: whether the user named the split."""
    try:
        files = tuple(record_files(named.path))
    except OSError as error:
        return SourceFiles(named, error=error)
    split_of_file = {file: split_of(file.relative_to(named.path)) for file in files} if named.path.is_dir() else {}
    named_splits = sorted({split for split in split_of_file.values() if split})
    if not splits or not named_splits:
        # If the names do not distinguish splits, all files are read, unless the user asks for a split.
        is_refused = bool(splits) and is_chosen and named.path.is_dir()
        return SourceFiles(named, refusal=split_missing(named, splits, named_splits)) if is_refused else SourceFiles(named, files)
    split = next((name for name in splits if name in named_splits), "")
    if not split:
        return SourceFiles(named, refusal=split_missing(named, splits, named_splits))
    unnamed = [file for file in files if not split_of_file[file]]
    warnings = (unsplit_files(named, split, unnamed),) if unnamed else ()
    return SourceFiles(named, tuple(file for file in files if split_of_file[file] == split), warnings=warnings)


def find_shared(sources: Iterable[tuple[SplitSource, Collection[Path], Collection[str]]]) -> dict[SplitSource, Finding]:
    """Return held-out sources that share a file with the training data (by path or by content) -> the finding.

    sources: each source with its files and, if known, their digests.
    """
    known = list(sources)
    findings: dict[SplitSource, Finding] = {}
    for held_out, files, digests in known:
        if held_out.split != VALIDATION:
            continue
        own = {file.resolve() for file in files}
        for named, trained_on, their_digests in known:
            if named.split == TRAIN:
                pairs = zip(trained_on, their_digests or [""] * len(trained_on), strict=True)
                shared = [file for file, digest in pairs if file.resolve() in own or (digest and digest in digests)]
                if shared:
                    findings.setdefault(held_out, shared_files(named, held_out, shared))
    return findings


def split_of(path: Path) -> str:
    """The split that is named in a file's path below the directory; empty if the path names none or several."""
    for name in reversed(path.parts[:-1]):
        if name.lower() in _SPLIT_OF_WORD:
            return _SPLIT_OF_WORD[name.lower()]
    stem = path.name[: -len(path.suffix)] if path.suffix else path.name
    shard = _SHARD.match(stem)
    name = shard["split"] if shard else stem
    splits = {_SPLIT_OF_WORD[word] for word in _SEPARATOR.split(name.lower()) if word in _SPLIT_OF_WORD}
    if len(splits) != 1:
        return ""
    # The file name of a shard contains the full name of the split, such as train_sft.
    return name if shard and name.lower() not in _SPLIT_OF_WORD else splits.pop()
