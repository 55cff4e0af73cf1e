"""Performs `Actions`: one status write, then deletes, creates and events, in the order that `decide.actions` explains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import BaseModel

from finetune_job.api.status import FineTuneJobStatus
from finetune_operator.cluster.api import Api, Document
from finetune_operator.cluster.cache import Cache
from finetune_operator.cluster.errors import ApiError
from finetune_operator.cluster.gather import Gathered, Gatherer
from finetune_operator.cluster.kinds import CHILD_KINDS, JOBS, WATCHED
from finetune_operator.cluster.projection import belongs_to
from finetune_operator.cluster.recorder import Recorder
from finetune_operator.decide.actions import Actions, Create, Delete
from finetune_operator.decide.observed import JobView


class Outcome(StrEnum):
    """How a pass ended."""

    UNCHANGED = "unchanged"
    """Nothing was to be done."""
    ACTED = "acted"
    """Something is different now: status was written, a delete was accepted, a child was made that did not exist."""
    REPEATED = "repeated"
    """What was to be done had been done already, or may not be done: nothing is different from before the pass."""
    OUTDATED = "outdated"
    """The job had changed since it was observed; nothing was done."""
    GONE = "gone"
    """The job was deleted meanwhile."""


@dataclass(frozen=True)
class Executor:
    """Carries out one pass at a time and takes the server's answers into the cache."""

    api: Api
    cache: Cache
    gatherer: Gatherer
    recorder: Recorder

    async def execute(self, gathered: Gathered, actions: Actions) -> Outcome:
        """Raises ApiError and ApiUnreachableError; what was done until then stands, and the next pass goes on from there."""
        job = gathered.observed.job
        patch = {} if actions.status is None else merge_patch(gathered.raw_status, status_document(actions.status))
        if patch:
            refused = await self._write_status(job, patch)
            if refused is not None:
                return refused
        has_effect = bool(patch)
        for delete in actions.deletes:
            has_effect |= await self._delete(job, delete)
        for create in actions.creates:
            has_effect |= await self._create(job, create)
        for event in actions.events:
            self.recorder.record(job, event)
        if has_effect:
            return Outcome.ACTED
        return Outcome.REPEATED if actions.deletes or actions.creates else Outcome.UNCHANGED

    async def _write_status(self, job: JobView, patch: Document) -> Outcome | None:
        body = {"metadata": {"resourceVersion": job.resource_version, "uid": job.uid}, "status": patch}
        try:
            written = await self.api.patch(JOBS, job.namespace, job.name, body, subresource="status")
        except ApiError as error:
            if error.is_not_found:
                return Outcome.GONE
            if not error.is_conflict:
                raise
            current = await self.api.get(JOBS, job.namespace, job.name)
            if current is None:
                return Outcome.GONE
            self.cache.take(JOBS, current)
            return Outcome.OUTDATED
        self.cache.take(JOBS, written)
        return None

    async def _delete(self, job: JobView, delete: Delete) -> bool:
        """Whether the server accepted it."""
        try:
            await self.api.delete(CHILD_KINDS[delete.kind], job.namespace, delete.name, uid=delete.uid)
        except ApiError as error:
            # Gone already, or replaced by another object that took the name: neither is the one that was meant.
            if not (error.is_not_found or error.is_conflict):
                raise
            return False
        return True

    async def _create(self, job: JobView, create: Create) -> bool:
        """Whether the child is new."""
        kind = CHILD_KINDS[create.kind]
        is_new = True
        try:
            made = await self.api.create(kind, job.namespace, create.body)
        except ApiError as error:
            if not error.is_already_exists:
                raise
            found = await self.api.get(kind, job.namespace, create.name)
            if found is None:
                raise
            if not belongs_to(found, job.uid):
                self.gatherer.note_conflict(job.uid, kind, create.name)
                return False
            made, is_new = found, False
        if kind in WATCHED:
            self.cache.take(kind, made)
        return is_new


def status_document(status: FineTuneJobStatus) -> Document:
    """Status as JSON without absent values: CEL asks `has(status.startTime)`, so an empty one must not be there at all."""
    return _document(status)


def _document(model: BaseModel) -> Document:
    found: Document = {}
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if value is None or (value == "" and not field.is_required()):
            continue
        found[field.alias or name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return _document(value)
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
