"""Carries out `Actions`: one status write, then deletes, ungates, creates and events, in the order that `decide.actions`
explains. Also reports failing passes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import BaseModel

from finetune_job.api.status import FineTuneJobStatus
from finetune_job.conditions import job_phase
from finetune_operator.cache.cache import Cache
from finetune_operator.cache.projection import utc_now
from finetune_operator.children.placement import GATES_ANNOTATION
from finetune_operator.client.answers import ApiError, ApiUnreachableError, Document
from finetune_operator.client.api import Api
from finetune_operator.client.kinds import BATCH_JOBS, CACHED, CHILD_KINDS, DELETED_KINDS, JOBS, JobKey, Kind
from finetune_operator.client.object_key import belongs_to, object_key
from finetune_operator.decide.actions import Actions, Create, Delete, Ungate
from finetune_operator.decide.operator_error import with_operator_error
from finetune_operator.decide.seen.observed import JobView
from finetune_operator.decide.seen.stage import is_started
from finetune_operator.decide.seen.times import timestamp
from finetune_operator.passes.gather import Gathered, Gatherer
from finetune_operator.passes.recorder import EventRecorder


class PassOutcome(StrEnum):
    """How a pass ended."""

    UNCHANGED = "unchanged"
    """The pass had nothing to do."""
    ACTED = "acted"
    """Something has changed: status was written, a delete was accepted, a gate was removed, or a new child was created."""
    REPEATED = "repeated"
    """Nothing has changed: all actions were already done, or are not possible now."""
    OUTDATED = "outdated"
    """The job or its place in line had changed since the job was observed, so nothing was done."""
    GONE = "gone"
    """The job had been deleted in the meantime."""


LONGEST_WORDS = 600
_SECRETS = re.compile(r"(?<=://)[^/@\s]+@|(?i:\bbearer\s+)\S+|\beyJ[\w-]+\.[\w.-]+")
"""Matches tokens, and user names and passwords in URLs."""


@dataclass(frozen=True)
class Executor:
    """Carries out the actions of passes, and stores the server's answers in the cache."""

    api: Api
    cache: Cache
    gatherer: Gatherer
    recorder: EventRecorder
    now: Callable[[], datetime] = utc_now
    status_written: Callable[[JobView, FineTuneJobStatus], None] = lambda _job, _after: None
    """Called for each status that the server has accepted, with the previous job and the new status."""

    async def execute(self, gathered: Gathered, actions: Actions) -> PassOutcome:
        """Carry out the actions. Raises ApiError or ApiUnreachableError; actions that were already carried out stay in effect,
        and the next pass continues from there.
        """
        job = gathered.observed.job
        patch = {} if actions.status is None else merge_patch(gathered.raw_status, status_document(actions.status))
        if patch and actions.status is not None:
            line = gathered.observed.line if starts(job, actions) else None
            if line is None:
                refused = await self._write_status(job, actions.status, patch)
            else:
                refused = await self._start(job, line.limit, actions.status, patch)
            if refused is not None:
                return refused
        has_effect = bool(patch)
        for delete in actions.deletes:
            has_effect |= await self._delete(job, delete)
        for ungate in actions.ungates:
            has_effect |= await self._ungate(job, ungate)
        for create in actions.creates:
            if not self.gatherer.may_create(job.uid, self.now()):
                break
            has_effect |= await self._create(job, create)
        for event in actions.events:
            self.recorder.record(job, event)
        if has_effect:
            return PassOutcome.ACTED
        decided = actions.deletes or actions.ungates or actions.creates
        return PassOutcome.REPEATED if decided else PassOutcome.UNCHANGED

    async def _start(self, job: JobView, limit: int, status: FineTuneJobStatus, patch: Document) -> PassOutcome | None:
        """Write the status that starts a job, if the limit of active jobs leaves room for it."""
        lines = self.cache.lines
        async with lines.starting:
            if lines.unsettled is not None:
                await self._read_again(lines.unsettled)
                lines.unsettled = None
            cached = self.cache.job_of_uid(job.uid)
            if cached is not None and lines.ahead_of(cached) >= limit:
                return PassOutcome.OUTDATED
            lines.unsettled = JobKey(job.namespace, job.name)
            outcome = await self._write_status(job, status, patch)
            lines.unsettled = None
            return outcome

    async def _write_status(self, job: JobView, status: FineTuneJobStatus, patch: Document) -> PassOutcome | None:
        body = {"metadata": {"resourceVersion": job.resource_version, "uid": job.uid}, "status": patch}
        try:
            written = await self.api.patch(JOBS, job.namespace, job.name, body, subresource="status")
        except ApiError as error:
            if error.is_not_found:
                return PassOutcome.GONE
            if not error.is_conflict:
                raise
            return await self._read_again(JobKey(job.namespace, job.name))
        self.cache.take(JOBS, written)
        self.status_written(job, status)
        return None

    async def _read_again(self, key: JobKey) -> PassOutcome:
        """Read a job again, because it has changed since it was observed."""
        current = await self.api.get(JOBS, key.namespace, key.name)
        if current is None:
            return PassOutcome.GONE
        self.cache.take(JOBS, current)
        return PassOutcome.OUTDATED

    async def _delete(self, job: JobView, delete: Delete) -> bool:
        """Delete a child. Returns whether the server accepted the deletion."""
        kind = DELETED_KINDS[delete.kind]
        try:
            answer = await self.api.delete(kind, job.namespace, delete.name, uid=delete.uid, force=delete.force)
        except ApiError as error:
            # With these errors, the object is already gone or another object has its name, so there is nothing to delete.
            if not (error.is_not_found or error.is_conflict):
                raise
            if kind in CACHED:
                self.cache.found_gone(kind, delete.uid)
            return False
        if kind in CACHED and answer.get("kind") == kind.name:
            self.cache.take(kind, answer)
        elif kind in CACHED:
            self.cache.found_gone(kind, delete.uid)
        return True

    async def _ungate(self, job: JobView, ungate: Ungate) -> bool:
        """Remove a gate. Returns whether anything has changed: the gates, or our knowledge that the server refuses the write."""
        metadata = {"uid": ungate.uid, "annotations": {GATES_ANNOTATION: ",".join(ungate.remaining) or None}}
        try:
            self.cache.take(BATCH_JOBS, await self.api.patch(BATCH_JOBS, job.namespace, ungate.name, {"metadata": metadata}))
        except ApiError as error:
            if error.is_not_found or error.is_conflict:
                self.cache.found_gone(BATCH_JOBS, ungate.uid)
                return False
            if not error.is_refusal:
                raise
            self.gatherer.note_refusal(job.uid, BATCH_JOBS, ungate.name, error, self.now())
            return True
        self.gatherer.note_written(job.uid)
        return True

    async def _create(self, job: JobView, create: Create) -> bool:
        """Create a child. Returns whether anything has changed: the child is new, or is now known to be refused."""
        kind = CHILD_KINDS[create.kind]
        try:
            created = await self.api.create(kind, job.namespace, create.body)
        except ApiError as error:
            if error.is_refusal:
                self.gatherer.note_refusal(job.uid, kind, create.name, error, self.now())
                return True
            if not error.is_already_exists:
                raise
            return await self._adopt(job, kind, create.name, error)
        self.gatherer.note_written(job.uid)
        if kind in CACHED:
            self.cache.take(kind, created)
        return True

    async def _adopt(self, job: JobView, kind: Kind, name: str, error: ApiError) -> bool:
        """Handle a name that is taken: by our own child, if an answer was lost or a label removed, or by another object."""
        existing = await self.api.get(kind, job.namespace, name)
        if existing is None:
            raise error
        if not belongs_to(existing, job.uid):
            self.gatherer.note_conflict(job.uid, kind, name)
            return False
        self.gatherer.note_written(job.uid)
        key = object_key(existing)
        if kind == BATCH_JOBS and not key.is_labelled:
            # Without its label, no watch would report how the Job ends, so it is deleted, and created again once it is gone.
            await self._delete(job, Delete("Job", name, key.uid))
        elif kind in CACHED:
            self.cache.found(kind, existing)
        return False

    async def report_failure(self, key: JobKey, error: Exception) -> None:
        """Report in the job's status that its passes fail, unless status already says so. This small write does not depend on
        what a pass reads or decides. Raises ApiError, ApiUnreachableError.
        """
        cached = self.cache.job(key)
        if cached is None:
            return
        document = cached.document()
        status, metadata = document.get("status") or {}, document["metadata"]
        if "deletionTimestamp" in metadata:
            return
        patch = with_operator_error(status, metadata.get("generation") or 0, timestamp(self.now()), words_of(error))
        if patch is None:
            return
        if "phase" not in status:
            patch["phase"] = str(job_phase(FineTuneJobStatus.model_validate(patch).conditions))
        body = {"metadata": {"resourceVersion": str(cached.key.version), "uid": cached.key.uid}, "status": patch}
        self.cache.take(JOBS, await self.api.patch(JOBS, key.namespace, key.name, body, subresource="status"))


def words_of(error: Exception) -> str:
    """Describe an error to users: the server's message without secrets or, for an unexpected error, only its type."""
    match error:
        case ApiError():
            message = _SECRETS.sub("***", " ".join(str(error).split()))
            return message if len(message) <= LONGEST_WORDS else f"{message[: LONGEST_WORDS - 3]}..."
        case ApiUnreachableError():
            return "the API server does not answer."
        case _:
            return f"an unexpected {type(error).__name__}; see the operator's log."


def starts(job: JobView, actions: Actions) -> bool:
    """Whether the status write freezes the plan, so that the job counts as active from then on."""
    return actions.status is not None and is_started(actions.status) and not is_started(job.status)


def status_document(model: BaseModel) -> Document:
    """Return status, or a part of it, as JSON without unset values: CEL rules test `has(status.startTime)`, so an unset time must
    be absent.
    """
    document: Document = {}
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if value is None or (value in ("", ()) and not field.is_required()):
            continue
        document[field.alias or name] = _plain(value)
    return document


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return status_document(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, str) else value


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> Document:
    """Return the JSON merge patch (RFC 7396) that turns one document into another; empty if they are equal."""
    patch: Document = {name: None for name in before if name not in after}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            inner = merge_patch(old, value)
            if inner:
                patch[name] = inner
        elif name not in before or old != value:
            patch[name] = value
    return patch
