"""Makes preflight's findings about the data, with file, line, key, value, reason and fix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune_job.api.base import ClaimPath
from finetune_job.api.inputs import DataFormat
from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_job.plan.mapping import MappingPlan
from finetune_trainer.data.other_keys import IGNORED_FIELD
from finetune_trainer.data.read import NoRecordFilesError, Record, RecordProblem
from finetune_trainer.data.records import WEIGHT_UNIT, CountedProblems
from finetune_trainer.data.suggestions import ROLES_PATH, suggest_reading
from finetune_trainer.files import SpecialFileError
from finetune_trainer.likely_name import likely_address

TRAIN, VALIDATION = "train", "validation"
MAX_KEYS = 8
"""Maximum number of unread keys that a finding names."""
MAX_SKIPPED_SHARE = 0.05
"""Largest share of a source's records that `onInvalidRecord: Skip` skips. Beyond it, the source likely has another format."""
MAX_KINDS = 10
"""Maximum number of kinds of mistakes reported per source; a file with more is most likely in another format."""


@dataclass(frozen=True)
class SplitSource:
    """A file or directory of records: where it is, and which manifest field names it."""

    split: str
    location: ClaimPath
    path: Path
    field: str
    """Manifest path of the source, such as `spec.data.source`."""
    written: str = ""
    """The source as the user wrote it; empty if the user wrote the location itself."""

    @property
    def address(self) -> str:
        """The source as the user refers to it."""
        return self.written or f"pvc://{self.location.claim}/{self.location.path}"

    def name(self, file: Path | str) -> str:
        """Return the path of one of the source's files as the user refers to it."""
        below = Path(file).relative_to(self.path) if Path(file).is_relative_to(self.path) else Path()
        return self.address if below == Path() else f"{self.address.rstrip('/')}/{below}"

    def place(self, item: Record | RecordProblem) -> str:
        """Return the place of a record as the user refers to it."""
        return f"{self.address if item.file is None else self.name(item.file)} {item.unit} {item.line}"


def unreadable(source: SplitSource, error: OSError) -> Finding:
    """The finding that the file is missing or cannot be read."""
    if isinstance(error, NoRecordFilesError):
        fix = "name a directory with such files, decompressed, or the file itself if it is JSON Lines of another name"
        return _of_source(source, "data-file-missing", str(error.strerror), fix)
    if isinstance(error, FileNotFoundError):
        missing = f"the file does not exist on claim {source.location.claim}"
        siblings = sorted(path.name for path in source.path.parent.glob("*")) if source.path.parent.is_dir() else []
        others = f"; its directory holds {', '.join(siblings[:8])}" if siblings else ""
        likely = likely_address(source.address, siblings)
        fix = "correct the path" if likely is None else f"set {source.field}: {likely}"
        return _of_source(source, "data-file-missing", missing + others, f"{fix}, or put the file there")
    if isinstance(error, SpecialFileError):
        message, fix = f"{source.name(error.filename)} {error.strerror}", "name a file of records"
    else:
        file = "" if error.filename is None else f"{source.name(error.filename)} "
        message = f"{file}cannot be read ({error.strerror or error})"
        fix = "let the group of the pods (the profile's fsGroup) read the file"
    return _of_source(source, "data-file-unreadable", message, fix)


def split_missing(source: SplitSource, wanted: Sequence[str], named_splits: Sequence[str]) -> Finding:
    """The finding that no file belongs to the wanted split. named_splits: the splits that file names mention."""
    field = f"{source.field.removesuffix('source')}split" if source.split == VALIDATION else "spec.data.split"
    named = (
        f"its files are of the splits {', '.join(named_splits)}"
        if named_splits
        else "the names of its files do not distinguish splits"
    )
    return _of_source(
        source,
        "data-split-missing",
        f"{source.address} holds no file of that split: {named}",
        f"set {field} to {' or '.join(named_splits)}" if named_splits else f"remove {field} so that all files are read",
        field=field,
        value=" or ".join(wanted),
        changes={field: named_splits[0]} if len(named_splits) == 1 else {} if named_splits else {field: None},
    )


def unsplit_files(source: SplitSource, split: str, left_out: Sequence[Path]) -> Finding:
    """The finding that some file names in a directory mention no split, although others do."""
    shown = ", ".join(str(path.relative_to(source.path)) for path in left_out[:4])
    return _of_source(
        source,
        "data-files-left-out",
        f"{len(left_out)} of its files name no split and are not read ({shown}), since others do and the split {split} is wanted",
        "rename them, or name them as a source of their own in spec.data.datasets",
    )


def shared_files(source: SplitSource, held_out: SplitSource, files: Sequence[Path]) -> Finding:
    """The finding that files of the training data are also in the held-out source."""
    files_shown = ", ".join(source.name(file) for file in files[:4])
    splits = ", or one whose files name splits (train-*, validation-*)" if source.path == held_out.path else ""
    return _of_source(
        held_out,
        "data-held-out-in-training",
        f"{len(files)} of its files are trained on too ({files_shown}), so the held-out loss would say nothing",
        f"name a source of other records{splits}",
    )


def empty(source: SplitSource) -> Finding:
    """The finding that the source has no record."""
    what = "its files hold" if source.path.is_dir() else "the file holds"
    return _of_source(source, "data-empty", f"{what} no record", "name a source with at least one record")


def wrong_records(source: SplitSource, problems: Iterable[tuple[RecordProblem, int]], num_right: int = 0) -> list[Finding]:
    """Return one finding per kind of mistake, with its first place and number of records. num_right: number of valid records."""
    findings = []
    for problem, count in problems:
        rule = "data-preference-pairs" if problem.are_preferences else "data-record-invalid"
        if num_right >= count and not all(path.startswith(ROLES_PATH) for path in problem.changes):
            # At least as many records are valid, and the suggested manifest change would make them invalid.
            what = repr(problem.key) if problem.key else "it"
            problem = replace(problem, fix=f"write {what} as the other records of this source have it", changes={})
        findings.append(_of_records(source, rule, problem, count))
    return findings


def invalid_records(
    source: SplitSource,
    problems: CountedProblems,
    places: Sequence[str],
    counts: tuple[int, int],
    *,
    can_skip: bool,
    is_whole: bool = True,
) -> list[Finding]:
    """The findings about records that cannot be used: a warning if they are skipped, else errors, one for each kind of mistake.

    places: the first such records and their problems. counts: of invalid and of valid records. can_skip: whether the job asks to
    skip and each problem concerns only one record. is_whole: whether all records are counted; if not, the share is not judged.
    """
    (num_wrong, num_right), wrong = counts, wrong_records(source, list(problems.values())[:MAX_KINDS], counts[1])
    if not can_skip or not problems:
        return wrong
    are_many = is_whole and num_wrong > MAX_SKIPPED_SHARE * (num_wrong + num_right)
    done = f"more than the {100 * MAX_SKIPPED_SHARE:g} % that can be skipped" if are_many else "and are skipped"
    if not is_whole:
        done = f"and are skipped if they are at most {100 * MAX_SKIPPED_SHARE:g} % of the source"
    first = "" if is_whole else "the first "
    listed = "; ".join([*places, *([f"and {num_wrong - len(places)} more"] if num_wrong > len(places) else [])])
    skipped = _of_source(
        source,
        "data-records-skipped",
        f"{num_wrong} of {first}{num_wrong + num_right} records cannot be used, {done}: {listed}",
        "correct them, or remove them from the source",
        severity="error" if are_many else "warning",
    )
    return [skipped, *wrong] if are_many else [skipped]


def content_dropped(source: SplitSource, problems: Iterable[tuple[RecordProblem, int]]) -> list[Finding]:
    """One finding for each kind of content that a chat template does not write."""
    return [_of_records(source, "chat-words-left-out", problem, count) for problem, count in problems]


def keys_unread(source: SplitSource, unread: Mapping[str, int], data_format: DataFormat, mapping: MappingPlan) -> list[Finding]:
    """The finding that records have keys which are not read; none if there are no such keys. unread: key -> number of records."""
    if not unread:
        return []
    shown = [f"{key!r} ({count} record{'s' if count > 1 else ''})" for key, count in sorted(unread.items())]
    more = f" and {len(shown) - MAX_KEYS} more" if len(shown) > MAX_KEYS else ""
    advice = [advice for key in sorted(unread) if (advice := suggest_reading(key, data_format, mapping))]
    fix = "; ".join([*advice[:MAX_KEYS], f"name keys without meaning in {IGNORED_FIELD}"])
    message = f"its records have keys that are not read: {', '.join(shown[:MAX_KEYS])}{more}"
    return [_of_source(source, "data-keys-unread", message, fix)]


def _of_records(source: SplitSource, rule: str, problem: RecordProblem, count: int) -> Finding:
    more = f" (and the same on {count - 1} more {problem.unit}{'s' if count > 2 else ''})" if count > 1 else ""
    message = f"{source.place(problem)}: {problem.words}{more}"
    return _of_source(source, rule, message, problem.fix, value=problem.value, changes=problem.changes)


def too_long(source: SplitSource, num_records: int, num_dropped: int, shortest: int, limit: int) -> Finding:
    """The finding that some records exceed maxSequenceLength and are dropped, or that all records do and none is left."""
    field = "spec.data.maxSequenceLength"
    if num_dropped == num_records:
        rule, message = "data-all-too-long", f"all {num_records} records are longer than {limit} tokens, so nothing is left"
    else:
        rule = "data-records-dropped"
        message = f"{num_dropped} of {num_records} records are longer than {limit} tokens and are dropped"
    message = f"{source.address}: {message}; the shortest of them has {shortest}"
    fix = f"raise {field} to {shortest} or more, or split long records"
    return _of_source(source, rule, message, fix, field=field, value=str(limit))


def unknown_text(source: SplitSource, num_unknown: int, num_tokens: int) -> Finding:
    """The finding that the tokenizer has no tokens for some text. It is an error if half of the tokens are unknown."""
    return _of_source(
        source,
        "data-unknown-tokens",
        f"{num_unknown} of its {num_tokens} tokens are the tokenizer's unknown token: the text has words or letters that the "
        "tokenizer does not know, and the model would learn to write that token",
        "use a model whose tokenizer knows this language or script, or clean the text",
        severity="error" if 2 * num_unknown >= num_tokens else "warning",
    )


def never_used(source: SplitSource, weight: float, num_records: int) -> Finding:
    """The finding that the weight is so small that no record of the source occurs in a pass."""
    return _of_source(
        source,
        "data-weight-without-records",
        f"{source.address} has {num_records} records, and with this weight none of them occurs in a pass",
        # Rounded up, because a weight that is a millionth too small leaves out the only record.
        f"set the weight to {-(-WEIGHT_UNIT // num_records) / WEIGHT_UNIT:.6f} or more, or remove the data set",
        field=source.field.removesuffix("source") + "weight",
        value=f"{weight:g}",
    )


def also_held_out(source: SplitSource, num_records: int, num_all: int) -> Finding:
    """The finding that training records equal held-out records, token for token."""
    return _of_source(
        source,
        "data-held-out-in-training",
        f"{num_records} of its {num_all} records are held out in spec.data.validation too, so the held-out loss would look "
        "better than it is",
        "remove these records from the training data or from the held-out data",
    )


def repeated(source: SplitSource, num_repeated: int, num_all: int) -> Finding:
    """The finding that records equal an earlier record of the same source, token for token."""
    return _of_source(
        source,
        "data-records-repeated",
        f"{num_repeated} of its {num_all} records equal an earlier one, so they are learnt as often as they occur",
        "remove the repetitions; to learn a data set more than once, set its weight",
    )


def _of_source(source: SplitSource, rule: str, message: str, fix: str, **more: Any) -> Finding:
    """Make a finding about a source. more: fields that add to, or replace, those taken from the source."""
    return make_finding(rule, **{"field": source.field, "value": source.address, **more}, message=message, fix=fix)
