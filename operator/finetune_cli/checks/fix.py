"""`finetune validate --fix`: manifests with the fixes of all findings made, until no finding has one that a program can make."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from finetune_cli.checks.validate import DocumentOutcome, Profiles, judge, known_profiles
from finetune_cli.documents import Document, DocumentError, is_list, read_documents
from finetune_cli.edit_yaml import edit_document
from finetune_cli.manifest import is_meant_as_job, parse_job
from finetune_job.api.job import FineTuneJob
from finetune_job.finding import Finding
from finetune_job.names import JOB_KIND
from finetune_job.rules.book import rule_by_id
from finetune_job.rules.rule import with_changes

Records = Callable[[FineTuneJob], Sequence[Finding]]
"""Returns the findings of the first records of a job that the rules accept."""
MAX_FIXES = 200
"""Most fixes of a document: each clears its finding for good, and there are fewer rules."""


@dataclass
class FixedFile:
    """One file after its fixes."""

    name: str
    text: str
    made: list[tuple[str, Finding]] = field(default_factory=list)
    """Name of a job and the finding whose changes were made in it, in the order in which they were made."""


def fix(files: Sequence[tuple[str, str]], profile: str | None = None, records: Records | None = None) -> list[FixedFile]:
    """Make the changes of every finding in every FineTuneJob of the files, by name and text; not those that a person has to
    weigh, and none that names an example in place of a value that only the author knows. records: unset, they are not looked at.

    What is not a job stays as it is.
    """
    fixed = [FixedFile(name, text) for name, text in files]
    documents = [_documents(file) for file in fixed]
    profiles = known_profiles([each for group in documents for each in group], profile)
    for file, group in zip(fixed, documents, strict=True):
        for document in group:
            content = _fixed(document.content, profiles, records, file.made)
            # Compared as text: 1000.0 is no whole number, and true is not 1.
            if json.dumps(content) != json.dumps(document.content):
                file.text = edit_document(file.text, document.number, content)
    return fixed


def _is_for_programs(finding: Finding) -> bool:
    rule = rule_by_id(finding.rule)
    return bool(finding.changes) and not finding.is_proposal and not (rule is not None and rule.needs_human)


def _documents(file: FixedFile) -> list[Document]:
    try:
        return read_documents(file.text, file.name)
    except DocumentError:
        return []


def _fixed(content: Any, profiles: Profiles, records: Records | None, made: list[tuple[str, Finding]]) -> Any:
    if is_list(content):
        return content | {"items": [_fixed(item, profiles, records, made) for item in content["items"]]}
    if not isinstance(content, dict):
        return content
    if is_meant_as_job(content.get("kind")):
        content = content | {"kind": JOB_KIND}
    if content.get("kind") != JOB_KIND:
        return content
    before: list[str] = []
    first = len(made)
    for _ in range(MAX_FIXES):
        text = json.dumps(content, sort_keys=True)
        if text in before:
            # Of two kinds of records in one file, each may have a fix that makes the other wrong: what was undone is not told.
            del made[first + before.index(text) :]
            break
        finding = next(filter(_is_for_programs, _findings(content, profiles, records)), None)
        if finding is None:
            break
        before.append(text)
        metadata = content.get("metadata")
        made.append((str(metadata.get("name", "")) if isinstance(metadata, dict) else "", finding))
        content = with_changes(content, finding.changes)
    return content


def _findings(content: Any, profiles: Profiles, records: Records | None) -> Iterator[Finding]:
    job = parse_job(content)
    if isinstance(job, list):
        yield from job
        return
    outcome, findings = judge(job, profiles.of(job))
    yield from findings
    # Reading them takes long, so it is done only if the rules leave nothing to fix.
    if records is not None and outcome is DocumentOutcome.ACCEPTED:
        yield from records(job)
