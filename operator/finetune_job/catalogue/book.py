"""All entries of the catalogue, and the only way to create a finding that does not come from a rule of the rule book."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, model_validator

from finetune_job.finding import FieldChange, Finding, Severity

_TOPICS = {
    "model_files": "Base model: files",
    "architecture": "Base model: architecture",
    "chat": "Tokenizer and chat template",
    "data": "Data",
    "adapter_names": "Adapters: names",
    "adapter_effect": "Adapters: effect",
    "sharding": "Sharding",
    "resources": "Manifest, storage, memory, rehearsal",
    "audit": "Audit of a run",
}
"""Name of a topic's TOML file -> title of the topic."""


class Gate(StrEnum):
    """The step of a job's admission, or the later activity, that reports a finding."""

    SCHEMA = "schema"
    """Parsing the manifest: in `finetune validate`, in the operator, and in the API server as far as the CRD schema allows."""
    RULES = "rules"
    """The rule book: `finetune validate` and the operator."""
    PREFLIGHT = "preflight"
    """The preflight pod, which checks the real model and data before any GPU is allocated; and `finetune run`."""
    REHEARSAL = "rehearsal"
    """The rehearsal at the end of preflight, and `finetune rehearse`."""
    AUDIT = "audit"
    """After a run has ended: `finetune audit` and `finetune reproduce`."""


class Entry(BaseModel, frozen=True, extra="forbid"):
    """The description of a finding that does not depend on a job.

    The module that reports the finding adds what differs from job to job: the field, the value, the message and the fix.
    """

    id: str
    severity: Severity | Literal["either"]
    """"either" if the finding is an error for some jobs and only a warning for others."""
    title: str
    """The problem, in one clause."""
    why: str
    """The consequence if nothing reported the problem, in one or two sentences."""
    fix: str
    """The remedy, in one sentence without a full stop."""
    reproduction: str = ""
    """The test that produces the finding: path of the module, `::` and the name of the test."""
    not_reproduced: str = ""
    """Why no test produces the finding; exactly one of this and `reproduction` is set."""
    gate: Gate = Gate.PREFLIGHT

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if bool(self.reproduction) == bool(self.not_reproduced):
            raise ValueError(f"{self.id}: an entry has either reproduction or not_reproduced")
        return self


class UndeclaredFindingError(LookupError):
    """A finding's id is not in the catalogue, or its severity differs from the declared one. This is a bug in this product."""


@cache
def topics() -> Mapping[str, tuple[Entry, ...]]:
    """Return the entries of each topic by its title. They are read on first use, which takes a few milliseconds."""
    return {title: _entries(file) for file, title in _TOPICS.items()}


def _entries(file: str) -> tuple[Entry, ...]:
    rows = tomllib.loads((Path(__file__).parent / f"{file}.toml").read_text(encoding="utf-8"))
    return tuple(Entry(id=identifier, **row) for identifier, row in rows.items())


@cache
def entries() -> Mapping[str, Entry]:
    """Return all entries by id. Raises ValueError if two have the same id."""
    listed = [entry for of_topic in topics().values() for entry in of_topic]
    by_id = {entry.id: entry for entry in listed}
    if len(by_id) != len(listed):
        raise ValueError("two entries have the same id")
    return by_id


def make_finding(
    identifier: str,
    *,
    field: str,
    value: str,
    message: str,
    fix: str,
    severity: Severity | None = None,
    changes: Mapping[str, Any] | None = None,
    is_proposal: bool = False,
) -> Finding:
    """Create a finding with a declared id.

    field: path in the object, such as `spec.model.source`. severity: only given if the catalogue says "either". changes: new
    values by path; None removes the field. is_proposal: whether the changes are only an example. The id may also be that of a
    rule, if preflight finds a problem of that kind which the rule itself cannot see.
    Raises UndeclaredFindingError.
    """
    declared = _declared_severity(identifier)
    if (severity is None) == (declared == "either"):
        raise UndeclaredFindingError(f"{identifier}: the severity is {declared}, and {severity} was given")
    return Finding(
        rule=identifier,
        severity=severity or ("error" if declared == "error" else "warning"),
        field=field,
        value=value,
        message=message,
        fix=fix,
        changes=tuple(FieldChange(field=path, value=new) for path, new in (changes or {}).items()),
        is_proposal=True if is_proposal else None,
    )


def audit_finding(identifier: str, *, field: str, value: str = "", message: str, fix: str = "") -> Finding:
    """Create a finding of an audit. field: the part of the run. fix: empty for the fix in the catalogue."""
    entry = entries().get(identifier)
    return make_finding(
        identifier, field=field, value=value, message=message, fix=fix or (entry.fix if entry is not None else "")
    )


def rehearsal_required(profile: str, verdict: str) -> Finding:
    """Refuse a job whose rehearsal did not pass. profile: the one that requires a rehearsal. verdict: its result in one word."""
    return make_finding(
        "rehearsal-required",
        field="spec.preflight.rehearsal",
        value=verdict,
        message=f"requireRehearsal of profile {profile}: a job trains only after a rehearsal that passed, and its verdict is "
        f"{verdict}.",
        fix="Increase spec.run.retry to try again; if time or memory ran out, raise resources.preflight of the profile first.",
    )


def _declared_severity(identifier: str) -> Severity | Literal["either"]:
    entry = entries().get(identifier)
    if entry is not None:
        return entry.severity
    # Imported here because loading the rules takes a tenth of a second, which would delay every process that prepares data.
    from finetune_job.rules.book import rule_by_id

    rule = rule_by_id(identifier)
    if rule is None:
        raise UndeclaredFindingError(f"{identifier} is not in the catalogue of findings")
    return rule.severity
