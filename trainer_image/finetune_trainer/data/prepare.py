"""Source files + tokenizer -> prepared data on the workspace, or findings that say what is wrong with the records.

Called by preflight, once per job; a second call with the same inputs reuses what the first one wrote. Checking and writing are
apart, so that nothing is written where anything else speaks against the run.
The pieces: read.py, tokenize.py, pack.py, shards.py.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from finetune_job.plan.run_plan import DataPlan
from finetune_job.rules.rule import Finding
from finetune_trainer.data.findings import MAX_KINDS, SplitSource, empty, too_long, unreadable, wrong_records
from finetune_trainer.data.pack import one_document_each, pack
from finetune_trainer.data.read import Record, RecordProblem, read_records
from finetune_trainer.data.shards import (
    TRAIN,
    VALIDATION,
    PreparedDataError,
    SplitArrays,
    read_manifest,
    verify_files,
    write_prepared,
)
from finetune_trainer.data.tokenize import Tokenizer, tokenize
from finetune_trainer.files import file_sha256

RECORDS_AT_ONCE = 1024
"""Records held as text at a time; the tokenizer is fastest on batches."""

TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken")
"""Patterns of files that decide how text becomes tokens."""


@dataclass(frozen=True)
class SplitFacts:
    """Counts of one split."""

    num_records: int
    num_dropped: int
    """Longer than maxSequenceLength."""
    num_sequences: int
    num_tokens: int
    num_supervised_tokens: int
    longest_document: int
    """Tokens of the longest record that is kept."""
    largest_token_id: int


@dataclass(frozen=True)
class Preparation:
    """Checked data that is ready to be written, or that stands on the workspace already."""

    findings: tuple[Finding, ...]
    splits: Mapping[str, SplitFacts]
    """Splits without an error."""
    arrays: Mapping[str, SplitArrays]
    inputs: Mapping[str, Any]
    """What decided the arrays: equal inputs, equal data."""
    pad_token_id: int
    written_data_hash: str = ""
    """Data hash of what stands there already; empty where it has to be written."""


def split_sources(plan: DataPlan, claims_root: Path) -> list[SplitSource]:
    """The files that the plan names."""
    sources = [SplitSource(TRAIN, plan.train, claims_root / plan.train.claim / plan.train.path, "spec.data.source")]
    if plan.validation:
        path = claims_root / plan.validation.claim / plan.validation.path
        sources.append(SplitSource(VALIDATION, plan.validation, path, "spec.data.validation.source"))
    return sources


def prepare(plan: DataPlan, claims_root: Path, model_directory: Path, tokenizer: Tokenizer | None, directory: Path) -> Preparation:
    """Read, check and tokenise the plan's records, unless `directory` holds the same already. Writes nothing.

    Without a tokenizer (it did not load) the records are only checked.
    """
    sources = split_sources(plan, claims_root)
    findings: list[Finding] = []
    digests: dict[str, str] = {}
    for source in sources:
        try:
            digests[source.split] = file_sha256(source.path)
        except OSError as error:
            findings.append(unreadable(source, error))
    inputs = _inputs(plan, digests, model_directory)
    pad_token_id = -1 if tokenizer is None else int(tokenizer.eos_token_id)
    if tokenizer is not None and not findings:
        reusable = _reusable(directory, inputs, pad_token_id)
        if reusable is not None:
            return reusable
    splits: dict[str, SplitFacts] = {}
    arrays: dict[str, SplitArrays] = {}
    for source in sources:
        if source.split in digests:
            built, found = _build(source, plan, tokenizer)
            findings += found
            if built is not None:
                arrays[source.split], splits[source.split] = built
    return Preparation(tuple(findings), splits, arrays, inputs, pad_token_id)


def write(preparation: Preparation, directory: Path) -> str:
    """Write what was prepared; the data hash. Must have no error finding. Raises OSError as the file system does."""
    if preparation.written_data_hash:
        return preparation.written_data_hash
    facts = {
        "inputs": preparation.inputs,
        "pad_token_id": preparation.pad_token_id,
        "splits": {split: asdict(facts) for split, facts in preparation.splits.items()},
        "warnings": [finding.model_dump(mode="json") for finding in preparation.findings],
    }
    return write_prepared(directory, preparation.arrays, facts)


def _inputs(plan: DataPlan, digests: Mapping[str, str], model_directory: Path) -> dict[str, Any]:
    """Everything that decides the prepared bytes: equal inputs, equal data."""
    files = sorted({path for pattern in TOKENIZER_FILES for path in model_directory.glob(pattern) if path.is_file()})
    tokenizer_digest = hashlib.sha256(json.dumps([[path.name, file_sha256(path)] for path in files]).encode()).hexdigest()
    return {
        "sources": dict(digests),
        "tokenizer": tokenizer_digest,
        "libraries": {name: version(name) for name in ("transformers", "tokenizers")},
        "settings": plan.model_dump(mode="json", include={"format", "max_sequence_length", "packing", "loss_on"}),
    }


def _reusable(directory: Path, inputs: Mapping[str, Any], pad_token_id: int) -> Preparation | None:
    try:
        manifest = read_manifest(directory)
        if manifest["inputs"] != inputs:
            return None
        verify_files(directory, manifest)
    except PreparedDataError:
        return None
    return Preparation(
        findings=tuple(Finding.model_validate(finding) for finding in manifest["warnings"]),
        splits={split: SplitFacts(**facts) for split, facts in manifest["splits"].items()},
        arrays={},
        inputs=inputs,
        pad_token_id=pad_token_id,
        written_data_hash=manifest["data_hash"],
    )


def _build(
    source: SplitSource, plan: DataPlan, tokenizer: Tokenizer | None
) -> tuple[tuple[SplitArrays, SplitFacts] | None, list[Finding]]:
    tokens, supervised, lengths = array("i"), bytearray(), array("q")
    too_long_lengths: list[int] = []
    problems: dict[tuple[str, str], tuple[RecordProblem, int]] = {}
    num_records = 0
    try:
        for block in _blocks(read_records(source.path, plan.format)):
            records = [item for item in block if isinstance(item, Record)]
            for problem in (item for item in block if isinstance(item, RecordProblem)):
                first, count = problems.get((problem.key, problem.fix), (problem, 0))
                problems[problem.key, problem.fix] = (first, count + 1)
            num_records += len(records)
            if tokenizer is None or problems:
                continue
            for document in tokenize(tokenizer, records, plan.loss_on):
                if len(document.input_ids) > plan.max_sequence_length:
                    too_long_lengths.append(len(document.input_ids))
                    continue
                tokens.extend(document.input_ids)
                supervised.extend(document.supervised)
                lengths.append(len(document.input_ids))
    except OSError as error:
        return None, [unreadable(source, error)]
    if problems:
        return None, wrong_records(source, list(problems.values())[:MAX_KINDS])
    if num_records == 0:
        return None, [empty(source)]
    findings = []
    if too_long_lengths:
        num_dropped = len(too_long_lengths)
        findings.append(too_long(source, num_records, num_dropped, min(too_long_lengths), plan.max_sequence_length))
    if not lengths:
        return None, findings
    sequences = pack(lengths, plan.max_sequence_length) if plan.packing else one_document_each(len(lengths))
    arrays = _arrays(np.frombuffer(tokens, np.int32), np.frombuffer(supervised, np.bool_), np.asarray(lengths), sequences)
    facts = SplitFacts(
        num_records=num_records,
        num_dropped=len(too_long_lengths),
        num_sequences=len(sequences),
        num_tokens=len(tokens),
        num_supervised_tokens=int(arrays.supervised_tokens.sum()),
        longest_document=max(lengths),
        largest_token_id=max(tokens),
    )
    return (arrays, facts), findings


def _blocks(items: Iterator[Record | RecordProblem]) -> Iterator[list[Record | RecordProblem]]:
    while block := list(islice(items, RECORDS_AT_ONCE)):
        yield block


def _arrays(tokens: Any, supervised: Any, lengths: Any, sequences: Sequence[Sequence[int]]) -> SplitArrays:
    """Documents rearranged so that each sequence is one stretch of the token array, which a batch can map with one read.

    Copied document by document: index arrays over all tokens would take ten times the memory of the tokens.
    """
    order = np.asarray([document for sequence in sequences for document in sequence], dtype=np.int64)
    sequence_ends = np.cumsum([len(sequence) for sequence in sequences])
    starts = np.cumsum(lengths) - lengths
    document_ends = np.cumsum(lengths[order])
    moved_tokens, moved_supervised = np.empty_like(tokens), np.empty_like(supervised)
    for document, end in zip(order.tolist(), document_ends.tolist(), strict=True):
        start, length = int(starts[document]), int(lengths[document])
        moved_tokens[end - length : end] = tokens[start : start + length]
        moved_supervised[end - length : end] = supervised[start : start + length]
    sequence_starts = np.concatenate([[0], document_ends[sequence_ends - 1][:-1]])
    return SplitArrays(
        tokens=moved_tokens,
        supervised=moved_supervised,
        document_ends=document_ends,
        sequence_ends=sequence_ends,
        supervised_tokens=np.add.reduceat(moved_supervised, sequence_starts, dtype=np.int64),
    )
