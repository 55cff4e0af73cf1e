"""`finetune validate --fix`: applies the safe fixes of findings to manifests, one by one, until none is left."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from finetune_cli.checks.commits import with_commits
from finetune_cli.checks.validate import DocumentOutcome, Profiles, judge, known_profiles
from finetune_cli.documents import Document, DocumentError, is_list, read_documents
from finetune_cli.edit_yaml import edit_document
from finetune_cli.manifest import is_meant_as_job, parse_job
from finetune_job.api.job import FineTuneJob
from finetune_job.finding import Finding
from finetune_job.names import JOB_KIND
from finetune_job.rules.book import rule_by_id
from finetune_job.rules.rule import with_changes
from finetune_job.rules.sources import NO_COMMIT, WITHOUT_COMMIT

Records = Callable[[FineTuneJob], Sequence[Finding]]
"""Returns the findings on a job's first records; called only for a job that the rules accept."""
MAX_FIXES = 200
"""Maximum number of fixes per document. It is never reached: there are fewer rules, and a fix resolves its finding for good."""


@dataclass
class FixedFile:
    """One file with its fixes applied."""

    name: str
    text: str
    made: list[tuple[str, Finding]] = field(default_factory=list)
    """Pairs of a job's name and a finding whose changes were applied to that job, in the order in which they were applied."""


def fix(files: Sequence[tuple[str, str]], profile: str | None = None, records: Records | None = None) -> list[FixedFile]:
    """Apply the safe changes of all findings to every FineTuneJob in the files, given as pairs of name and text.

    Changes that need a human decision, and placeholders for values that only the author knows, are not safe. Other objects stay
    unchanged. If `records` is None, the first records are not checked.
    """
    fixed = [FixedFile(name, text) for name, text in files]
    documents: list[list[Document]] = []
    for file in fixed:
        documents.append([])
        with suppress(DocumentError):
            documents[-1] = read_documents(file.text, file.name)
    profiles = known_profiles([each for group in documents for each in group], profile)
    for file, group in zip(fixed, documents, strict=True):
        for document in group:
            content = _fixed(document.content, profiles, records, file.made)
            # Compared as text, because 1000.0 == 1000 and True == 1 in Python.
            if json.dumps(content) != json.dumps(document.content):
                file.text = edit_document(file.text, document.number, content)
    return fixed


def _is_for_programs(finding: Finding) -> bool:
    rule = rule_by_id(finding.rule)
    needs_human = rule is not None and rule.needs_human and (rule.id != WITHOUT_COMMIT or NO_COMMIT in str(finding.changes))
    return bool(finding.changes) and not finding.is_proposal and not needs_human


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
            # If a file has two kinds of records, the fix for one may break the other. Fixes that undo each other are not listed.
            del made[first + before.index(text) :]
            break
        found = (with_commits(finding, content) for finding in _findings(content, profiles, records))
        finding = next(filter(_is_for_programs, found), None)
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
    # Reading records is slow, so it is done only once the rules accept the job.
    if records is not None and outcome is DocumentOutcome.ACCEPTED:
        yield from records(job)
