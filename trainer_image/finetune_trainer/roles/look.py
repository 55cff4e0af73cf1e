"""`python -m finetune_trainer.roles.look`: shows a job's first records as training would see them, with findings.

The command line starts it and waits. It imports neither torch nor numpy nor most of transformers, and reads only the first
records of each source. It uses preflight's code, so findings have the same ids and texts. Checks that need all of the data are
left to preflight.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from typing import Any

from finetune_job.api.base import ClaimPath
from finetune_job.api.inputs import DataFormat, OnInvalidRecord
from finetune_job.finding import Finding
from finetune_job.plan.run_plan import AddedTokenPlan, DataPlan, RunPlan
from finetune_trainer.added_tokens import known_token
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
    too_long,
)
from finetune_trainer.data.read import NoRecordFilesError, Record, RecordProblem, read_file
from finetune_trainer.data.records import MAX_PLACES, MAX_WORDS, CountedProblems, count_left_out, count_problem, count_unread
from finetune_trainer.data.source_files import SourceFiles, find_files, find_shared
from finetune_trainer.data.steps import check_lengths
from finetune_trainer.data.tokenizer_files import (
    FileTokenizer,
    TokenizerFilesError,
    import_renderer,
    keep_rest_of_transformers_out,
)
from finetune_trainer.inspection.base_name import adapter_base_problem
from finetune_trainer.inspection.model_files import inspect_model_files
from finetune_trainer.preflight.places import not_vacant, not_writable
from finetune_trainer.processes.start import answer_on_stdout, die_with, end, keep_torch_out

BATCH = 256
"""Number of records that are tokenised at a time."""


@dataclass
class SourceLook:
    """Counts of one source."""

    split: str
    source: str
    files: int = 0
    records: int = 0
    """Number of records that were read without problems."""
    is_whole: bool = True
    """Whether all records of the source were read."""
    dropped: int = 0
    tokens: int = 0
    supervised: int = 0
    repeated: int = 0
    held_out: int = 0
    """Number of training records that equal one of the held-out records that were read."""
    unread: dict[str, int] = field(default_factory=dict)
    """Key of records that the job does not use -> number of records that have it."""
    lengths: dict[int, int] = field(default_factory=dict)
    """Histogram of lengths: number of tokens, rounded up to a power of two -> number of records."""


def look(order: Mapping[str, Any]) -> dict[str, Any]:
    """Look at the first records of a job.

    order: `claims_root`; the job's `plan`; `sources` on this machine, with the fields of DatasetPlan; `model`, a directory
    or None; `limit` and `shown`, numbers of records of each source to read and to return; `only_existing`, to leave out missing
    sources; `model_files` to check and `places` to be written to, each None to skip its checks.
    """
    root = Path(order["claims_root"])
    plan = RunPlan.model_validate(order["plan"])
    data = plan.data
    sources = [_files_of(dataset, root) for dataset in order["sources"]]
    if order["only_existing"]:
        # A directory that exists but has no files of records is not left out.
        sources = [
            source
            for source in sources
            if not isinstance(source.error, FileNotFoundError) or isinstance(source.error, NoRecordFilesError)
        ]
    findings = [*_check_places(order["places"], root), *_check_model(order["model_files"])]
    shared = find_shared((source.named, source.files, ()) for source in sources)
    tokenizer, why_not, template_findings = _tokenizer(order["model"], data, plan.model.added_tokens)
    findings += template_findings
    stop_ids: tuple[int, ...] = ()
    if tokenizer is not None and data.format is DataFormat.CHAT:
        from finetune_trainer.data.tokenizer import generation_stops

        stop_ids = tuple(sorted(generation_stops(tokenizer, Path(order["model"]))))
    looks, shown = [], []
    held_out: set[bytes] = set()
    lengths: dict[str, list[int]] = {}
    # Held-out records come first, so that training records can be compared with them.
    for source in sorted(sources, key=lambda source: source.named.split != VALIDATION):
        seen, records, source_findings = _look_at(
            source, data, tokenizer, stop_ids, held_out=held_out, lengths=lengths, limit=order["limit"], num_shown=order["shown"]
        )
        problem = shared.get(source.named)
        findings += [problem] if problem is not None else source_findings
        looks.append(seen)
        shown += records
    # As in preflight, steps are counted only if all records are known and valid.
    if all(dataset.field in lengths for dataset in data.train) and all(found.severity != "error" for found in findings):
        findings += check_lengths(plan, lengths)
    return {
        "findings": [finding.model_dump(mode="json") for finding in findings],
        "sources": [asdict(seen) for seen in sorted(looks, key=lambda seen: seen.split != TRAIN)],
        "records": sorted(shown, key=lambda record: record["split"] != TRAIN),
        "why_no_tokens": why_not,
    }


def _files_of(dataset: Mapping[str, Any], root: Path) -> SourceFiles:
    location = ClaimPath(**dataset["location"])
    named = SplitSource(dataset["split"], location, root / location.claim / location.path, dataset["field"], dataset["source"])
    return find_files(named, dataset["splits"], is_chosen=dataset["split_is_chosen"])


def _check_places(places: Mapping[str, Any] | None, root: Path) -> Iterator[Finding]:
    """Yield findings about the places that the job writes to: the output, and the workspace if the job is to run here."""
    if places is None:
        return
    for name, location in places["written"].items():
        problem = not_writable(name, ClaimPath(**location), root)
        if problem is not None:
            yield problem
    if places["results"]:
        problem = not_vacant("spec.output.destination", ClaimPath(**places["output"]), [Path(path) for path in places["results"]])
        if problem is not None:
            yield problem


def _check_model(model: Mapping[str, Any] | None) -> Sequence[Finding]:
    """Return findings about the base model's files. `model` is None if the files need not be on this machine.

    The key adapter_base is the plan's name of the base, or None without an adapter.
    """
    if model is None:
        return ()
    directory = Path(model["directory"])
    findings = inspect_model_files(directory, model["address"], Path(model["claim"])).findings
    if not findings:
        from finetune_trainer.data.tokenizer import no_tokenizer

        findings = tuple(filter(None, [no_tokenizer(directory)]))
    if findings or model["adapter_base"] is None:
        return findings
    named = adapter_base_problem(model["adapter_base"], directory)
    return () if named is None else (named,)


def _tokenizer(
    directory: str | None, data: DataPlan, added: Sequence[AddedTokenPlan]
) -> tuple[FileTokenizer | None, str, list[Finding]]:
    """Return the tokenizer or None, the reason if it is None, and findings.

    Files that are not on this machine, or that this code cannot read, cause no finding: preflight checks them.
    """
    if directory is None or not (Path(directory) / "tokenizer.json").is_file():
        return None, "The tokenizer of the model is not on this machine", []
    from finetune_trainer.data.tokenizer import check_chat_template, unusable

    try:
        if data.format is DataFormat.CHAT:
            import_renderer()
        plain = FileTokenizer(Path(directory))
        known = known_token(added, plain.vocabulary(), plain)
        if known is not None:
            return None, "The tokenizer cannot be used (see below)", [known]
        tokenizer = FileTokenizer(Path(directory), added) if added else plain
    except ModuleNotFoundError as error:
        return None, f"The tokenizer cannot be read without {error.name}, which is not installed", []
    except (TokenizerFilesError, OSError) as error:
        problem = unusable(Path(directory), f"the tokenizer does not load ({error})")
        return None, "The tokenizer cannot be used (see below)", [problem]
    if tokenizer.eos_token_id is None:
        return None, "The tokenizer has no end-of-sequence token", []
    findings = check_chat_template(data, tokenizer, Path(directory), added)
    if any(finding.severity == "error" for finding in findings):
        return None, "The chat template cannot be used (see below)", findings
    return tokenizer, "", findings


def _look_at(
    source: SourceFiles,
    data: DataPlan,
    tokenizer: FileTokenizer | None,
    stop_ids: tuple[int, ...],
    *,
    held_out: set[bytes],
    lengths: dict[str, list[int]],
    limit: int,
    num_shown: int,
) -> tuple[SourceLook, list[dict[str, Any]], list[Finding]]:
    named = source.named
    seen = SourceLook(named.split, named.address, files=len(source.files))
    if source.problem is not None:
        return seen, [], [source.problem]
    problems: CountedProblems = {}
    places: list[str] = []
    left_out: CountedProblems = {}
    shown: list[dict[str, Any]] = []
    own: set[bytes] = set()
    kept: list[int] = []
    shortest = 0
    items = chain.from_iterable(read_file(path, data.format, mapping=data.mapping) for path in source.files)
    try:
        first = list(islice(items, limit + 1))
    except OSError as error:
        return seen, [], [replace(source, error=error).problem or empty(named)]
    seen.is_whole = len(first) <= limit
    for record, made in _made(first[:limit], data, tokenizer, stop_ids):
        problem = made if isinstance(made, RecordProblem) else record if isinstance(record, RecordProblem) else None
        if problem is not None:
            count_problem(problems, problem)
            if len(places) < MAX_PLACES:
                places.append(f"{named.place(problem)}: {problem.words[:MAX_WORDS]}")
            continue
        seen.records += 1
        if isinstance(record, Record):
            count_unread(seen.unread, record.unread)
        length = 0 if made is None else len(made.input_ids)
        is_dropped = length > data.max_sequence_length
        if not is_dropped:
            digest = _digest(record)
            seen.repeated += digest in own
            own.add(digest)
            kept.append(length)
            count_left_out(left_out, () if made is None else made.left_out)
            seen.held_out += named.split == TRAIN and digest in held_out
        if made is not None:
            bound = 1 << (length - 1).bit_length()
            seen.lengths[bound] = seen.lengths.get(bound, 0) + 1
            seen.dropped += is_dropped
            shortest = min(shortest or length, length) if is_dropped else shortest
            seen.tokens += 0 if is_dropped else length
            seen.supervised += 0 if is_dropped else sum(made.supervised)
        if len(shown) < num_shown:
            pieces = _plain_pieces(record) if made is None or tokenizer is None else _pieces(tokenizer, made)
            place = named.place(record)
            shown.append({"split": named.split, "place": place, "tokens": length, "is_dropped": is_dropped, "pieces": pieces})
    if named.split == VALIDATION:
        held_out |= own
    seen.unread = dict(sorted(seen.unread.items()))
    seen.lengths = dict(sorted(seen.lengths.items()))
    must_fail = data.on_invalid_record is OnInvalidRecord.FAIL or any(problem.is_of_source for problem, _ in problems.values())
    counts = sum(count for _, count in problems.values()), seen.records
    invalid = invalid_records(named, problems, places, counts, can_skip=not must_fail, is_whole=seen.is_whole)
    if any(finding.severity == "error" for finding in invalid):
        # As in preflight, leave out other findings, which may change once the records are correct.
        return seen, shown, invalid
    if named.split == TRAIN and seen.is_whole and tokenizer is not None:
        lengths[named.field] = kept
    findings = [
        *invalid,
        *source.warnings,
        *keys_unread(named, seen.unread, data.format, data.mapping),
        *content_dropped(named, list(left_out.values())[:MAX_KINDS]),
    ]
    if not first:
        findings.append(empty(named))
    if seen.held_out:
        findings.append(also_held_out(named, seen.held_out, seen.records - seen.dropped))
    if seen.dropped and (seen.is_whole or seen.dropped < seen.records):
        findings.append(too_long(named, seen.records, seen.dropped, shortest, data.max_sequence_length))
    return seen, shown, findings


def _made(
    items: Sequence[Record | RecordProblem], data: DataPlan, tokenizer: FileTokenizer | None, stop_ids: tuple[int, ...]
) -> Iterator[tuple[Any, Any]]:
    """Yield each record with its TokenizedDocument or the problem in tokenising it, or with None if there is no tokenizer."""
    if tokenizer is None:
        yield from ((item, None) for item in items)
        return
    from finetune_trainer.data.tokenize import EndlessTemplateError, tokenize, with_something_learnt

    for start in range(0, len(items), BATCH):
        batch = items[start : start + BATCH]
        records = [item for item in batch if isinstance(item, Record)]
        try:
            made = iter(
                tokenize(
                    tokenizer,
                    records,
                    data.loss_on,
                    data.chat_template,
                    stop_ids=stop_ids,
                    template_arguments=data.template_arguments,
                )
            )
        except EndlessTemplateError as error:
            yield error.problem, None
            return
        for item in batch:
            yield item, with_something_learnt(item, next(made)) if isinstance(item, Record) else None


def _digest(record: Record) -> bytes:
    content = json.dumps([record.prompt, record.completion, record.messages, record.tools], sort_keys=True, default=repr)
    return blake2b(content.encode(errors="replace"), digest_size=8).digest()


def _pieces(tokenizer: FileTokenizer, made: Any) -> list[tuple[str, bool]]:
    """Split the text into supervised and unsupervised pieces."""
    pieces: list[tuple[list[int], bool]] = []
    for token, is_learnt in zip(made.input_ids, made.supervised, strict=True):
        if not pieces or pieces[-1][1] != is_learnt:
            pieces.append(([], is_learnt))
        pieces[-1][0].append(token)
    return [(tokenizer.decode(ids), is_learnt) for ids, is_learnt in pieces]


def _plain_pieces(record: Record) -> list[tuple[str, bool]]:
    """Return the record's text if there is no tokenizer. Without a template, it is unknown which parts of a chat are learnt."""
    if record.messages:
        return [(f"{turn['role']}: {turn['content']}\n", False) for turn in record.messages]
    return [(record.prompt, False), (record.completion, True)]


def main() -> int:
    """Answer the order on standard input with JSON on standard output."""
    # The process ends before garbage collection would pay off.
    gc.disable()
    parser = argparse.ArgumentParser(prog="python -m finetune_trainer.roles.look", description=__doc__)
    parser.add_argument("--parent", type=int, required=True, help="process with which this one ends")
    parser.add_argument("--seconds", type=int, required=True, help="time after which SIGALRM ends this process")
    arguments = parser.parse_args()
    die_with(arguments.parent)
    # With the default handler, no code in this process can delay its end.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(arguments.seconds)
    with answer_on_stdout() as answer:
        keep_torch_out()
        keep_rest_of_transformers_out()
        answer.write(json.dumps(look(json.load(sys.stdin))).encode())
    return 0


if __name__ == "__main__":
    end(main())
