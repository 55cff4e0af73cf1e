"""Prepares one part of a file at a time: reads and tokenises records, writes the result to files, and reports problems.

Called in each worker process (worker.py), or in the preparing process itself if there are no workers. Memory is needed only for
one batch of records, whatever the size of the part. The result does not depend on where or when a part is prepared.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

from finetune_job.api.inputs import DataFormat, OnInvalidRecord
from finetune_job.plan.run_plan import DataPlan
from finetune_trainer.data.read import Record, RecordProblem, can_be_parted, read_file
from finetune_trainer.data.records import (
    Count,
    CountedProblems,
    InvalidPlaces,
    UnreadKeys,
    count_left_out,
    count_problem,
    count_unread,
    list_place,
)
from finetune_trainer.data.render_limit import RecordNote
from finetune_trainer.data.shards import TOKEN_TYPE, encode
from finetune_trainer.data.tokenize import EndlessTemplateError, TokenizedDocument, Tokenizer, tokenize, with_something_learnt
from finetune_trainer.errors import TrainerError
from finetune_trainer.files import open_regular

PART_BYTES = 4 << 20
"""Size of the parts into which a file is split if its format allows it. This is fixed: another size would change the findings."""
BATCH_RECORDS, BATCH_CHARACTERS = 256, 1 << 18
"""Largest batch for the tokenizer. Larger ones are no faster, and a tokenised record takes about fifty times its size."""
DOCUMENT_TYPE = np.dtype([("length", "<u4"), ("supervised", "<u4"), ("digest", "<u8")])
"""Row that is stored for each document in addition to its tokens: token counts, and a 64-bit BLAKE2b digest of its token ids."""

READ_DOCUMENTS = 1 << 16
"""Number of DOCUMENT_TYPE rows that are read at a time."""


class PartFilesError(TrainerError):
    """The files of a part do not match its result."""


@dataclass(frozen=True)
class PartSettings:
    """Settings that decide how records become documents."""

    plan: DataPlan
    stop_ids: tuple[int, ...] = ()
    """Tokens at which generation stops. A turn that calls a tool may end with a different token than a turn of plain text."""

    @property
    def skips_invalid(self) -> bool:
        """Whether invalid records are skipped, as long as they are only a small share of the source."""
        return self.plan.on_invalid_record is OnInvalidRecord.SKIP

    @property
    def goes_on(self) -> bool:
        """Whether records after an invalid one are tokenised: to use them, or because only tokenising finds their problems."""
        return self.skips_invalid or self.plan.format is DataFormat.CHAT


@dataclass(frozen=True)
class FilePart:
    """Some records of one file."""

    source: int
    """Index of the source that the file belongs to."""
    path: Path
    span: tuple[int, int] | None
    """Start and stop in bytes; None for the whole file."""
    num_bytes: int


@dataclass(frozen=True)
class PartTask:
    """A part of a file and what to do with it."""

    part: FilePart
    settings: PartSettings
    result: Path | None
    """Path to which suffixes are added: `<result>.tokens`, `<result>.documents`. If None, the part's records are only checked."""


@dataclass
class PartResult:
    """Counts and problems of a part. A worker process may send it, so messages.py checks its types."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    num_records: Count = 0
    num_documents: Count = 0
    num_dropped: Count = 0
    shortest_dropped: Count = 0
    """Number of tokens of the shortest dropped record; 0 if no record was dropped."""
    num_tokens: Count = 0
    num_supervised_tokens: Count = 0
    longest_document: Count = 0
    largest_token_id: Annotated[int, Field(ge=-1, lt=1 << 31)] = -1
    num_unknown_tokens: Count = 0
    """Number of unknown tokens; 0 if the tokenizer also uses its unknown token for something else."""
    lengths: Annotated[dict[Count, Count], Field(max_length=64)] = field(default_factory=dict)
    """Histogram of record lengths: length rounded up to a power of two -> number of records, including dropped ones."""
    problems: CountedProblems = field(default_factory=dict)
    num_invalid: Count = 0
    invalid_places: InvalidPlaces = field(default_factory=list)
    must_fail: bool = False
    """Whether a problem concerns more than a single record, so that no record may be skipped."""
    left_out: CountedProblems = field(default_factory=dict)
    """Content of kept records that a chat template leaves out, counted once per record and kind of problem."""
    unread: UnreadKeys = field(default_factory=dict)
    unreadable: OSError | None = None
    template_is_endless: bool = False
    """Whether the chat template did not finish for a record; later records were then not rendered."""

    def found_length(self, length: int, count: int = 1) -> None:
        """Count records with this number of tokens."""
        bound = 1 << (length - 1).bit_length()
        self.lengths[bound] = self.lengths.get(bound, 0) + count

    def found_problem(self, problem: RecordProblem) -> None:
        """Count a problem."""
        count_problem(self.problems, problem)
        self.num_invalid += 1
        self.must_fail |= problem.is_of_source
        list_place(self.invalid_places, problem)

    def found_endless(self, problem: RecordProblem) -> None:
        """Count the record for which the template did not finish."""
        self.found_problem(problem)
        self.template_is_endless = True


def file_parts(source: int, path: Path) -> Iterator[FilePart]:
    """Yield the parts of a file in order. Raises OSError."""
    size = path.stat().st_size
    if not can_be_parted(path):
        yield FilePart(source, path, None, size)
        return
    for start in range(0, size, PART_BYTES):
        stop = min(start + PART_BYTES, size)
        yield FilePart(source, path, (start, stop), stop - start)


def tokens_file(result: Path) -> Path:
    """Path of the token ids and mask of the documents, in the form that shards.py stores."""
    return result.with_suffix(".tokens")


def documents_file(result: Path) -> Path:
    """Path of the file that holds a DOCUMENT_TYPE for each document."""
    return result.with_suffix(".documents")


def work_on(task: PartTask, tokenizer: Tokenizer | None, note: RecordNote | None = None) -> PartResult:
    """Do the task. An unreadable file is reported in the result; OSError means that the result cannot be written.

    Unless `goes_on`, records after the first invalid one are only parsed: the job cannot run anyway, and parsing alone is much
    faster. note: as in `tokenize`.
    """
    result, settings, plan = PartResult(), task.settings, task.settings.plan
    if task.result is None or tokenizer is None:
        for records in _batches(task, result):
            result.num_records += len(records)
        return result
    unknown_id: int | None = getattr(tokenizer, "unk_token_id", None)
    # GPT-2's unknown token is also its end-of-text token. It never stands for unknown text, since its tokens consist of bytes.
    if unknown_id in [getattr(tokenizer, f"{use}_token_id", None) for use in ("bos", "eos", "pad")]:
        unknown_id = None
    with tokens_file(task.result).open("wb") as tokens, documents_file(task.result).open("wb") as table:
        for records in _batches(task, result):
            result.num_records += len(records)
            if result.template_is_endless or (result.problems and not settings.goes_on):
                continue
            try:
                made = tokenize(
                    tokenizer,
                    records,
                    plan.loss_on,
                    plan.chat_template,
                    note,
                    stop_ids=settings.stop_ids,
                    template_arguments=plan.template_arguments,
                )
            except EndlessTemplateError as error:
                result.found_endless(error.problem)
                continue
            kept = _kept(records, made, plan.max_sequence_length, result)
            if kept:
                stored, rows = _stored(kept, result, unknown_id)
                tokens.write(stored)
                table.write(rows)
    return result


def _batches(task: PartTask, result: PartResult) -> Iterator[list[Record]]:
    """Yield batches of records whose tokens fit in memory. Problems and I/O errors go into `result`."""
    batch: list[Record] = []
    characters = 0
    items = read_file(task.part.path, task.settings.plan.format, task.part.span, task.settings.plan.mapping)
    while True:
        try:
            item = next(items, None)
        except OSError as error:
            result.unreadable = error
            item = None
        if isinstance(item, RecordProblem):
            result.found_problem(item)
            continue
        if batch and (item is None or len(batch) == BATCH_RECORDS or characters >= BATCH_CHARACTERS):
            yield batch
            batch, characters = [], 0
        if item is None:
            return
        count_unread(result.unread, item.unread)
        batch.append(item)
        characters += len(item.prompt) + len(item.completion) + sum(len(str(turn.get("content"))) for turn in item.messages)


def _kept(
    records: list[Record], made: list[TokenizedDocument | RecordProblem], max_sequence_length: int, result: PartResult
) -> list[TokenizedDocument]:
    kept = []
    for record, document in zip(records, made, strict=True):
        document = with_something_learnt(record, document)
        if isinstance(document, RecordProblem):
            result.found_problem(document)
            result.num_records -= 1
            continue
        length = len(document.input_ids)
        result.found_length(length)
        if length <= max_sequence_length:
            kept.append(document)
            count_left_out(result.left_out, document.left_out)
            continue
        result.num_dropped += 1
        result.shortest_dropped = min(result.shortest_dropped or length, length)
    return kept


def _stored(documents: list[TokenizedDocument], result: PartResult, unknown_id: int | None) -> tuple[bytes, bytes]:
    lengths = np.array([len(document.input_ids) for document in documents], dtype=np.int64)
    num_tokens = int(lengths.sum())
    ids = np.fromiter(chain.from_iterable(document.input_ids for document in documents), dtype=TOKEN_TYPE, count=num_tokens)
    mask = np.fromiter(chain.from_iterable(document.supervised for document in documents), dtype=np.bool_, count=num_tokens)
    stops = np.cumsum(lengths)
    rows = np.zeros(len(documents), dtype=DOCUMENT_TYPE)
    rows["length"] = lengths
    rows["supervised"] = np.add.reduceat(mask, stops - lengths, dtype=np.int64)
    encoded = ids.data.cast("B")
    bounds = zip((stops - lengths).tolist(), stops.tolist(), strict=True)
    size = TOKEN_TYPE.itemsize
    digests = b"".join(blake2b(encoded[start * size : stop * size], digest_size=8).digest() for start, stop in bounds)
    rows["digest"] = np.frombuffer(digests, dtype="<u8")
    result.num_documents += len(documents)
    result.num_tokens += num_tokens
    result.num_supervised_tokens += int(rows["supervised"].sum(dtype=np.int64))
    result.longest_document = max(result.longest_document, int(lengths.max()))
    result.largest_token_id = max(result.largest_token_id, int(ids.max()))
    if unknown_id is not None:
        result.num_unknown_tokens += int((ids == unknown_id).sum())
    return encode(ids, mask).tobytes(), rows.tobytes()


def read_documents(result: Path, num_documents: int) -> Iterator[NDArray[Any]]:
    """Yield arrays of DOCUMENT_TYPE that `work_on` wrote, in blocks that fit in memory. Raises PartFilesError.

    num_documents: the number that the part's result states; a worker process may have sent that result.
    """
    with open_regular(documents_file(result)) as file:
        size = os.fstat(file.fileno()).st_size
        if size != num_documents * DOCUMENT_TYPE.itemsize:
            raise PartFilesError(f"{documents_file(result)} has {size} bytes, which are not {num_documents} documents")
        while block := file.read(READ_DOCUMENTS * DOCUMENT_TYPE.itemsize):
            yield np.frombuffer(block, dtype=DOCUMENT_TYPE)
