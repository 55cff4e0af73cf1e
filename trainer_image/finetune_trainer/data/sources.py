"""The sources that a plan names: their files, the results of their parts, and the findings about each.

Findings include records that occur twice, and held-out records that are also trained on. Called by prepare.py.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune_job.finding import Finding
from finetune_job.plan.run_plan import DataPlan
from finetune_trainer.data.cpus import available_cpus
from finetune_trainer.data.file_parts import FilePart, PartResult, ProblemKind
from finetune_trainer.data.findings import (
    MAX_KINDS,
    TRAIN,
    VALIDATION,
    SplitSource,
    also_held_out,
    content_dropped,
    empty,
    never_used,
    repeated,
    too_long,
    unknown_text,
    unreadable,
    wrong_records,
)
from finetune_trainer.data.packing import WeightedDocuments
from finetune_trainer.data.read import RecordProblem, lines_before
from finetune_trainer.data.source_files import find_files, find_shared
from finetune_trainer.errors import DataError
from finetune_trainer.files import file_sha256

Array = NDArray[Any]
Stamp = tuple[int, int]
"""Size and modification time of a file."""

MAX_COMPARED = 1 << 24
"""Number of documents of a source that are compared with each other. It bounds the memory to 128 MiB."""
REPEATED_SHARE = 0.01
"""Share of a source's records; fewer repetitions are counted, but cause no warning."""
UNKNOWN_SHARE = 0.1
"""Share of a source's tokens; a few foreign letters cause no warning."""


class RepeatedDocuments:
    """Digests of the documents of one source, which count documents that occur more than once."""

    def __init__(self) -> None:
        self._blocks: list[Array] = []
        self._left = MAX_COMPARED

    def add(self, digests: Array) -> None:
        """Add documents of the source, in any order. Those beyond MAX_COMPARED are ignored."""
        kept = digests[: self._left]
        self._left -= len(kept)
        self._blocks.append(kept)

    def count(self) -> int:
        """Number of documents that equal an earlier one."""
        return sum(map(len, self._blocks)) - len(np.unique(np.concatenate(self._blocks))) if self._blocks else 0


class HeldOutDocuments:
    """Digests of the held-out documents, 8 bytes each. Two different documents share one with a probability of 1 in 1.8e19."""

    def __init__(self) -> None:
        self._blocks: list[Array] = []
        self._sorted: Array | None = None

    def add(self, digests: Array) -> None:
        """Add documents that are held out. Call this before `count`."""
        self._blocks.append(digests)

    def count(self, digests: Array) -> int:
        """Number of these training documents that are also held out."""
        if self._sorted is None:
            self._sorted = np.unique(np.concatenate(self._blocks)) if self._blocks else np.empty(0, dtype="<u8")
        if not len(self._sorted):
            return 0
        places = np.minimum(np.searchsorted(self._sorted, digests), len(self._sorted) - 1)
        return int((self._sorted[places] == digests).sum())


@dataclass(frozen=True)
class DatasetFacts:
    """Counts of one source."""

    split: str
    source: str
    num_records: int
    num_dropped: int
    num_tokens: int
    """Each record counted once."""
    num_supervised_tokens: int
    """Each record counted once."""
    weight: float
    num_occurrences: int
    """Records of one pass."""
    num_repeated: int
    """Records that equal an earlier one."""
    lengths: dict[int, int]
    """Histogram of lengths, as in PartResult; its keys are texts in JSON."""


@dataclass
class Source:
    """The state of one source while it is prepared."""

    named: SplitSource
    weight: float
    files: dict[Path, str] = field(default_factory=dict)
    """Files in the order of reading -> their digests."""
    stamps: dict[Path, Stamp] = field(default_factory=dict)
    """Sizes and modification times when the digests were computed."""
    error: OSError | None = None
    """The error, if the source cannot be read."""
    refusal: Finding | None = None
    """The finding, if its files are not what the manifest says."""
    warnings: tuple[Finding, ...] = ()
    """Warnings about its files."""
    found: PartResult = field(default_factory=PartResult)
    """Sums over its parts."""
    problems: dict[ProblemKind, tuple[FilePart, RecordProblem, int]] = field(default_factory=dict)
    """The first problem of each kind with its part, and the number of problems."""
    left_out: dict[ProblemKind, tuple[FilePart, RecordProblem, int]] = field(default_factory=dict)
    """The first content of each kind that the chat template leaves out, with its part, and the number of such records."""
    repeated: RepeatedDocuments = field(default_factory=RepeatedDocuments)
    num_held_out: int = 0
    """Number of training documents that are also held out."""
    template_is_endless: bool = False
    """The chat template did not finish, as in PartResult."""

    @property
    def weighted(self) -> WeightedDocuments:
        return WeightedDocuments(self.found.num_documents, self.weight)

    def add(self, part: FilePart, result: PartResult) -> None:
        """Add the result of one of its parts. Call this in the order of the parts."""
        sums = self.found
        for all_problems, new_problems in ((self.problems, result.problems), (self.left_out, result.left_out)):
            for kind, (problem, count) in new_problems.items():
                first_part, first, counted = all_problems.get(kind, (part, problem, 0))
                all_problems[kind] = (first_part, first, counted + count)
        self.error = self.error or result.unreadable
        self.template_is_endless = self.template_is_endless or result.template_is_endless
        sums.num_records += result.num_records
        sums.num_documents += result.num_documents
        sums.num_dropped += result.num_dropped
        shortest = [length for length in (sums.shortest_dropped, result.shortest_dropped) if length]
        sums.shortest_dropped = min(shortest, default=0)
        sums.num_tokens += result.num_tokens
        sums.num_supervised_tokens += result.num_supervised_tokens
        sums.longest_document = max(sums.longest_document, result.longest_document)
        sums.largest_token_id = max(sums.largest_token_id, result.largest_token_id)
        sums.num_unknown_tokens += result.num_unknown_tokens
        for bound, count in result.lengths.items():
            sums.found_length(bound, count)

    def findings(self, max_sequence_length: int, was_tokenised: bool) -> list[Finding]:
        """The findings about the source after all of it was read."""
        named, found = self.named, self.found
        if self.error is not None:
            return [unreadable(named, self.error)]
        if self.refusal is not None:
            return [self.refusal]
        if self.problems:
            return wrong_records(named, _first_kinds(self.problems), found.num_records)
        if found.num_records == 0:
            return [empty(named)]
        findings = list(self.warnings)
        if found.num_dropped:
            findings.append(too_long(named, found.num_records, found.num_dropped, found.shortest_dropped, max_sequence_length))
        if was_tokenised and found.num_documents and not self.weighted.occurrences:
            findings.append(never_used(named, self.weight, found.num_documents))
        if found.num_unknown_tokens >= max(UNKNOWN_SHARE * found.num_tokens, 1):
            findings.append(unknown_text(named, found.num_unknown_tokens, found.num_tokens))
        findings += content_dropped(named, _first_kinds(self.left_out))
        num_repeated = self.repeated.count()
        if num_repeated >= max(REPEATED_SHARE * found.num_documents, 1):
            findings.append(repeated(named, num_repeated, found.num_documents))
        if self.num_held_out:
            findings.append(also_held_out(named, self.num_held_out, found.num_documents))
        return findings

    def facts(self) -> DatasetFacts:
        """Its counts."""
        return DatasetFacts(
            split=self.named.split,
            source=self.named.address,
            num_records=self.found.num_records,
            num_dropped=self.found.num_dropped,
            num_tokens=self.found.num_tokens,
            num_supervised_tokens=self.found.num_supervised_tokens,
            weight=self.weight,
            num_occurrences=self.weighted.occurrences,
            num_repeated=self.repeated.count(),
            lengths=dict(sorted(self.found.lengths.items())),
        )


def list_sources(plan: DataPlan, claims_root: Path) -> list[Source]:
    """List every source with its files and their digests."""
    planned = [*((TRAIN, dataset) for dataset in plan.train), *([(VALIDATION, plan.validation)] if plan.validation else [])]
    sources = []
    with ThreadPoolExecutor(available_cpus()) as threads:
        for split, dataset in planned:
            path = claims_root / dataset.location.claim / dataset.location.path
            named = SplitSource(split, dataset.location, path, dataset.field, dataset.source)
            source_files = find_files(named, dataset.splits, is_chosen=dataset.split_is_chosen)
            source = Source(
                named, dataset.weight, error=source_files.error, refusal=source_files.refusal, warnings=source_files.warnings
            )
            sources.append(source)
            try:
                source.stamps = {path: _stamp(path) for path in source_files.files}
                source.files = dict(zip(source_files.files, threads.map(file_sha256, source_files.files), strict=True))
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


def _first_kinds(problems: dict[ProblemKind, tuple[FilePart, RecordProblem, int]]) -> list[tuple[RecordProblem, int]]:
    return [(_in_file(part, problem), count) for part, problem, count in list(problems.values())[:MAX_KINDS]]


def _in_file(part: FilePart, problem: RecordProblem) -> RecordProblem:
    """The problem with its line counted from the beginning of the file instead of the part."""
    return replace(problem, line=problem.line + lines_before(part.path, part.span[0])) if part.span else problem
