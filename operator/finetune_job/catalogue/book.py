"""All entries, and the one way to make a finding that is not made by a rule of the rule book."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from finetune_job.catalogue.adapters import EFFECT_ENTRIES, NAME_ENTRIES
from finetune_job.catalogue.audit import AUDIT_ENTRIES
from finetune_job.catalogue.data import CHAT_ENTRIES, RECORD_ENTRIES
from finetune_job.catalogue.entry import EITHER, Entry
from finetune_job.catalogue.model import ARCHITECTURE_ENTRIES, FILE_ENTRIES, SHARDING_ENTRIES
from finetune_job.catalogue.resources import RESOURCE_ENTRIES
from finetune_job.finding import FieldChange, Finding, Severity

TOPICS: Mapping[str, tuple[Entry, ...]] = {
    "Base model: files": FILE_ENTRIES,
    "Base model: architecture": ARCHITECTURE_ENTRIES,
    "Tokenizer and chat template": CHAT_ENTRIES,
    "Data": RECORD_ENTRIES,
    "Adapters: names": NAME_ENTRIES,
    "Adapters: effect": EFFECT_ENTRIES,
    "Sharding": SHARDING_ENTRIES,
    "Manifest, storage, memory, rehearsal": RESOURCE_ENTRIES,
    "Audit of a run": AUDIT_ENTRIES,
}
ENTRIES: tuple[Entry, ...] = tuple(entry for entries in TOPICS.values() for entry in entries)
_BY_ID = {entry.id: entry for entry in ENTRIES}
if len(_BY_ID) != len(ENTRIES):
    raise ValueError("two entries have the same id")


class UndeclaredFindingError(LookupError):
    """A finding of an id that the catalogue does not have, or of another severity than it declares: a mistake in this product."""


def entry_by_id(identifier: str) -> Entry | None:
    """The entry of that id, if there is one."""
    return _BY_ID.get(identifier)


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
    """A finding of a declared id.

    field: path in the object, such as `spec.model.source`. severity: given only if the catalogue says "either". changes: new
    values by path, None to remove the field. is_proposal: whether they are an example. An id of the rule book is for what only
    preflight sees of the same problem.
    Raises UndeclaredFindingError.
    """
    declared = _declared_severity(identifier)
    if (severity is None) == (declared == EITHER):
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
    """What the audit of a run found. field: the part of the run. fix: empty: as the catalogue says."""
    entry = _BY_ID.get(identifier)
    return make_finding(
        identifier, field=field, value=value, message=message, fix=fix or (entry.fix if entry is not None else "")
    )


def rehearsal_required(profile: str, verdict: str) -> Finding:
    """The refusal of a job whose rehearsal did not pass. profile: that requires one. verdict: of the rehearsal, in one word."""
    return make_finding(
        "rehearsal-required",
        field="spec.preflight.rehearsal",
        value=verdict,
        message=f"requireRehearsal of profile {profile}: a job trains only after a rehearsal that passed, and this one's is "
        f"{verdict}.",
        fix="Increase spec.run.retry to try again; if time or memory ran out, raise resources.preflight of the profile first.",
    )


def _declared_severity(identifier: str) -> Severity | Literal["either"]:
    entry = _BY_ID.get(identifier)
    if entry is not None:
        return entry.severity
    # Loading the rules takes a tenth of a second, which the processes that prepare data do without.
    from finetune_job.rules.book import rule_by_id

    rule = rule_by_id(identifier)
    if rule is None:
        raise UndeclaredFindingError(f"{identifier} is not in the catalogue of findings")
    return rule.severity
