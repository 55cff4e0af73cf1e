"""Which split a file of a directory is of, as its name says, and which files are read for a split.

The names are those that the datasets library looks for, so that a directory means here what it means there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_WORDS: Mapping[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLIT_OF_WORD = {word: split for split, words in _WORDS.items() for word in words}
_SHARD = re.compile(r"(?P<split>.+)-\d{5}-of-\d{5}$")
_SEPARATOR = re.compile(r"[^a-z]+")


@dataclass(frozen=True)
class SplitFiles:
    """The files of a directory, divided."""

    split: str
    """That was taken; empty if no name tells splits apart."""
    taken: tuple[Path, ...]
    unnamed: tuple[Path, ...]
    """Left out because they name no split."""
    found: tuple[str, ...]
    """All splits that the names tell apart."""


def split_files(directory: Path, files: Sequence[Path], wanted: Sequence[str]) -> SplitFiles:
    """Those of `files` that are of the first split of `wanted` that there is; all if no name tells splits apart."""
    splits = {file: split_of(file.relative_to(directory)) for file in files}
    found = tuple(sorted({split for split in splits.values() if split}))
    if not found:
        return SplitFiles("", tuple(files), (), ())
    split = next((each for each in wanted if each in found), "")
    taken = tuple(file for file in files if split and splits[file] == split)
    return SplitFiles(split, taken, tuple(file for file in files if not splits[file]), found)


def split_of(path: Path) -> str:
    """The split of a file, by its path below the directory; empty if that names none or several."""
    for name in reversed(path.parts[:-1]):
        if name.lower() in _SPLIT_OF_WORD:
            return _SPLIT_OF_WORD[name.lower()]
    stem = path.name[: -len(path.suffix)] if path.suffix else path.name
    shard = _SHARD.match(stem)
    name = shard["split"] if shard else stem
    found = {_SPLIT_OF_WORD[word] for word in _SEPARATOR.split(name.lower()) if word in _SPLIT_OF_WORD}
    if len(found) != 1:
        return ""
    # The names of shards hold exactly the split, such as train_sft.
    return name if shard and name.lower() not in _SPLIT_OF_WORD else found.pop()
