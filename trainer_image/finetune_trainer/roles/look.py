"""`python -m finetune_trainer.roles.look`: the first records of a job as training would see them, and their findings.

It serves the command line, which waits for it. It imports neither torch nor numpy nor most of transformers, and reads only the
first records of each source. Findings have the ids and the words of preflight, whose code it uses; what needs all of the data is
left to preflight.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from finetune_job.api.base import ClaimPath
from finetune_job.api.inputs import DataFormat, LossOn
from finetune_job.finding import Finding
from finetune_job.plan.mapping import MappingPlan
from finetune_job.plan.run_plan import AddedTokenPlan
from finetune_trainer.added_tokens import known_token
from finetune_trainer.data.findings import (
    MAX_KINDS,
    TRAIN,
    VALIDATION,
    SplitSource,
    also_held_out,
    empty,
    too_long,
    wrong_records,
)
from finetune_trainer.data.parse import read_keys
from finetune_trainer.data.read import NoRecordFilesError, Record, RecordProblem, read_file
from finetune_trainer.data.source_files import SourceFiles, find_files, find_shared
from finetune_trainer.data.tokenizer_files import (
    FileTokenizer,
    TokenizerFilesError,
    import_renderer,
    keep_rest_of_transformers_out,
)
from finetune_trainer.inspection.base_name import adapter_base_problem
from finetune_trainer.inspection.model_files import inspect_model_files
from finetune_trainer.preflight.places import not_vacant, not_writable
from finetune_trainer.processes.start import die_with, end, keep_torch_out

BATCH = 256
"""Number of records that are tokenised at a time."""


@dataclass(frozen=True)
class DataSettings:
    """Settings of a plan that decide how records become tokens."""

    format: DataFormat
    loss_on: LossOn
    max_sequence_length: int
    chat_template: str | None
    mapping: MappingPlan


@dataclass
class SourceLook:
    """Counts of one source."""

    split: str
    source: str
    files: int = 0
    records: int = 0
    """Number of records that were read, without problems."""
    is_whole: bool = True
    """Whether all of its records were read."""
    dropped: int = 0
    tokens: int = 0
    supervised: int = 0
    repeated: int = 0
    held_out: int = 0
    """Number of training records that are among the held-out ones that were read."""
    unread: dict[str, int] = field(default_factory=dict)
    """Keys of records that are not read -> number of records that have them."""
    lengths: dict[int, int] = field(default_factory=dict)
    """Histogram of lengths: the smallest power of two that holds the tokens -> number of records."""


def look(order: Mapping[str, Any]) -> dict[str, Any]:
    """Look at the first records of a job.

    order: `claims_root`, `settings`, `sources` with the fields of DatasetPlan, `model` (a directory, or None) and the job's
    `added_tokens`, `limit` and `shown` (records of each source), `only_existing` (missing sources are left out), `model_files` to
    look at and `places` to write to, or None.
    """
    root = Path(order["claims_root"])
    written = order["settings"]
    settings = DataSettings(
        DataFormat(written["format"]),
        LossOn(written["loss_on"]),
        written["max_sequence_length"],
        written["chat_template"],
        MappingPlan.model_validate(written["mapping"]),
    )
    sources = [_files_of(each, root) for each in order["sources"]]
    if order["only_existing"]:
        sources = [each for each in sources if not _is_absent(each)]
    findings = [*_check_places(order["places"], root), *_check_model(order["model_files"])]
    shared = find_shared((each.named, each.files, ()) for each in sources)
    added = [AddedTokenPlan(**each) for each in order["added_tokens"]]
    tokenizer, why_not, template_findings = _tokenizer(order["model"], settings, added)
    findings += template_findings
    looks, shown = [], []
    held_out: set[bytes] = set()
    # Held-out records come first, so that training records can be compared with them.
    for each in sorted(sources, key=lambda source: source.named.split != VALIDATION):
        seen, records, found_here = _look_at(each, settings, tokenizer, held_out, limit=order["limit"], num_shown=order["shown"])
        problem = shared.get(each.named)
        findings += [problem] if problem is not None else found_here
        looks.append(seen)
        shown += records
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


def _is_absent(source: SourceFiles) -> bool:
    return isinstance(source.error, FileNotFoundError) and not isinstance(source.error, NoRecordFilesError)


def _check_places(places: Mapping[str, Any] | None, root: Path) -> Iterator[Finding]:
    """Findings about the output, and about the workspace if the job is to run here."""
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
    """Findings about the base model's files, if they should be here.

    adapter_base: the plan's name of the base; None: no adapter.
    """
    if model is None:
        return ()
    directory = Path(model["directory"])
    findings = inspect_model_files(directory, model["address"], Path(model["claim"])).findings
    if findings or model["adapter_base"] is None:
        return findings
    named = adapter_base_problem(model["adapter_base"], directory)
    return () if named is None else (named,)


def _tokenizer(
    directory: str | None, settings: DataSettings, added: Sequence[AddedTokenPlan]
) -> tuple[FileTokenizer | None, str, list[Finding]]:
    """The tokenizer, or None, the reason in words, and findings.

    There is no finding if the files are not here, or are of another kind: preflight looks at them.
    """
    if directory is None or not (Path(directory) / "tokenizer.json").is_file():
        return None, "The tokenizer of the model is not on this machine", []
    from finetune_trainer.data.tokenizer import check_chat_template, unusable

    try:
        if settings.format is DataFormat.CHAT:
            import_renderer()
        plain = FileTokenizer(Path(directory))
        known = known_token(added, plain.vocabulary(), plain)
        if known is not None:
            return None, "The tokenizer cannot be used, as is said below", [known]
        tokenizer = FileTokenizer(Path(directory), added) if added else plain
    except ModuleNotFoundError as error:
        return None, f"The tokenizer cannot be read without {error.name}, which is not installed", []
    except (TokenizerFilesError, OSError) as error:
        found = unusable(Path(directory), f"the tokenizer does not load ({error})")
        return None, "The tokenizer cannot be used, as is said below", [found]
    if tokenizer.eos_token_id is None:
        return None, "The tokenizer has no token that ends a text", []
    findings = check_chat_template(settings, tokenizer, Path(directory), added)
    if any(finding.severity == "error" for finding in findings):
        return None, "The chat template cannot be used, as is said below", findings
    return tokenizer, "", findings


def _look_at(
    source: SourceFiles,
    settings: DataSettings,
    tokenizer: FileTokenizer | None,
    held_out: set[bytes],
    *,
    limit: int,
    num_shown: int,
) -> tuple[SourceLook, list[dict[str, Any]], list[Finding]]:
    named = source.named
    seen = SourceLook(named.split, named.address, files=len(source.files))
    if source.problem is not None:
        return seen, [], [source.problem]
    problems: dict[tuple[str, str], tuple[RecordProblem, int]] = {}
    shown: list[dict[str, Any]] = []
    own: set[bytes] = set()
    shortest = 0
    items = _items(source, settings)
    try:
        first = list(islice(items, limit + 1))
    except OSError as error:
        return seen, [], [replace(source, error=error).problem or empty(named)]
    seen.is_whole = len(first) <= limit
    for record, made in _made(first[:limit], settings, tokenizer):
        problem = made if isinstance(made, RecordProblem) else record if isinstance(record, RecordProblem) else None
        if problem is not None:
            before, count = problems.get(problem.kind, (problem, 0))
            problems[problem.kind] = (before, count + 1)
            continue
        seen.records += 1
        for key in set(record.keys) - set(read_keys(settings.format, settings.mapping, record.keys)):
            seen.unread[key] = seen.unread.get(key, 0) + 1
        length = 0 if made is None else len(made.input_ids)
        is_dropped = length > settings.max_sequence_length
        if not is_dropped:
            digest = _digest(record)
            seen.repeated += digest in own
            own.add(digest)
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
            place = f"{named.name(record.file or named.path)} {record.unit} {record.line}"
            shown.append({"split": named.split, "place": place, "tokens": length, "is_dropped": is_dropped, "pieces": pieces})
    if named.split == VALIDATION:
        held_out |= own
    seen.unread = dict(sorted(seen.unread.items()))
    seen.lengths = dict(sorted(seen.lengths.items()))
    findings = [*source.warnings, *wrong_records(named, list(problems.values())[:MAX_KINDS], seen.records)]
    if not first:
        findings.append(empty(named))
    if seen.held_out:
        findings.append(also_held_out(named, seen.held_out, seen.records - seen.dropped))
    if seen.dropped and (seen.is_whole or seen.dropped < seen.records):
        findings.append(too_long(named, seen.records, seen.dropped, shortest, settings.max_sequence_length))
    return seen, shown, findings


def _items(source: SourceFiles, settings: DataSettings) -> Iterator[Record | RecordProblem]:
    for path in source.files:
        yield from read_file(path, settings.format, mapping=settings.mapping)


def _made(
    items: Sequence[Record | RecordProblem], settings: DataSettings, tokenizer: FileTokenizer | None
) -> Iterator[tuple[Any, Any]]:
    """Each record with its TokenizedDocument, or with the problem that tokenising shows, or with None without a tokenizer."""
    if tokenizer is None:
        yield from ((item, None) for item in items)
        return
    from finetune_trainer.data.tokenize import EndlessTemplateError, tokenize

    for start in range(0, len(items), BATCH):
        batch = items[start : start + BATCH]
        records = [item for item in batch if isinstance(item, Record)]
        try:
            made = iter(tokenize(tokenizer, records, settings.loss_on, settings.chat_template))
        except EndlessTemplateError as error:
            yield error.problem, None
            return
        for item in batch:
            yield item, next(made) if isinstance(item, Record) else None


def _digest(record: Record) -> bytes:
    content = json.dumps([record.prompt, record.completion, record.messages, record.tools], sort_keys=True)
    return blake2b(content.encode(errors="replace"), digest_size=8).digest()


def _pieces(tokenizer: FileTokenizer, made: Any) -> list[tuple[str, bool]]:
    """The text in pieces that are entirely supervised or not."""
    pieces: list[tuple[list[int], bool]] = []
    for token, is_learnt in zip(made.input_ids, made.supervised, strict=True):
        if not pieces or pieces[-1][1] != is_learnt:
            pieces.append(([], is_learnt))
        pieces[-1][0].append(token)
    return [(tokenizer.decode(ids), is_learnt) for ids, is_learnt in pieces]


def _plain_pieces(record: Record) -> list[tuple[str, bool]]:
    """The text without a tokenizer, so without a template; which parts of a chat are learnt is then unknown."""
    if record.messages:
        return [(f"{turn['role']}: {turn['content']}\n", False) for turn in record.messages]
    return [(record.prompt, False), (record.completion, True)]


def main() -> int:
    """Answer the order on standard input with JSON on standard output."""
    # The process ends before collections would pay off.
    gc.disable()
    parser = argparse.ArgumentParser(prog="python -m finetune_trainer.roles.look", description=__doc__)
    parser.add_argument("--parent", type=int, required=True, help="process with which this one ends")
    parser.add_argument("--seconds", type=int, required=True, help="after which SIGALRM ends it")
    arguments = parser.parse_args()
    die_with(arguments.parent)
    # No code of this process can delay its end.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(arguments.seconds)
    answer = os.fdopen(os.dup(1), "w")
    # Output of libraries is no part of the answer.
    os.dup2(2, 1)
    keep_torch_out()
    keep_rest_of_transformers_out()
    json.dump(look(json.load(sys.stdin)), answer)
    answer.flush()
    return 0


if __name__ == "__main__":
    end(main())
