"""Findings of preflight about the data: file, line, key, value, reason, fix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from finetune_job.api.base import ClaimPath
from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_trainer.data.read import NoRecordFilesError, RecordProblem
from finetune_trainer.data.records import WEIGHT_UNIT
from finetune_trainer.data.suggestions import ROLES_PATH
from finetune_trainer.files import SpecialFileError
from finetune_trainer.likely_name import likely_address

TRAIN, VALIDATION = "train", "validation"
MAX_KINDS = 10
"""Kinds of mistakes reported per file; a file with more is most likely another kind of file."""


@dataclass(frozen=True)
class SplitSource:
    """A file or directory of records: where it is, and where the user named it."""

    split: str
    location: ClaimPath
    path: Path
    field: str
    """Manifest path of the source, such as `spec.data.source`."""
    written: str = ""
    """The source as the user wrote it; empty if that is the location itself."""

    @property
    def address(self) -> str:
        """How the user refers to the source."""
        return self.written or f"pvc://{self.location.claim}/{self.location.path}"

    def name(self, file: Path | str) -> str:
        """How the user refers to a file of the source."""
        below = Path(file).relative_to(self.path) if Path(file).is_relative_to(self.path) else Path()
        return self.address if below == Path() else f"{self.address.rstrip('/')}/{below}"


def unreadable(source: SplitSource, error: OSError) -> Finding:
    """The file is missing or cannot be read."""
    if isinstance(error, NoRecordFilesError):
        fix = "name a directory with such files, decompressed, or the file itself if it is JSON Lines of another name"
        return _of_source(source, "data-file-missing", str(error.strerror), fix)
    if isinstance(error, FileNotFoundError):
        missing = f"the file does not exist on claim {source.location.claim}"
        siblings = sorted(path.name for path in source.path.parent.glob("*")) if source.path.parent.is_dir() else []
        others = f"; its directory holds {', '.join(siblings[:8])}" if siblings else ""
        likely = likely_address(source.address, siblings)
        fix = (
            "put the file there or correct the path" if likely is None else f"set {source.field}: {likely}, or put the file there"
        )
        return _of_source(source, "data-file-missing", missing + others, fix)
    if isinstance(error, SpecialFileError):
        return _of_source(
            source, "data-file-unreadable", f"{source.name(error.filename)} {error.strerror}", "name a file of records"
        )
    file = "" if error.filename is None else f"{source.name(error.filename)} "
    return _of_source(
        source,
        "data-file-unreadable",
        f"{file}cannot be read ({error.strerror or error})",
        "let the group of the pods (the profile's fsGroup) read the file",
    )


def split_missing(source: SplitSource, wanted: Sequence[str], found: Sequence[str]) -> Finding:
    """No file of the directory is of the wanted split, or the file names do not name splits. found: the splits that they name."""
    field = f"{source.field.removesuffix('source')}split" if source.split == VALIDATION else "spec.data.split"
    named = f"its files are of the splits {', '.join(found)}" if found else "the names of its files tell no splits apart"
    return make_finding(
        "data-split-missing",
        field=field,
        value=" or ".join(wanted),
        message=f"{source.address} holds no file of that split: {named}",
        fix=f"set {field} to {' or '.join(found)}" if found else f"remove {field}, so that all files are read",
        changes={field: found[0]} if len(found) == 1 else {} if found else {field: None},
    )


def unsplit_files(source: SplitSource, split: str, left_out: Sequence[Path]) -> Finding:
    """Files that name no split, in a directory where others do."""
    shown = ", ".join(str(path.relative_to(source.path)) for path in left_out[:4])
    return _of_source(
        source,
        "data-files-left-out",
        f"{len(left_out)} of its files name no split and are not read ({shown}), since others do and {split} is wanted",
        "rename them, or name them as a source of their own in spec.data.datasets",
    )


def shared_files(source: SplitSource, held_out: SplitSource, files: Sequence[Path]) -> Finding:
    """Files of the training data that are also in the held-out source."""
    has_splits = source.path == held_out.path
    return make_finding(
        "data-held-out-in-training",
        field=held_out.field,
        value=held_out.address,
        message=f"{len(files)} of its files are trained on too ({', '.join(source.name(file) for file in files[:4])}), so the "
        "held-out loss would say nothing",
        fix="name a source of other records" + (", or one whose files name splits (train-*, validation-*)" if has_splits else ""),
    )


def empty(source: SplitSource) -> Finding:
    """The source has no record."""
    what = "its files hold" if source.path.is_dir() else "the file holds"
    return _of_source(source, "data-empty", f"{what} no record", "name a source with at least one record")


def wrong_records(source: SplitSource, problems: Iterable[tuple[RecordProblem, int]], num_right: int = 0) -> list[Finding]:
    """One finding for each kind of mistake: its first place, and in how many records it occurs. num_right: number of right
    records.
    """
    return [
        _of_records(
            source,
            "data-preference-pairs" if problem.are_preferences else "data-record-invalid",
            problem if num_right < count or _leaves_others(problem) else _as_others_are(problem),
            count,
        )
        for problem, count in problems
    ]


def _leaves_others(problem: RecordProblem) -> bool:
    """Whether the suggested change of the manifest, if there is one, does not affect the right records."""
    return all(path.startswith(ROLES_PATH) for path in problem.changes)


def _as_others_are(problem: RecordProblem) -> RecordProblem:
    """Replace the suggested change of the manifest, which would make the right records wrong."""
    what = repr(problem.key) if problem.key else "it"
    return replace(problem, fix=f"write {what} as the other records of this source have it", changes={})


def content_dropped(source: SplitSource, problems: Iterable[tuple[RecordProblem, int]]) -> list[Finding]:
    """One finding for each kind of content that a chat template does not write."""
    return [_of_records(source, "chat-words-left-out", *found) for found in problems]


def _of_records(source: SplitSource, rule: str, problem: RecordProblem, count: int) -> Finding:
    key = f" key {problem.key!r}" if problem.key else ""
    more = f" (and the same on {count - 1} more {problem.unit}{'s' if count > 2 else ''})" if count > 1 else ""
    file = source.address if problem.file is None else source.name(problem.file)
    return make_finding(
        rule,
        field=source.field,
        value=problem.value,
        message=f"{file} {problem.unit} {problem.line}:{key} {problem.reason}{more}",
        fix=problem.fix,
        changes=problem.changes,
    )


def too_long(source: SplitSource, num_records: int, num_dropped: int, shortest: int, limit: int) -> Finding:
    """Records beyond maxSequenceLength: either some of them, which are dropped, or all, so that no record is left."""
    everything = num_dropped == num_records
    message = (
        f"{source.address}: all {num_records} records are longer than {limit} tokens, so nothing is left"
        if everything
        else f"{source.address}: {num_dropped} of {num_records} records are longer than {limit} tokens and are dropped"
    )
    return make_finding(
        "data-all-too-long" if everything else "data-records-dropped",
        field="spec.data.maxSequenceLength",
        value=str(limit),
        message=f"{message}; the shortest of them has {shortest}",
        fix=f"raise spec.data.maxSequenceLength to {shortest} or more, or split long records",
    )


def unknown_text(source: SplitSource, num_unknown: int, num_tokens: int) -> Finding:
    """Text for which the tokenizer has no tokens. It is an error if it makes up half of the tokens."""
    return make_finding(
        "data-unknown-tokens",
        severity="error" if 2 * num_unknown >= num_tokens else "warning",
        field=source.field,
        value=source.address,
        message=f"{num_unknown} of its {num_tokens} tokens are the tokenizer's unknown token: the text has words or letters that "
        "the tokenizer does not know, and the model would learn to write that token",
        fix="use a model whose tokenizer knows this language or script, or clean the text",
    )


def never_used(source: SplitSource, weight: float, num_records: int) -> Finding:
    """The weight is so small that no record of the source occurs in a pass."""
    return make_finding(
        "data-weight-without-records",
        field=source.field.removesuffix("source") + "weight",
        value=f"{weight:g}",
        message=f"{source.address} has {num_records} records, and with this weight none of them occurs in a pass",
        # Rounded up: even a weight that is a millionth too small leaves out the only record.
        fix=f"set the weight to {-(-WEIGHT_UNIT // num_records) / WEIGHT_UNIT:.6f} or more, or remove the data set",
    )


def also_held_out(source: SplitSource, num_records: int, num_all: int) -> Finding:
    """Training records that are also held out, token for token."""
    return make_finding(
        "data-held-out-in-training",
        field=source.field,
        value=source.address,
        message=f"{num_records} of its {num_all} records are held out in spec.data.validation too, so the held-out loss would "
        "look better than it is",
        fix="remove these records from the training data or from the held-out data",
    )


def repeated(source: SplitSource, num_repeated: int, num_all: int) -> Finding:
    """Records that equal an earlier one of the same source, token for token."""
    return make_finding(
        "data-records-repeated",
        field=source.field,
        value=source.address,
        message=f"{num_repeated} of its {num_all} records equal an earlier one, so they are learnt as often as they occur",
        fix="remove the repetitions; to learn a data set more than once, set its weight",
    )


def _of_source(source: SplitSource, rule: str, message: str, fix: str) -> Finding:
    return make_finding(rule, field=source.field, value=source.address, message=message, fix=fix)
