"""Turns source files into prepared data on the workspace, or into findings about the records.

Called by preflight, once per job; a second call with the same inputs reuses the first result. The data is written to a temporary
directory, which is renamed into place only if there are no errors.

Memory does not grow with the data. Parts of files go to worker processes, which write tokens to disk (file_parts.py, workers.py).
The tokens are joined in the order of the records (shard_writer.py), so that the bytes do not depend on the machine or the number
of processes. The sequences are planned window by window (packing.py).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from finetune_job.api.inputs import DataFormat, OnInvalidRecord
from finetune_job.finding import Finding
from finetune_job.plan.mapping import UNMAPPED
from finetune_job.plan.run_plan import DataPlan
from finetune_trainer.data.cpus import available_cpus
from finetune_trainer.data.file_parts import (
    PART_BYTES,
    PartResult,
    PartSettings,
    PartTask,
    documents_file,
    file_parts,
    read_documents,
    tokens_file,
)
from finetune_trainer.data.packing import plan_windows
from finetune_trainer.data.progress import PreparingProgress
from finetune_trainer.data.shard_writer import Staging
from finetune_trainer.data.shards import TRAIN, VALIDATION, PreparedDataError, read_manifest, verify_files
from finetune_trainer.data.sources import DatasetFacts, DocumentDigests, Source, check_unchanged, list_sources
from finetune_trainer.data.tokenize import Tokenizer
from finetune_trainer.data.tokenizer import generation_stops
from finetune_trainer.data.workers import MAX_WORKERS, in_this_process, in_workers
from finetune_trainer.files import file_sha256, open_regular, tokenizer_files

log = logging.getLogger(__name__)

_LATER_MAPPINGS = ("history", "ignored")
"""Fields of a mapping that earlier releases did not have."""
WORTH_WORKERS_BYTES = 2 * PART_BYTES
"""A data set smaller than this gets only one worker, because workers take a second to start."""


@dataclass(frozen=True)
class SplitFacts:
    """Counts of one split."""

    num_records: int
    num_dropped: int
    """Number of records longer than maxSequenceLength."""
    num_occurrences: int
    """Number of records in one pass, where every kept record counts as often as its data set's weight says."""
    num_sequences: int
    num_tokens: int
    """Number of tokens in one pass."""
    num_supervised_tokens: int
    """Number of supervised tokens in one pass."""
    longest_document: int
    """Number of tokens of the longest kept record."""
    largest_token_id: int


@dataclass(frozen=True)
class Preparation:
    """Checked data that is ready to be published, or is already on the workspace.

    As a context manager, it removes data that was not published.
    """

    findings: tuple[Finding, ...]
    splits: Mapping[str, SplitFacts]
    """The counts of each split that has no error."""
    datasets: tuple[DatasetFacts, ...]
    inputs: Mapping[str, Any]
    """Everything that determines the data: equal inputs give equal data."""
    pad_token_id: int
    staging: Staging | None
    """The temporary directory of the data; None if there is nothing to publish."""
    written_data_hash: str = ""
    """Hash of the data that is already on the workspace; empty if the data still has to be published."""

    def readable_at(self, directory: Path) -> Path:
        """Return the directory that the files can be read from, published or not. directory: its final path. Raises OSError."""
        if self.staging is None:
            return directory
        self.staging.flush()
        return self.staging.path

    def publish(self) -> str:
        """Rename the data into place and return its hash. Call this only if no finding is an error. Raises OSError."""
        if self.staging is None:
            return self.written_data_hash
        return self.staging.publish(
            {
                "inputs": self.inputs,
                "pad_token_id": self.pad_token_id,
                "splits": {split: asdict(facts) for split, facts in self.splits.items()},
                "datasets": [asdict(facts) for facts in self.datasets],
                "warnings": [finding.model_dump(mode="json") for finding in self.findings],
            }
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.staging is not None:
            self.staging.discard()


def prepare(
    plan: DataPlan,
    claims_root: Path,
    model_directory: Path,
    tokenizer: Tokenizer | None,
    directory: Path,
    *,
    allow_remote_code: bool = False,
    num_workers: int | None = None,
) -> Preparation:
    """Read, check and tokenise the plan's records, unless `directory` already holds the same data.

    tokenizer: the model's; if None (it did not load, or the workspace is not writable), records are only checked. num_workers
    does not affect the bytes: None means one for little data, else one per CPU; 0 means this process alone. Raises OSError if the
    workspace fails, WorkerError if a process died, DataError if a file changed during the call.
    """
    sources = list_sources(plan, claims_root)
    chats = tokenizer is not None and plan.format is DataFormat.CHAT
    stop_ids = tuple(sorted(generation_stops(tokenizer, model_directory))) if chats else ()
    inputs = _inputs(plan, sources, model_directory, stop_ids)
    pad_token_id = -1 if tokenizer is None else int(tokenizer.eos_token_id)
    if tokenizer is not None and all(source.error is None and source.refusal is None for source in sources):
        reusable = _reusable(directory, inputs, pad_token_id)
        if reusable is not None:
            return reusable
    with ExitStack() as stack:
        staging = stack.enter_context(Staging(directory)) if tokenizer is not None else None
        tasks = _tasks(sources, PartSettings(plan, stop_ids), staging)
        total = sum(path.stat().st_size for source in sources for path in source.files)
        if num_workers is None:
            num_workers = 1 if total < WORTH_WORKERS_BYTES else min(available_cpus(), MAX_WORKERS)
        if num_workers and tokenizer is not None:
            results = in_workers(tasks, num_workers, model_directory, allow_remote_code)
        else:
            results = in_this_process(tasks, tokenizer)
        with PreparingProgress(total) as progress, closing(results):
            _consume(results, sources, staging, progress)
        check_unchanged(sources)
        findings: list[Finding] = []
        splits: dict[str, SplitFacts] = {}
        for split in (TRAIN, VALIDATION):
            members = [source for source in sources if source.named.split == split]
            findings_of_split = [
                finding for source in members for finding in source.findings(plan, is_tokenised=tokenizer is not None)
            ]
            findings += findings_of_split
            # A split without documents was checked but not prepared, because another split has errors.
            is_made = any(source.sums.num_documents for source in members)
            if staging is not None and is_made and not any(finding.severity == "error" for finding in findings_of_split):
                splits[split] = _write_plan(staging, split, members, plan)
        datasets = tuple(source.facts() for source in sources)
        _log(splits, datasets, plan.max_sequence_length)
        stack.pop_all()
    return Preparation(tuple(findings), splits, datasets, inputs, pad_token_id, staging)


def _inputs(plan: DataPlan, sources: list[Source], model_directory: Path, stop_ids: tuple[int, ...]) -> dict[str, Any]:
    """Everything that determines the prepared bytes: equal inputs give equal data."""
    # The contents of the files are compared, so their locations do not matter.
    settings = plan.model_dump(mode="json", exclude={"train", "validation"})
    # Data prepared by an earlier release without mappings, or without these settings, stays valid.
    if plan.mapping == UNMAPPED:
        del settings["mapping"]
    else:
        for name in _LATER_MAPPINGS:
            if getattr(plan.mapping, name) == getattr(UNMAPPED, name):
                del settings["mapping"][name]
    if not plan.template_arguments:
        del settings["template_arguments"]
    if plan.on_invalid_record is OnInvalidRecord.FAIL:
        del settings["on_invalid_record"]
    files = [[str(path.relative_to(model_directory)), file_sha256(path)] for path in tokenizer_files(model_directory)]
    tokenizer_digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()
    return {
        "sources": [
            {
                "split": source.named.split,
                "weight": source.weight,
                # The name of a single file matters only for its kind; in a directory, names also determine the order.
                "files": [
                    [path.suffix if path == source.named.path else str(path.relative_to(source.named.path)), digest]
                    for path, digest in source.files.items()
                ],
            }
            for source in sources
        ],
        "tokenizer": tokenizer_digest,
        "stop_ids": list(stop_ids),
        "libraries": {name: version(name) for name in ("transformers", "tokenizers")},
        "settings": settings,
    }


def _reusable(directory: Path, inputs: Mapping[str, Any], pad_token_id: int) -> Preparation | None:
    try:
        manifest = read_manifest(directory)
        if manifest["inputs"] != inputs:
            return None
        verify_files(directory, manifest)
    except PreparedDataError:
        return None
    for facts in manifest["datasets"]:
        # JSON has turned numeric keys into strings, which become numbers again here.
        facts["lengths"] = {int(bound): count for bound, count in facts["lengths"].items()}
    return Preparation(
        findings=tuple(Finding.model_validate(finding) for finding in manifest["warnings"]),
        splits={split: SplitFacts(**facts) for split, facts in manifest["splits"].items()},
        datasets=tuple(DatasetFacts(**facts) for facts in manifest["datasets"]),
        inputs=inputs,
        pad_token_id=pad_token_id,
        staging=None,
        written_data_hash=manifest["data_hash"],
    )


def _tasks(sources: list[Source], settings: PartSettings, staging: Staging | None) -> Iterator[PartTask]:
    """Yield all tasks, held-out records first, so that training records can be compared with them."""
    parts = (
        part
        for split in (VALIDATION, TRAIN)
        for number, source in enumerate(sources)
        if source.named.split == split
        for path in source.files
        for part in file_parts(number, path)
    )
    for count, part in enumerate(parts):
        is_spoilt = any(source.sums.problems for source in sources) and not settings.goes_on
        is_spoilt = is_spoilt or any(source.sums.template_is_endless for source in sources)
        yield PartTask(part, settings, None if staging is None or is_spoilt else staging.scratch / f"part-{count}")


def _consume(
    results: Iterator[tuple[PartTask, PartResult]], sources: list[Source], staging: Staging | None, progress: PreparingProgress
) -> None:
    held_out = DocumentDigests()
    for task, result in results:
        source = sources[task.part.source]
        source.add(task.part, result)
        if task.result is not None:
            is_right = source.error is None and (task.settings.skips_invalid or not source.sums.problems)
            if staging is not None and is_right:
                with open_regular(tokens_file(task.result)) as tokens:
                    for documents in read_documents(task.result, result.num_documents):
                        source.digests.add(documents["digest"])
                        if source.named.split == VALIDATION:
                            held_out.add(documents["digest"])
                        else:
                            source.num_held_out += held_out.num_among(documents["digest"])
                        writer = staging.split(source.named.split)
                        writer.append_documents(tokens, documents["length"], documents["supervised"])
            tokens_file(task.result).unlink()
            documents_file(task.result).unlink()
        progress.advance(task.part.num_bytes)


def _write_plan(staging: Staging, split: str, members: list[Source], plan: DataPlan) -> SplitFacts:
    writer, results = staging.split(split), [source.sums for source in members]
    weighted = [source.weighted for source in members]
    counts = writer.write_plan(plan_windows(weighted, writer.counts, plan.max_sequence_length, plan.packing))
    return SplitFacts(
        num_records=sum(result.num_records for result in results),
        num_dropped=sum(result.num_dropped for result in results),
        longest_document=max(result.longest_document for result in results),
        largest_token_id=max(result.largest_token_id for result in results),
        **asdict(counts),
    )


def _log(splits: Mapping[str, SplitFacts], datasets: tuple[DatasetFacts, ...], max_sequence_length: int) -> None:
    for facts in datasets:
        log.info(
            "%s (%s): %d records, %d of them dropped, %d tokens, %d supervised; weight %g: %d records in a pass",
            facts.source, facts.split, facts.num_records, facts.num_dropped, facts.num_tokens, facts.num_supervised_tokens,
            facts.weight, facts.num_occurrences,
        )  # fmt: skip
    for split, counts in splits.items():
        filled = counts.num_tokens / (counts.num_sequences * max_sequence_length)
        log.info(
            "%s: %d sequences of up to %d tokens, %.1f %% full", split, counts.num_sequences, max_sequence_length, filled * 100
        )
