"""Parses what the cache keeps compressed into what decisions read, each version of an object once.

Passes come in groups (a Job, its pods and their states change within seconds), and most of them see the same manifest, status,
profile and plan as the one before. All of these are immutable once parsed, so they are shared.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import ValidationError

from finetune_job.api.job import FineTuneJob, FineTuneJobSpec, parse_job, spec_of_started_job
from finetune_job.api.profile import FineTuneProfile
from finetune_job.stored_status import read_status
from finetune_operator.cluster.kinds import JOBS, PROFILES, Kind
from finetune_operator.cluster.object_key import Document
from finetune_operator.cluster.projection import CachedObject
from finetune_operator.decide.children_seen import ConfigMapView
from finetune_operator.decide.observed import JobView, ProfileView
from finetune_operator.settings import MOST_WORKERS

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """Caches results. When there are too many, the least recently used one is dropped."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._results: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        """Number of cached results."""
        return len(self._results)

    def forget(self, key: K) -> None:
        """Drop the result of that key."""
        self._results.pop(key, None)

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the result of that key, made if it is not cached. Exceptions of `make` are not cached."""
        if key in self._results:
            self._results.move_to_end(key)
            return self._results[key]
        result = make()
        self._results[key] = result
        if len(self._results) > self._most:
            self._results.popitem(last=False)
        return result


RECENT_JOBS = MOST_WORKERS
"""Number of jobs whose parsed document and status are kept, about 120 kB each. Passes over one job follow each other."""
RECENT_SPECS = 64
"""Number of parsed specs that are kept, about 14 kB each."""
PROFILES_AT_A_TIME = 64
LARGEST_KEPT = 64 << 10
"""Largest object that is kept parsed, in bytes of JSON. Larger ones are parsed each time: a thousand manifests of a tenant may
be a megabyte of objects each."""
_MOST_LINES, _LONGEST_LINE = 32, 1024
ORPHAN_FINALIZER = "orphan"
"""Finalizer of the garbage collector on objects that are deleted with the policy Orphan."""


class ParsedJob(NamedTuple):
    """A FineTuneJob as the cache has it."""

    view: JobView
    raw_spec: dict[str, Any]
    raw_status: dict[str, Any]
    """Status as it is on the server, for the patch."""
    is_large: bool


class _Spec(NamedTuple):
    raw: Document
    spec: FineTuneJobSpec | None
    error: str


class Reader:
    """Reads jobs, profiles and plans from cached objects."""

    def __init__(self) -> None:
        self._jobs: LruCache[tuple[str, int], ParsedJob] = LruCache(RECENT_JOBS)
        self._specs: LruCache[str, _Spec] = LruCache(RECENT_SPECS)
        """Specs by UID of the job; most new versions of a job have the same spec."""
        self._profiles: LruCache[tuple[str, int], ProfileView] = LruCache(PROFILES_AT_A_TIME)
        self._plans: LruCache[tuple[str, int], ConfigMapView] = LruCache(RECENT_JOBS)

    def job(self, cached: CachedObject) -> ParsedJob:
        """Read a job. If its manifest does not parse, it has no spec, and the reason."""
        key = (cached.key.uid, cached.key.version)
        parsed = self._jobs.get(key, lambda: self._read_job(cached))
        if parsed.is_large:
            self._jobs.forget(key)
            self._specs.forget(cached.key.uid)
        return parsed

    def profile(self, cached: CachedObject) -> ProfileView:
        """Read a profile. If it does not parse, it has no spec, and the reason."""
        return self._profiles.get((cached.key.uid, cached.key.version), lambda: _read_profile(cached))

    def plan(self, cached: CachedObject) -> ConfigMapView:
        """The ConfigMap with the frozen plan."""
        key = (cached.key.uid, cached.key.version)
        plan = self._plans.get(
            key, lambda: ConfigMapView(name=cached.key.name, uid=cached.key.uid, plan_json=cached.document()["plan"])
        )
        if cached.size > LARGEST_KEPT:
            self._plans.forget(key)
        return plan

    def _read_job(self, cached: CachedObject) -> ParsedJob:
        document = cached.document()
        metadata: dict[str, Any] = document["metadata"]
        raw = document.get("spec") or {}
        spec = self._specs.get(cached.key.uid, lambda: _read_spec(document))
        if spec.raw != raw:
            self._specs.forget(cached.key.uid)
            spec = self._specs.get(cached.key.uid, lambda: _read_spec(document))
        status = read_status(document.get("status"))
        # A limit that an earlier release did not have must not stop a job that has started: it follows its plan.
        readable = spec.spec if spec.spec is not None or not status.start_time else spec_of_started_job(raw)
        view = JobView(
            namespace=cached.key.namespace,
            name=cached.key.name,
            uid=cached.key.uid,
            generation=metadata.get("generation") or 0,
            resource_version=str(cached.key.version),
            spec=readable,
            spec_error=spec.error,
            status=status,
            deleting="deletionTimestamp" in metadata,
            orphaning="deletionTimestamp" in metadata and _has(metadata.get("finalizers"), ORPHAN_FINALIZER),
        )
        return ParsedJob(view, raw, document.get("status") or {}, cached.size > LARGEST_KEPT)


def _has(items: Any, item: str) -> bool:
    return isinstance(items, list) and item in items


def _read_spec(document: Document) -> _Spec:
    raw = document.get("spec") or {}
    try:
        # Status is read apart: an older operator must not refuse a manifest for what a newer one reported.
        parsed: FineTuneJob = parse_job({name: value for name, value in _envelope(document, JOBS).items() if name != "status"})
    except ValidationError as refusal:
        return _Spec(raw, None, _lines(refusal))
    return _Spec(raw, parsed.spec, "")


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
