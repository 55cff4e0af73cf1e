"""Performs `Actions`: one status write, then deletes, creates and events, in the order that `decide.actions` explains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import BaseModel

from finetune_job.names import LABEL_ATTEMPT
from finetune_operator.children.placement import GATES_ANNOTATION
from finetune_operator.cluster.answers import ApiError
from finetune_operator.cluster.api import Api, Document
from finetune_operator.cluster.cache import Cache
from finetune_operator.cluster.gather import Gathered, Gatherer
from finetune_operator.cluster.kinds import BATCH_JOBS, CHILD_KINDS, DELETED_KINDS, JOBS, PODS, WATCHED, Kind
from finetune_operator.cluster.object_key import belongs_to
from finetune_operator.cluster.projection import utc_now
from finetune_operator.cluster.recorder import EventRecorder
from finetune_operator.decide.actions import Actions, Create, Delete, Relabel, Ungate
from finetune_operator.decide.observed import JobView, Observed
from finetune_operator.decide.stage import is_started


class PassOutcome(StrEnum):
    """How a pass ended."""

    UNCHANGED = "unchanged"
    """There was nothing to do."""
    ACTED = "acted"
    """Something has changed: status was written, a delete was accepted, a child was made that did not exist."""
    REPEATED = "repeated"
    """Everything had been done already, or may not be done: nothing has changed."""
    OUTDATED = "outdated"
    """The job, or its place in the line, had changed since it was observed; nothing was done."""
    GONE = "gone"
    """The job was deleted meanwhile."""


@dataclass(frozen=True)
class Executor:
    """Carries out one pass at a time and takes the server's answers into the cache."""

    api: Api
    cache: Cache
    gatherer: Gatherer
    recorder: EventRecorder
    now: Callable[[], datetime] = utc_now

    async def execute(self, gathered: Gathered, actions: Actions) -> PassOutcome:
        """Carry out the actions. Raises ApiError and ApiUnreachableError; what was done until then remains, and the next pass
        continues from there.
        """
        job = gathered.observed.job
        patch = {} if actions.status is None else merge_patch(gathered.raw_status, status_document(actions.status))
        if starts(job, actions):
            if not self._may_start(gathered.observed):
                return PassOutcome.OUTDATED
        elif self.cache.lines.is_starting(job.uid):
            # A pass before this one has tried to start the job and has had no answer.
            return await self._read_again(job)
        refused = await self._write_status(job, patch) if patch else None
        if refused is not None:
            return refused
        has_effect = bool(patch)
        for delete in actions.deletes:
            has_effect |= await self._delete(job, delete)
        for ungate in actions.ungates:
            has_effect |= await self._ungate(job, ungate)
        for relabel in actions.relabels:
            has_effect |= await self._relabel(job, relabel)
        for create in actions.creates:
            if not self.gatherer.may_create(job.uid, self.now()):
                break
            has_effect |= await self._create(job, create)
        for event in actions.events:
            self.recorder.record(job, event)
        if has_effect:
            return PassOutcome.ACTED
        decided = actions.deletes or actions.ungates or actions.relabels or actions.creates
        return PassOutcome.REPEATED if decided else PassOutcome.UNCHANGED

    async def _write_status(self, job: JobView, patch: Document) -> PassOutcome | None:
        body = {"metadata": {"resourceVersion": job.resource_version, "uid": job.uid}, "status": patch}
        try:
            written = await self.api.patch(JOBS, job.namespace, job.name, body, subresource="status")
        except ApiError as error:
            if error.is_not_found:
                return PassOutcome.GONE
            if error.is_refusal:
                self.cache.lines.settle(job.uid)
            if not error.is_conflict:
                raise
            return await self._read_again(job)
        self.cache.take(JOBS, written)
        return None

    async def _read_again(self, job: JobView) -> PassOutcome:
        """Read a job again that has changed since it was observed."""
        current = await self.api.get(JOBS, job.namespace, job.name)
        if current is None:
            return PassOutcome.GONE
        self.cache.take(JOBS, current)
        self.cache.lines.settle(job.uid)
        return PassOutcome.OUTDATED

    def _may_start(self, observed: Observed) -> bool:
        """Take the job's place in its line, before anything is awaited. Returns whether there was one."""
        cached = self.cache.job_of_uid(observed.job.uid)
        return cached is None or observed.line is None or self.cache.lines.start(cached, observed.line.limit)

    async def _delete(self, job: JobView, delete: Delete) -> bool:
        """Delete a child. Returns whether the server accepted it."""
        kind = DELETED_KINDS[delete.kind]
        try:
            answer = await self.api.delete(kind, job.namespace, delete.name, uid=delete.uid, force=delete.force)
        except ApiError as error:
            # Gone already, or replaced by another object that took the name: neither is the one that was meant.
            if not (error.is_not_found or error.is_conflict):
                raise
            if kind in WATCHED:
                self.cache.found_gone(kind, delete.uid)
            return False
        if kind in WATCHED and answer.get("kind") == kind.name:
            self.cache.take(kind, answer)
        elif kind in WATCHED:
            self.cache.found_gone(kind, delete.uid)
        return True

    async def _ungate(self, job: JobView, ungate: Ungate) -> bool:
        annotations = {GATES_ANNOTATION: ",".join(ungate.remaining) or None}
        return await self._patch(job, BATCH_JOBS, ungate.name, {"uid": ungate.uid, "annotations": annotations})

    async def _relabel(self, job: JobView, relabel: Relabel) -> bool:
        labels = {LABEL_ATTEMPT: str(relabel.attempt)}
        return await self._patch(job, PODS, relabel.name, {"uid": relabel.uid, "labels": labels})

    async def _patch(self, job: JobView, kind: Kind, name: str, metadata: Document) -> bool:
        """Change the metadata of a child. Returns whether something has changed: the metadata, or that it is known to be
        refused.
        """
        try:
            self.cache.take(kind, await self.api.patch(kind, job.namespace, name, {"metadata": metadata}))
        except ApiError as error:
            if error.is_not_found or error.is_conflict:
                self.cache.found_gone(kind, metadata["uid"])
                return False
            if not error.is_refusal:
                raise
            self.gatherer.note_refusal(job.uid, kind, name, error, self.now())
            return True
        self.gatherer.note_written(job.uid)
        return True

    async def _create(self, job: JobView, create: Create) -> bool:
        """Create a child. Returns whether something has changed: the child is new, or it is known to be refused."""
        kind = CHILD_KINDS[create.kind]
        try:
            made = await self.api.create(kind, job.namespace, create.body)
        except ApiError as error:
            if error.is_refusal:
                self.gatherer.note_refusal(job.uid, kind, create.name, error, self.now())
                return True
            if not error.is_already_exists:
                raise
            return await self._adopt(job, kind, create.name, error)
        self.gatherer.note_written(job.uid)
        if kind in WATCHED:
            self.cache.take(kind, made)
        return True

    async def _adopt(self, job: JobView, kind: Kind, name: str, error: ApiError) -> bool:
        """Handle a name that is taken: by a child of ours whose answer was lost or whose label was removed, or by another
        object.
        """
        existing = await self.api.get(kind, job.namespace, name)
        if existing is None:
            raise error
        if not belongs_to(existing, job.uid):
            self.gatherer.note_conflict(job.uid, kind, name)
            return False
        self.gatherer.note_written(job.uid)
        if kind in WATCHED:
            self.cache.found(kind, existing)
        return False


def starts(job: JobView, actions: Actions) -> bool:
    """Whether the status write freezes the plan: from then on the job is one of the active ones."""
    return actions.status is not None and is_started(actions.status) and not is_started(job.status)


def status_document(model: BaseModel) -> Document:
    """Return status, or a part of it, as JSON without absent values: CEL asks `has(status.startTime)`, so an empty one must be
    absent.
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
    """The JSON merge patch (RFC 7396) from one document to another; empty where they are equal."""
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
