"""The sources that a plan names: their files, what was found in them, and what there is to say about each.

That includes records that occur twice, and held-out records that are trained on too. Called by prepare.py.
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
"""Size and time of the latest change of a file."""

MAX_COMPARED = 1 << 24
"""Documents of a source that are compared with each other: what bounds the memory, 128 MiB."""
REPEATED_SHARE = 0.01
"""Of a source's records; fewer repetitions are counted, and are not a reason to warn."""
UNKNOWN_SHARE = 0.1
"""Of a source's tokens; a foreign letter here and there is no reason to warn."""


class RepeatedDocuments:
    """Digests of the documents of one source, to count those that occur more than once."""

    def __init__(self) -> None:
        self._blocks: list[Array] = []
        self._left = MAX_COMPARED

    def add(self, digests: Array) -> None:
        """Documents of the source, in any order. Those beyond MAX_COMPARED are not looked at."""
        kept = digests[: self._left]
        self._left -= len(kept)
        self._blocks.append(kept)

    def count(self) -> int:
        """How many documents equal an earlier one."""
        return sum(map(len, self._blocks)) - len(np.unique(np.concatenate(self._blocks))) if self._blocks else 0


class HeldOutDocuments:
    """Digests of the held-out documents, 8 bytes each. Two different documents share one with a probability of 1 in 1.8e19."""

    def __init__(self) -> None:
        self._blocks: list[Array] = []
        self._sorted: Array | None = None

    def add(self, digests: Array) -> None:
        """Documents that are held out. Call before `count`."""
        self._blocks.append(digests)

    def count(self, digests: Array) -> int:
        """How many of these training documents are held out too."""
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
    """Records by tokens, as in PartResult; keys are texts once they were stored as JSON."""


@dataclass
class Source:
    """What is known of one source while it is prepared."""

    named: SplitSource
    weight: float
    files: dict[Path, str] = field(default_factory=dict)
    """In the order of reading, with their digests."""
    stamps: dict[Path, Stamp] = field(default_factory=dict)
    """When their digests were taken."""
    error: OSError | None = None
    """It cannot be read."""
    refusal: Finding | None = None
    """Its files are not what the manifest says."""
    warnings: tuple[Finding, ...] = ()
    """Of its files."""
    found: PartResult = field(default_factory=PartResult)
    """Sums over its parts."""
    problems: dict[ProblemKind, tuple[FilePart, RecordProblem, int]] = field(default_factory=dict)
    """The first of each kind with its part, and how many there are."""
    left_out: dict[ProblemKind, tuple[FilePart, RecordProblem, int]] = field(default_factory=dict)
    """The same of what the chat template leaves out."""
    repeated: RepeatedDocuments = field(default_factory=RepeatedDocuments)
    num_held_out: int = 0
    """Training documents that are held out too."""
    template_is_endless: bool = False
    """As in PartResult."""

    @property
    def weighted(self) -> WeightedDocuments:
        return WeightedDocuments(self.found.num_documents, self.weight)

    def add(self, part: FilePart, result: PartResult) -> None:
        """What was found in one of its parts, in order."""
        found = self.found
        for all_found, found_here in ((self.problems, result.problems), (self.left_out, result.left_out)):
            for kind, (problem, count) in found_here.items():
                first_part, first, counted = all_found.get(kind, (part, problem, 0))
                all_found[kind] = (first_part, first, counted + count)
        self.error = self.error or result.unreadable
        self.template_is_endless = self.template_is_endless or result.template_is_endless
        found.num_records += result.num_records
        found.num_documents += result.num_documents
        found.num_dropped += result.num_dropped
        shortest = [length for length in (found.shortest_dropped, result.shortest_dropped) if length]
        found.shortest_dropped = min(shortest, default=0)
        found.num_tokens += result.num_tokens
        found.num_supervised_tokens += result.num_supervised_tokens
        found.longest_document = max(found.longest_document, result.longest_document)
        found.largest_token_id = max(found.largest_token_id, result.largest_token_id)
        found.num_unknown_tokens += result.num_unknown_tokens
        for bound, count in result.lengths.items():
            found.found_length(bound, count)

    def findings(self, max_sequence_length: int, was_tokenised: bool) -> list[Finding]:
        """What there is to say about it when all of it was read."""
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
    """Every source with its files and their digests."""
    planned = [*((TRAIN, dataset) for dataset in plan.train), *([(VALIDATION, plan.validation)] if plan.validation else [])]
    sources = []
    with ThreadPoolExecutor(available_cpus()) as threads:
        for split, dataset in planned:
            path = claims_root / dataset.location.claim / dataset.location.path
            named = SplitSource(split, dataset.location, path, dataset.field, dataset.source)
            found = find_files(named, dataset.splits, is_chosen=dataset.split_is_chosen)
            source = Source(named, dataset.weight, error=found.error, refusal=found.refusal, warnings=found.warnings)
            sources.append(source)
            try:
                source.stamps = {path: _stamp(path) for path in found.files}
                source.files = dict(zip(found.files, threads.map(file_sha256, found.files), strict=True))
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
    """What was read must be what the digests say. Raises DataError."""
    for source in sources:
        for path, stamp in source.stamps.items():
            if source.error is None and _stamp(path) != stamp:
                raise DataError(f"{source.named.address}: {path.name} was changed while it was read", "run preflight again")


def _first_kinds(problems: dict[ProblemKind, tuple[FilePart, RecordProblem, int]]) -> list[tuple[RecordProblem, int]]:
    return [(_in_file(part, problem), count) for part, problem, count in list(problems.values())[:MAX_KINDS]]


def _in_file(part: FilePart, problem: RecordProblem) -> RecordProblem:
    """The problem with its line counted from the beginning of the file and not of the part."""
    return replace(problem, line=problem.line + lines_before(part.path, part.span[0])) if part.span else problem
