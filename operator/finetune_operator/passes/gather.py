"""Builds `Observed`, the input of one reconcile pass, from the cache and a few live reads.

Live reads are made only for what watches do not show: what is really running before another Job is created (`live_reads`),
whether claims exist, and whether a conflicting object still exists. They are also made before giving up on pods that have not
started, because a watch may be late.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import Enum, auto
from random import random

from finetune_job.names import (
    DEFAULT_PROFILE,
    LABEL_JOB,
    LABEL_MANAGED_BY,
    MANAGED_BY,
    plan_configmap_name,
    service_name,
    workspace_claim_name,
)
from finetune_job.progress import Progress
from finetune_operator.cache.cache import Cache
from finetune_operator.cache.projection import CachedObject
from finetune_operator.cache.reader import Reader
from finetune_operator.cache.warning_events import WarningEvents
from finetune_operator.children.claims import claims_named_by
from finetune_operator.client.answers import ApiError, Document
from finetune_operator.client.api import Api
from finetune_operator.client.kinds import BATCH_JOBS, CLAIMS, CONFIG_MAPS, JOBS, SERVICES, JobKey, Kind
from finetune_operator.client.object_key import ObjectKey, belongs_to
from finetune_operator.client.raw_objects import Fields
from finetune_operator.decide.failures.device_faults import nodes_in_question
from finetune_operator.decide.failures.job_state import late_to_start
from finetune_operator.decide.seen.children_seen import ConfigMapView
from finetune_operator.decide.seen.observed import JobView, NamespaceView, Observed, PlaceInLine, ProfileView
from finetune_operator.decide.seen.stage import attempt_of, current_role, is_ended, is_started, is_terminal
from finetune_operator.decide.stages.blocked import needs_live_list
from finetune_operator.decide.stages.finish import has_expired
from finetune_operator.decide.stages.train_stage import queue_of_growth
from finetune_operator.decide.stages.validate_stage import has_begun
from finetune_operator.passes.live_reads import LiveReads, namespace_view, read_nodes
from finetune_operator.passes.notes import JobNotes, refused_write
from finetune_operator.passes.workloads import Workloads, num_waiting

CLAIM_SEEN_SECONDS = 60.0
"""How long a claim, once found, is assumed to exist."""
MISSING_RETRY_SECONDS = 15.0
"""Pause between two checks for a missing claim or a conflicting object, which are not watched."""
VANISHING_RETRY_SECONDS = 3.0
NAMESPACE_SECONDS = 2.0
"""How long the labels of a namespace may be reused after they were read."""
PLACE_KEPT_SECONDS = 20.0
"""How long a reported place in line is left as it is. Each status write leads to another pass, so otherwise passes would keep
writing while older jobs become ready one after another."""
NO_NOTES = JobNotes()


class TemplateClaim(Enum):
    """Whether a job can use an existing claim that has the name of the claim from its template."""

    USABLE = auto()
    VANISHING = auto()
    """The claim is being deleted, or will be deleted with the earlier job that owns it."""
    FOREIGN = auto()


@dataclass(frozen=True)
class Gathered:
    """The input of a pass."""

    observed: Observed
    raw_status: Document
    """Status as stored on the server, against which the patch is computed."""
    revisit_after_seconds: float | None
    """Seconds until this input becomes outdated even without a watch event; None if never."""
    cpu_seconds: float = 0.0
    """CPU time for parsing the job, without requests."""


class Gatherer:
    """Gathers the input of passes. Between passes it keeps only hints, which live reads refresh."""

    def __init__(
        self,
        api: Api,
        cache: Cache,
        pending_events_after: float,
        warnings: WarningEvents | None = None,
        draw: Callable[[], float] = random,
        *,
        operator_namespace: str = "",
    ) -> None:
        self._api = api
        self._warnings = warnings or WarningEvents(cache)
        self._cache = cache
        self._reader = Reader()
        self._workloads = Workloads(api)
        self._live = LiveReads(api, cache)
        self._pending_events_after = pending_events_after
        self._draw = draw
        self._operator_namespace = operator_namespace
        self._claims_seen: dict[tuple[str, str], datetime] = {}
        self._namespaces: dict[str, tuple[datetime, NamespaceView]] = {}
        self._notes: dict[str, JobNotes] = {}
        """UID of a job -> notes about the job; most jobs have none."""
        cache.job_gone = self._forget_job

    async def _namespace(self, name: str, now: datetime) -> NamespaceView:
        """Return the labels of a namespace. They are cached briefly, because all jobs that wait in a line need them."""
        read_after = now - timedelta(seconds=NAMESPACE_SECONDS)
        self._namespaces = {known: read for known, read in self._namespaces.items() if read[0] > read_after}
        if name not in self._namespaces:
            self._namespaces[name] = now, await namespace_view(self._api, name)
        return self._namespaces[name][1]

    def note_conflict(self, job_uid: str, kind: Kind, name: str) -> None:
        """Record that the name of a child to be created is taken by an object that is not ours."""
        self._notes_of(job_uid).conflicts |= {(kind, name)}

    def note_progress(self, job_uid: str, progress: Progress) -> None:
        """Record new progress of rank 0; the next pass may write it."""
        self._notes_of(job_uid).progress = progress

    def note_refusal(self, job_uid: str, kind: Kind, name: str, error: ApiError, now: datetime) -> None:
        """Record that the API server refused to create or change a child, and will probably keep refusing for a while."""
        notes = self._notes_of(job_uid)
        notes.refused = refused_write(notes.refused, (kind.name, name), error, now, self._draw)

    def note_written(self, job_uid: str) -> None:
        """Record that a child was created or changed, so the API server no longer refuses."""
        notes = self._notes.get(job_uid)
        if notes is not None:
            notes.refused = None

    def may_create(self, job_uid: str, now: datetime) -> bool:
        """Whether a child of that job may be created now."""
        notes = self._notes.get(job_uid, NO_NOTES)
        # The later children of a pass need the earlier ones: a Job must not run with somebody else's ConfigMap.
        return not notes.conflicts and (notes.refused is None or now >= notes.refused.retry_at)

    async def gather(self, key: JobKey, now: datetime) -> Gathered | None:
        """Gather everything about one job; None if the job does not exist or no longer exists."""
        cached = self._cache.job(key)
        if cached is None:
            return None
        begun = time.thread_time()
        parsed = self._reader.job(cached)
        job, raw_spec = parsed.view, parsed.raw_spec
        cpu_seconds = time.thread_time() - begun
        self._forget_settled_evidence(job)
        notes = self._notes_of(job.uid)
        revisits: list[float] = []
        profile_name = str((job.spec.profile if job.spec is not None else raw_spec.get("profile")) or DEFAULT_PROFILE)
        cached_profile = self._cache.profile(profile_name)
        profile = ProfileView(profile_name) if cached_profile is None else self._reader.profile(cached_profile)
        vanishing, conflicts = await self._conflicts(job, notes, revisits)
        is_begun = has_begun(self._with_children(Observed(job=job, profile=profile)))
        observed = self._with_children(
            Observed(
                job=job,
                profile=profile,
                operator_namespace=self._operator_namespace,
                claims=await self._claims(job, now, revisits, vanishing, is_begun=is_begun),
                vanishing=_named(vanishing),
                conflicts=_named(conflicts),
                refused=notes.refused,
                line=self._line(cached, job, profile, notes, now),
                progress=notes.progress,
            )
        )
        notes.progress = None
        if profile.spec is not None and profile.spec.namespace_selector is not None and not has_begun(observed):
            observed = replace(observed, namespace=await self._namespace(job.namespace, now))
        if notes.refused is not None and now < notes.refused.retry_at:
            revisits.append((notes.refused.retry_at - now).total_seconds())
        late = late_to_start(observed, now)
        if late is not None:
            await self._live.read_again(job, late)
            observed = self._with_children(observed)
        if needs_live_list(observed) and not _waits_for_name(observed):
            live = await self._live.children(job, notes, now)
            observed = replace(self._with_children(observed), live=live)
        if observed.plan is None and has_begun(observed) and not job.deleting and not is_ended(job.status):
            if await self._live.finds(CONFIG_MAPS, job.namespace, plan_configmap_name(job.name)):
                observed = self._with_children(observed)
            else:
                revisits.append(MISSING_RETRY_SECONDS)
        observed = self._with_events(observed, now, revisits)
        batch_jobs = await self._workloads.with_messages(observed.batch_jobs, job.namespace, now, revisits)
        observed = replace(observed, batch_jobs=batch_jobs)
        in_question = nodes_in_question(observed)
        if in_question:
            observed = replace(observed, nodes=await read_nodes(self._api, in_question))
        queue = queue_of_growth(observed, now)
        if queue is not None:
            observed = replace(observed, waiting_in_queue=await num_waiting(self._api, job.namespace, queue))
        if is_terminal(job.status):
            notes.listed = None
        if has_expired(observed, now):
            observed = replace(observed, network_policies=await self._live.network_policies(job))
        if notes.is_empty:
            self._notes.pop(job.uid, None)
        return Gathered(observed, parsed.raw_status, min(revisits, default=None), cpu_seconds)

    def _notes_of(self, job_uid: str) -> JobNotes:
        """Return the notes about a job, for modification. Notes about a job that is gone are not kept."""
        return self._notes.setdefault(job_uid, JobNotes()) if self._cache.job_of_uid(job_uid) else JobNotes()

    def _forget_job(self, job_uid: str) -> None:
        self._notes.pop(job_uid, None)
        self._reader.forget(job_uid)

    def _with_children(self, observed: Observed) -> Observed:
        """Replace the children with those that are now in the cache."""
        uid, name = observed.job.uid, observed.job.name
        config_maps, services = self._cache.owned(CONFIG_MAPS, uid), self._cache.owned(SERVICES, uid)
        batch_jobs = tuple(item.batch_job for item in self._cache.owned(BATCH_JOBS, uid) if item.batch_job is not None)
        uids_of_jobs = {batch_job.uid for batch_job in batch_jobs}
        places = {(batch_job.role, batch_job.attempt) for batch_job in batch_jobs}
        return replace(
            observed,
            batch_jobs=batch_jobs,
            # Pods of a deleted Job are no evidence about another Job with the same name.
            pods=tuple(
                item.pod
                for item in self._cache.pods_of(uid)
                if item.pod is not None
                and (item.key.owner_uid in uids_of_jobs or (item.pod.role, item.pod.attempt) not in places)
            ),
            plan=next(
                (
                    ConfigMapView(name=item.key.name, uid=item.key.uid, plan_json=item.plan)
                    for item in config_maps
                    if item.key.name == plan_configmap_name(name)
                ),
                None,
            ),
            service_uid=next((item.key.uid for item in services if item.key.name == service_name(name)), ""),
        )

    def _line(
        self, cached: CachedObject, job: JobView, profile: ProfileView, notes: JobNotes, now: datetime
    ) -> PlaceInLine | None:
        reported, notes.reported_ahead = notes.reported_ahead, None
        limit = profile.spec.max_active_jobs if profile.spec is not None else None
        if limit is None or is_started(job.status):
            return None
        ahead = self._cache.lines.ahead_of(cached)
        if ahead >= limit:
            is_kept = reported is not None and reported[1] >= limit and (now - reported[0]).total_seconds() < PLACE_KEPT_SECONDS
            notes.reported_ahead = reported if is_kept else (now, ahead)
        return PlaceInLine(limit=limit, ahead=ahead if notes.reported_ahead is None else notes.reported_ahead[1])

    async def _claims(
        self, job: JobView, now: datetime, revisits: list[float], vanishing: set[tuple[Kind, str]], *, is_begun: bool
    ) -> frozenset[str]:
        """Return the names of the claims that exist. A claim with the template's name that will be deleted with an earlier job
        does not count, and is added to `vanishing`.
        """
        if job.spec is None or job.deleting or is_ended(job.status):
            return frozenset()
        horizon = now - timedelta(seconds=CLAIM_SEEN_SECONDS)
        self._claims_seen = {place: seen_at for place, seen_at in self._claims_seen.items() if seen_at >= horizon}
        has_template = job.spec.workspace.volume_claim_template is not None
        present = set()
        for claim in claims_named_by(job.spec, job.name):
            # A foreign claim that happens to have the template's name is not used: it is reported as a conflict when ours is to
            # be created.
            is_own = has_template and claim == workspace_claim_name(job.name)
            place = (job.namespace, f"{claim} of {job.uid}" if is_own else claim)
            if place not in self._claims_seen:
                document = await self._api.get(CLAIMS, job.namespace, claim)
                state = None
                if is_own and document is not None:
                    key = self._cache.key_of(CLAIMS, document)
                    state = TemplateClaim.FOREIGN if key is None else template_claim(key, document, job, is_begun=is_begun)
                if state is TemplateClaim.VANISHING:
                    vanishing.add((CLAIMS, claim))
                if document is None or state in (TemplateClaim.VANISHING, TemplateClaim.FOREIGN):
                    revisits.append(MISSING_RETRY_SECONDS if state is not TemplateClaim.VANISHING else VANISHING_RETRY_SECONDS)
                    continue
                if is_begun or not is_own:
                    # A claim that the job does not use yet is read in every pass until something is created from the plan.
                    self._claims_seen[place] = now
            present.add(claim)
        return frozenset(present)

    def _with_events(self, observed: Observed, now: datetime, revisits: list[float]) -> Observed:
        """Add the Warning events of Jobs, and of pods that have been pending for a while: in a pod's first seconds, events report
        problems that go away on their own.
        """
        job = observed.job
        if is_ended(job.status):
            return observed
        batch_jobs = tuple(
            replace(batch_job, events=self._warnings.about(job.namespace, batch_job.uid)) for batch_job in observed.batch_jobs
        )
        pods = []
        for pod in observed.pods:
            events = self._warnings.about(job.namespace, pod.uid) if pod.phase == "Pending" and not pod.gone else ()
            young = self._pending_events_after - (now - pod.created).total_seconds()
            if events and young > 0:
                revisits.append(young + 0.1)
                events = ()
            pods.append(replace(pod, events=events))
        return replace(observed, batch_jobs=batch_jobs, pods=tuple(pods))

    async def _conflicts(
        self, job: JobView, notes: JobNotes, revisits: list[float]
    ) -> tuple[set[tuple[Kind, str]], set[tuple[Kind, str]]]:
        """Return two sets of objects that have the name of a child but are not ours: those left by an earlier job of the same
        name, which will be deleted, and all others.
        """
        vanishing: set[tuple[Kind, str]] = set()
        conflicts: set[tuple[Kind, str]] = set()
        for kind, name in notes.conflicts:
            document = await self._api.get(kind, job.namespace, name)
            key = None if document is None else self._cache.key_of(kind, document)
            if document is None or key is None or belongs_to(document, job.uid):
                continue
            is_marked = kind == CLAIMS and template_claim(key, document, job) is TemplateClaim.VANISHING
            (vanishing if is_marked or is_of_namesake(key, job) else conflicts).add((kind, name))
        notes.conflicts = frozenset(vanishing | conflicts)
        if notes.conflicts:
            revisits.append(VANISHING_RETRY_SECONDS if vanishing else MISSING_RETRY_SECONDS)
        return vanishing, conflicts

    def _forget_settled_evidence(self, job: JobView) -> None:
        """Forget deleted pods that are no longer needed because status has the outcome of their attempt."""
        existing = {cached.key.uid for cached in self._cache.owned(BATCH_JOBS, job.uid)}
        role = current_role(job.status)
        current = (role, attempt_of(job.status, role))
        finished = is_terminal(job.status)

        def is_settled(cached: CachedObject) -> bool:
            pod = cached.pod
            if pod is None or cached.key.owner_uid in existing:
                return False
            return finished or (pod.role, pod.attempt) != current

        self._cache.forget_evidence(job.uid, is_settled)


def _waits_for_name(observed: Observed) -> bool:
    """Whether nothing can be created because a name is taken, perhaps for weeks. Live lists then help only at the end."""
    job = observed.job
    return bool(observed.vanishing or observed.conflicts) and not (is_ended(job.status) or job.deleting)


def _named(objects: set[tuple[Kind, str]]) -> tuple[str, ...]:
    return tuple(sorted(f"{kind.name}/{name}" for kind, name in objects))


def template_claim(key: ObjectKey, claim: Document, job: JobView, *, is_begun: bool = False) -> TemplateClaim:
    """Decide whether a job can use an existing claim that has the name of the claim from the job's template.

    Labels decide, because a claim that outlives its job has no owner, and is used by the next job with the same name.
    `is_begun`: whether the job already uses the claim; it then does so for as long as the claim exists.
    """
    labels = Fields(claim).at("metadata").at("labels")
    if (labels.name(LABEL_MANAGED_BY), labels.name(LABEL_JOB)) != (MANAGED_BY, job.name):
        return TemplateClaim.FOREIGN
    if is_begun:
        return TemplateClaim.USABLE
    if key.is_deleting or is_of_namesake(key, job):
        return TemplateClaim.VANISHING
    return TemplateClaim.USABLE if key.owner_uid in ("", job.uid) else TemplateClaim.FOREIGN


def is_of_namesake(key: ObjectKey, job: JobView) -> bool:
    """Whether an object is controlled by an earlier job with the same name.

    As this FineTuneJob has the name now, the earlier one must be gone. So the garbage collector will delete every object that
    still names the earlier job as its controller, whether or not the object is already marked for deletion.
    """
    return key.is_controlled_by(JOBS) and key.owner_name == job.name and key.owner_uid != job.uid
