"""Parses the JSON in the cache into the objects on which decisions are based.

The parsed form of an unfinished job is kept until the job changes, because most passes see the same manifest and status as the
pass before. It is immutable, so it can be shared.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic import ValidationError

from finetune_job.api.job import FineTuneJob, FineTuneJobSpec, parse_job, spec_of_started_job
from finetune_job.api.profile import FineTuneProfile
from finetune_job.stored_status import read_status
from finetune_operator.cache.projection import CachedObject
from finetune_operator.client.kinds import JOBS, PROFILES, Kind
from finetune_operator.client.object_key import Document
from finetune_operator.decide.seen.observed import JobView, ProfileView
from finetune_operator.decide.seen.stage import is_terminal

LARGEST_KEPT = 64 << 10
"""Maximum size of a job whose parsed form is kept, in bytes of JSON. Larger jobs are parsed each time, because a tenant may have
a thousand manifests that each take a megabyte when parsed."""
_MOST_LINES, _LONGEST_LINE = 32, 1024
ORPHAN_FINALIZER = "orphan"
"""Finalizer that an object has while it is being deleted with the propagation policy Orphan."""


class ParsedJob(NamedTuple):
    """A cached FineTuneJob in parsed form."""

    view: JobView
    raw_spec: dict[str, Any]
    raw_status: dict[str, Any]
    """Status as stored on the server, against which the patch is computed."""
    version: int
    own_spec: FineTuneJobSpec | None
    """The spec; None if this release rejects the manifest. Even then, the view of a started job may have a spec."""


class Reader:
    """Reads jobs and profiles from cached objects."""

    def __init__(self) -> None:
        self._jobs: dict[str, ParsedJob] = {}
        self._profiles: dict[str, tuple[int, ProfileView]] = {}

    def job(self, cached: CachedObject) -> ParsedJob:
        """Read a job. If its manifest does not parse, the view has the error, and has a spec only if the job has started."""
        known = self._jobs.get(cached.key.uid)
        if known is not None and known.version == cached.key.version:
            return known
        parsed = _read_job(cached, known)
        if len(cached.content) <= LARGEST_KEPT and not is_terminal(parsed.view.status):
            self._jobs[cached.key.uid] = parsed
        else:
            self.forget(cached.key.uid)
        return parsed

    def forget(self, job_uid: str) -> None:
        """Drop the parsed form of a job."""
        self._jobs.pop(job_uid, None)

    def profile(self, cached: CachedObject) -> ProfileView:
        """Read a profile. If it does not parse, the view has an error instead of a spec."""
        version, view = self._profiles.get(cached.key.uid, (None, None))
        if view is None or version != cached.key.version:
            view = _read_profile(cached)
            self._profiles[cached.key.uid] = cached.key.version, view
        return view


def _read_job(cached: CachedObject, known: ParsedJob | None) -> ParsedJob:
    document = cached.document()
    metadata: dict[str, Any] = document["metadata"]
    raw = document.get("spec") or {}
    if known is not None and known.raw_spec == raw:
        own, error = known.own_spec, known.view.spec_error
    else:
        own, error = _read_spec(document)
    status, finalizers = read_status(document.get("status")), metadata.get("finalizers")
    view = JobView(
        namespace=cached.key.namespace,
        name=cached.key.name,
        uid=cached.key.uid,
        generation=metadata.get("generation") or 0,
        resource_version=str(cached.key.version),
        # A limit that is new in this release must not stop a job that has already started: such a job follows its plan.
        spec=own if own is not None or not status.start_time else spec_of_started_job(raw),
        spec_error=error,
        status=status,
        deleting="deletionTimestamp" in metadata,
        orphaning="deletionTimestamp" in metadata and isinstance(finalizers, list) and ORPHAN_FINALIZER in finalizers,
    )
    return ParsedJob(view, raw, document.get("status") or {}, cached.key.version, own)


def _read_spec(document: Document) -> tuple[FineTuneJobSpec | None, str]:
    try:
        # Status is read separately, so that a status written by a newer release never causes a manifest to be rejected.
        parsed: FineTuneJob = parse_job({name: value for name, value in _envelope(document, JOBS).items() if name != "status"})
    except ValidationError as refusal:
        return None, _lines(refusal)
    return parsed.spec, ""


def _read_profile(cached: CachedObject) -> ProfileView:
    try:
        profile = FineTuneProfile.model_validate(_envelope(cached.document(), PROFILES))
    except ValidationError as error:
        return ProfileView(name=cached.key.name, error=_lines(error))
    return ProfileView(name=cached.key.name, spec=profile.spec)


def _envelope(document: Document, kind: Kind) -> dict[str, Any]:
    return {**document, "apiVersion": kind.api_version, "kind": kind.name}


def _lines(error: ValidationError) -> str:
    """Describe the first wrong fields, one line each."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    lines = [f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}"[:_LONGEST_LINE] for item in errors[:_MOST_LINES]]
    return "\n".join(lines if len(errors) <= _MOST_LINES else [*lines, f"and {len(errors) - _MOST_LINES} more"])
