"""Collects what is known about each source in a plan: its files, the results of its parts, and the findings about it.

Findings include records that occur twice, and held-out records that are also trained on. Called by prepare.py.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune_job.api.inputs import OnInvalidRecord
from finetune_job.finding import Finding
from finetune_job.plan.run_plan import DataPlan
from finetune_trainer.data.cpus import available_cpus
from finetune_trainer.data.file_parts import FilePart, PartResult
from finetune_trainer.data.findings import (
    MAX_KINDS,
    TRAIN,
    VALIDATION,
    SplitSource,
    also_held_out,
    content_dropped,
    empty,
    invalid_records,
    keys_unread,
    never_used,
    repeated,
    too_long,
    unknown_text,
    unreadable,
)
from finetune_trainer.data.packing import WeightedDocuments
from finetune_trainer.data.read import lines_before
from finetune_trainer.data.records import MAX_PLACES, count_problem, count_unread
from finetune_trainer.data.source_files import find_files, find_shared
from finetune_trainer.errors import DataError
from finetune_trainer.files import file_sha256

Array = NDArray[Any]
Stamp = tuple[int, int]
"""Size and modification time of a file."""

MAX_COMPARED = 1 << 24
"""Maximum number of documents of a source that are compared with each other. This limits the memory for digests to 128 MiB."""
REPEATED_SHARE = 0.01
"""Smallest share of repeated records in a source that causes a warning."""
_OF_RECORDS, _OF_TOKENS = ("records", "invalid", "documents", "dropped"), ("tokens", "supervised_tokens", "unknown_tokens")
_SUMMED = tuple(f"num_{name}" for name in (*_OF_RECORDS, *_OF_TOKENS))
UNKNOWN_SHARE = 0.1
"""Smallest share of unknown tokens in a source that is reported. A few foreign letters cause no warning."""


class DocumentDigests:
    """Digests of documents, 8 bytes each. Two different documents have the same digest with a probability of 1 in 1.8e19."""

    def __init__(self, most: int | None = None) -> None:
        """most: maximum number of digests that are kept (None: all); further digests are ignored."""
        self._blocks: list[Array] = []
        self._left = most

    def add(self, digests: Array) -> None:
        """Add the digests of documents, in any order. Call this before any count is read."""
        self._blocks.append(digests[: self._left])
        if self._left is not None:
            self._left -= len(self._blocks[-1])

    @cached_property
    def _different(self) -> Array:
        """The distinct digests, in ascending order."""
        return np.unique(np.concatenate([np.empty(0, dtype="<u8"), *self._blocks]))

    @property
    def num_repeated(self) -> int:
        """Number of documents that equal an earlier document."""
        return sum(map(len, self._blocks)) - len(self._different)

    def num_among(self, digests: Array) -> int:
        """Return how many of `digests`, which belong to other documents, are among the digests kept here."""
        if not len(self._different):
            return 0
        places = np.minimum(np.searchsorted(self._different, digests), len(self._different) - 1)
        return int((self._different[places] == digests).sum())


@dataclass(frozen=True)
class DatasetFacts:
    """Counts of one source."""

    split: str
    source: str
    num_records: int
    num_dropped: int
    num_tokens: int
    """Number of tokens of kept records, each record counted once."""
    num_supervised_tokens: int
    """Number of supervised tokens of kept records, each record counted once."""
    weight: float
    num_occurrences: int
    """Number of records in one pass."""
    num_repeated: int
    """Number of records that equal an earlier record."""
    lengths: dict[int, int]
    """Histogram of lengths, as in PartResult; its keys become strings in JSON."""


@dataclass
class Source:
    """The state of one source while it is prepared."""

    named: SplitSource
    weight: float
    warnings: tuple[Finding, ...] = ()
    """Warnings about the source's files."""
    error: OSError | None = None
    """The error, if the source cannot be read."""
    refusal: Finding | None = None
    """The finding, if the files contradict the manifest."""
    files: dict[Path, str] = field(default_factory=dict)
    """Files in the order in which they are read -> their digests."""
    stamps: dict[Path, Stamp] = field(default_factory=dict)
    """Sizes and modification times of the files, taken before their digests were computed."""
    sums: PartResult = field(default_factory=PartResult)
    """Sums over the source's parts. Line numbers of problems count from the beginning of the file."""
    invalid: list[str] = field(default_factory=list)
    """The first records that cannot be used: their places and problems."""
    digests: DocumentDigests = field(default_factory=partial(DocumentDigests, MAX_COMPARED))
    num_held_out: int = 0
    """Number of training documents that are also held out."""

    @property
    def weighted(self) -> WeightedDocuments:
        return WeightedDocuments(self.sums.num_documents, self.weight)

    def add(self, part: FilePart, result: PartResult) -> None:
        """Add the result of one of the source's parts. Call this in the order of the parts."""
        sums = self.sums
        self.error = self.error or result.unreadable
        for problems, of_part in ((sums.problems, result.problems), (sums.left_out, result.left_out)):
            for problem, count in of_part.values():
                # Counting lines reads the file up to the part, so it is done only for problems that are shown.
                is_shown = self.error is None and problem.kind not in problems and len(problems) < MAX_KINDS
                if part.span is not None and is_shown:
                    problem = replace(problem, line=problem.line + lines_before(part.path, part.span[0]))
                count_problem(problems, problem, count)
        for line, unit, words in result.invalid_places[: MAX_PLACES - len(self.invalid)]:
            before = 0 if part.span is None or self.error is not None else lines_before(part.path, part.span[0])
            self.invalid.append(f"{self.named.name(part.path)} {unit} {line + before}: {words}")
        sums.must_fail |= result.must_fail
        sums.template_is_endless |= result.template_is_endless
        for key, count in result.unread.items():
            count_unread(sums.unread, [key], count)
        for name in _SUMMED:
            setattr(sums, name, getattr(sums, name) + getattr(result, name))
        shortest = [length for length in (sums.shortest_dropped, result.shortest_dropped) if length]
        sums.shortest_dropped = min(shortest, default=0)
        sums.longest_document = max(sums.longest_document, result.longest_document)
        sums.largest_token_id = max(sums.largest_token_id, result.largest_token_id)
        for bound, count in result.lengths.items():
            sums.found_length(bound, count)

    def findings(self, plan: DataPlan, *, is_tokenised: bool) -> list[Finding]:
        """Return the findings about the source. Call this after the whole source has been read."""
        named, sums = self.named, self.sums
        if self.error is not None:
            return [unreadable(named, self.error)]
        if self.refusal is not None:
            return [self.refusal]
        can_skip = plan.on_invalid_record is OnInvalidRecord.SKIP and not sums.must_fail
        invalid = invalid_records(named, sums.problems, self.invalid, (sums.num_invalid, sums.num_records), can_skip=can_skip)
        if any(finding.severity == "error" for finding in invalid):
            return invalid
        if sums.num_records == 0:
            return [empty(named)]
        findings = [*invalid, *self.warnings, *keys_unread(named, sums.unread, plan.format, plan.mapping)]
        if sums.num_dropped:
            findings.append(too_long(named, sums.num_records, sums.num_dropped, sums.shortest_dropped, plan.max_sequence_length))
        if is_tokenised and sums.num_documents and not self.weighted.occurrences:
            findings.append(never_used(named, self.weight, sums.num_documents))
        if sums.num_unknown_tokens >= max(UNKNOWN_SHARE * sums.num_tokens, 1):
            findings.append(unknown_text(named, sums.num_unknown_tokens, sums.num_tokens))
        findings += content_dropped(named, list(sums.left_out.values())[:MAX_KINDS])
        num_repeated = self.digests.num_repeated
        if num_repeated >= max(REPEATED_SHARE * sums.num_documents, 1):
            findings.append(repeated(named, num_repeated, sums.num_documents))
        if self.num_held_out:
            findings.append(also_held_out(named, self.num_held_out, sums.num_documents))
        return findings

    def facts(self) -> DatasetFacts:
        """The counts of the source."""
        return DatasetFacts(
            split=self.named.split,
            source=self.named.address,
            num_records=self.sums.num_records,
            num_dropped=self.sums.num_dropped,
            num_tokens=self.sums.num_tokens,
            num_supervised_tokens=self.sums.num_supervised_tokens,
            weight=self.weight,
            num_occurrences=self.weighted.occurrences,
            num_repeated=self.digests.num_repeated,
            lengths=dict(sorted(self.sums.lengths.items())),
        )


def list_sources(plan: DataPlan, claims_root: Path) -> list[Source]:
    """List every source with its files and their digests."""
    planned = [*((TRAIN, dataset) for dataset in plan.train), *([(VALIDATION, plan.validation)] if plan.validation else [])]
    sources = []
    with ThreadPoolExecutor(available_cpus()) as threads:
        for split, dataset in planned:
            path = claims_root / dataset.location.claim / dataset.location.path
            named = SplitSource(split, dataset.location, path, dataset.field, dataset.source)
            listed = find_files(named, dataset.splits, is_chosen=dataset.split_is_chosen)
            source = Source(named, dataset.weight, listed.warnings, listed.error, listed.refusal)
            sources.append(source)
            try:
                source.stamps = {path: _stamp(path) for path in listed.files}
                source.files = dict(zip(listed.files, threads.map(file_sha256, listed.files), strict=True))
            except OSError as error:
                source.error = error
    shared = find_shared((source.named, source.files.keys(), source.files.values()) for source in sources)
    for source in sources:
        source.refusal = source.refusal or shared.get(source.named)
    return sources


def _stamp(path: Path) -> Stamp:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def check_unchanged(sources: list[Source]) -> None:
    """Raise DataError if a file has changed since its digest was computed."""
    for source in sources:
        for path, stamp in source.stamps.items():
            if source.error is None and _stamp(path) != stamp:
                raise DataError(f"{source.named.address}: {path.name} was changed while it was read", "run preflight again")
