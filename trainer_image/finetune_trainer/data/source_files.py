"""A source that a manifest names -> its files, or the reason why they cannot be used.

The name of a file shows its split, by the words that the datasets library looks for, so that a directory means the same here.
This module is light, since looking at the first records of a source (roles/look.py) imports it as well as preparing all of them
(sources.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
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
    """The files of a source that are read, in order."""

    named: SplitSource
    files: tuple[Path, ...] = ()
    error: OSError | None = None
    """The error, if the source cannot be read."""
    refusal: Finding | None = None
    """The finding, if its files are not what the manifest says."""
    warnings: tuple[Finding, ...] = ()

    @property
    def problem(self) -> Finding | None:
        """The reason why there is nothing to read."""
        return unreadable(self.named, self.error) if self.error is not None else self.refusal


def find_files(named: SplitSource, splits: Sequence[str], *, is_chosen: bool) -> SourceFiles:
    """Find the files of a source. splits: as in DatasetPlan. is_chosen: the user named the split."""
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
    """Held-out sources that share a file with the training data, by path or by content.

    sources: of each source, its files and their digests, as far as they are known.
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


@dataclass(frozen=True)
class SplitFiles:
    """The files of a directory, by split."""

    split: str
    """The chosen split; empty if the file names do not name splits."""
    taken: tuple[Path, ...]
    unnamed: tuple[Path, ...]
    """Files that were left out because they name no split."""
    found: tuple[str, ...]
    """All splits that the file names name."""


def split_files(directory: Path, files: Sequence[Path], wanted: Sequence[str]) -> SplitFiles:
    """The files of the first split of `wanted` that exists; all files if their names do not name splits."""
    splits = {file: split_of(file.relative_to(directory)) for file in files}
    found = tuple(sorted({split for split in splits.values() if split}))
    if not found:
        return SplitFiles("", tuple(files), (), ())
    split = next((name for name in wanted if name in found), "")
    taken = tuple(file for file in files if split and splits[file] == split)
    return SplitFiles(split, taken, tuple(file for file in files if not splits[file]), found)


def split_of(path: Path) -> str:
    """The split of a file, from its path below the directory; empty if the path names none or several."""
    for name in reversed(path.parts[:-1]):
        if name.lower() in _SPLIT_OF_WORD:
            return _SPLIT_OF_WORD[name.lower()]
    stem = path.name[: -len(path.suffix)] if path.suffix else path.name
    shard = _SHARD.match(stem)
    name = shard["split"] if shard else stem
    found = {_SPLIT_OF_WORD[word] for word in _SEPARATOR.split(name.lower()) if word in _SPLIT_OF_WORD}
    if len(found) != 1:
        return ""
    # The name of a shard is exactly the split, such as train_sft.
    return name if shard and name.lower() not in _SPLIT_OF_WORD else found.pop()
