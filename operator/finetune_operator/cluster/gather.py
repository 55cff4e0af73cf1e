"""Builds `Observed`, the input of one reconcile pass, from the cache and a few live reads.

Live reads are made only for what no watch shows: children that are in doubt (`live_reads`), whether claims exist, whether a
conflicting object is still there; and before pods are given up that have not started, because a watch may be late.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from random import random
from typing import Any

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.names import DEFAULT_PROFILE, plan_configmap_name, service_name, workspace_claim_name
from finetune_job.progress import Progress
from finetune_operator.children.claims import claims_named_by
from finetune_operator.cluster.answers import ApiError
from finetune_operator.cluster.api import Api, Document
from finetune_operator.cluster.cache import Cache, JobKey
from finetune_operator.cluster.kinds import BATCH_JOBS, CLAIMS, CONFIG_MAPS, SERVICES, Kind
from finetune_operator.cluster.live_reads import LiveReads
from finetune_operator.cluster.namesakes import TemplateClaim, is_of_namesake, template_claim
from finetune_operator.cluster.namespaces import Namespaces
from finetune_operator.cluster.nodes import read_nodes
from finetune_operator.cluster.notes import JobNotes, refused_write
from finetune_operator.cluster.object_key import belongs_to
from finetune_operator.cluster.projection import CachedObject
from finetune_operator.cluster.reader import Reader
from finetune_operator.cluster.warning_events import WarningEvents
from finetune_operator.cluster.workloads import Workloads, num_waiting
from finetune_operator.decide.blocked import needs_live_list
from finetune_operator.decide.children_seen import BatchJobView, PodView
from finetune_operator.decide.device_faults import nodes_in_question
from finetune_operator.decide.finish import has_expired
from finetune_operator.decide.job_numbers import job_number
from finetune_operator.decide.job_state import late_to_start
from finetune_operator.decide.observed import JobView, Observed, PlaceInLine, ProfileView
from finetune_operator.decide.stage import attempt_of, current_role, is_ended, is_started, is_terminal
from finetune_operator.decide.train_stage import queue_of_growth
from finetune_operator.decide.validate_stage import has_begun

CLAIM_SEEN_SECONDS = 60.0
"""How long a claim that existed is assumed to exist still."""
MOST_CLAIMS_SEEN = 10_000
MISSING_RETRY_SECONDS = 15.0
"""Pause between looks for a missing claim or a conflicting object, which no watch shows."""
VANISHING_RETRY_SECONDS = 3.0
PLACE_TOLD_SECONDS = 20.0
"""How long a reported place in the line is kept. Each status write leads to the next pass, which would otherwise write again
for as long as older jobs become ready one after the other."""
NO_NOTES = JobNotes()


@dataclass(frozen=True)
class Gathered:
    """The input of a pass."""

    observed: Observed
    raw_status: Document
    """Status as it is on the server, for the patch."""
    revisit_after_seconds: float | None
    """Seconds after which this is outdated even without a watch event; None if never."""
    cpu_seconds: float = 0.0
    """CPU time that reading the job took, without the requests."""


class Gatherer:
    """Gathers the input of passes. What it remembers between passes are hints that live reads renew."""

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
        self._namespaces = Namespaces(api)
        self._pending_events_after = pending_events_after
        self._draw = draw
        self._operator_namespace = operator_namespace
        self._claims_seen: dict[tuple[str, str], datetime] = {}
        self._notes: dict[str, JobNotes] = {}
        """Notes by UID of the job; most jobs have none."""
        cache.job_gone = self._forget

    def note_conflict(self, job_uid: str, kind: Kind, name: str) -> None:
        """Note that a create met an object that is not ours."""
        self._notes_of(job_uid).conflicts |= {(kind, name)}

    def note_progress(self, job_uid: str, progress: Progress) -> None:
        """Note new progress of rank 0; the next pass may write it."""
        self._notes_of(job_uid).progress = progress

    def note_refusal(self, job_uid: str, kind: Kind, name: str, error: ApiError, now: datetime) -> None:
        """Note that the API server refused a child or a change of one, and will refuse it for a while."""
        notes = self._notes_of(job_uid)
        notes.refused = refused_write(notes.refused, (kind.name, name), error, now, self._draw)

    def note_written(self, job_uid: str) -> None:
        """Note that a child was created or changed, so that nothing is refused any more."""
        notes = self._notes.get(job_uid)
        if notes is not None:
            notes.refused = None

    def may_create(self, job_uid: str, now: datetime) -> bool:
        """Whether a create of that job may be tried now."""
        notes = self._notes.get(job_uid, NO_NOTES)
        # Later children of a pass need the earlier ones: a Job must not run with somebody else's ConfigMap.
        return not notes.conflicts and (notes.refused is None or now >= notes.refused.retry_at)

    async def gather(self, key: JobKey, now: datetime) -> Gathered | None:
        """Gather everything about one job; None if it does not exist (any more)."""
        cached = self._cache.job(key)
        if cached is None:
            return None
        begun = time.thread_time()
        job, raw_spec, raw_status, _ = self._reader.job(cached)
        cpu_seconds = time.thread_time() - begun
        self._forget_settled_evidence(job)
        notes = self._notes_of(job.uid)
        revisits: list[float] = []
        look_up_again = await self._live.look_up(job, notes, now)
        if look_up_again is not None and not is_terminal(job.status):
            revisits.append(look_up_again)
        profile = self._profile(job.spec, raw_spec)
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
            observed = replace(observed, namespace=await self._namespaces.view(job.namespace, now))
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
        batch_jobs = await self._workloads.told(observed.batch_jobs, job.namespace, now, revisits)
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
            self._forget(job.uid)
        return Gathered(observed, raw_status, min(revisits, default=None), cpu_seconds)

    def _notes_of(self, job_uid: str) -> JobNotes:
        """The notes about a job. Those about a job that is gone are not kept."""
        return self._notes.setdefault(job_uid, JobNotes()) if self._cache.has_job(job_uid) else JobNotes()

    def _forget(self, job_uid: str) -> None:
        self._notes.pop(job_uid, None)

    def _with_children(self, observed: Observed) -> Observed:
        """Add the children as the cache has them now."""
        uid, name = observed.job.uid, observed.job.name
        config_maps, services = self._cache.owned(CONFIG_MAPS, uid), self._cache.owned(SERVICES, uid)
        batch_jobs = tuple(item.batch_job for item in self._cache.owned(BATCH_JOBS, uid) if item.batch_job is not None)
        return replace(
            observed,
            batch_jobs=batch_jobs,
            pods=_pods_that_count(self._cache.pods_of(uid), batch_jobs),
            plan=next((self._reader.plan(item) for item in config_maps if item.key.name == plan_configmap_name(name)), None),
            service_uid=next((item.key.uid for item in services if item.key.name == service_name(name)), ""),
        )

    def _line(
        self, cached: CachedObject, job: JobView, profile: ProfileView, notes: JobNotes, now: datetime
    ) -> PlaceInLine | None:
        reported, notes.told_ahead = notes.told_ahead, None
        limit = profile.spec.max_active_jobs if profile.spec is not None else None
        if limit is None or is_started(job.status):
            return None
        ahead = self._cache.lines.ahead_of(cached)
        if ahead >= limit:
            stands = reported is not None and reported[1] >= limit and (now - reported[0]).total_seconds() < PLACE_TOLD_SECONDS
            notes.told_ahead = reported if stands else (now, ahead)
        return PlaceInLine(limit=limit, ahead=ahead if notes.told_ahead is None else notes.told_ahead[1])

    def _profile(self, spec: FineTuneJobSpec | None, raw_spec: Mapping[str, Any]) -> ProfileView:
        name = (spec.profile if spec is not None else raw_spec.get("profile")) or DEFAULT_PROFILE
        cached = self._cache.profile(str(name))
        return ProfileView(name=str(name)) if cached is None else self._reader.profile(cached)

    async def _claims(
        self, job: JobView, now: datetime, revisits: list[float], vanishing: set[tuple[Kind, str]], *, is_begun: bool
    ) -> frozenset[str]:
        """Names of the claims that exist. A claim of the template's name that goes away with an earlier job does not count, and
        is added to `vanishing`.
        """
        if job.spec is None or job.deleting or is_ended(job.status):
            return frozenset()
        made = job.spec.workspace.volume_claim_template is not None
        present = set()
        for claim in claims_named_by(job.spec, job.name):
            # A claim that has the template's name by chance belongs to somebody else and is not used: the create reports it as a
            # conflict.
            is_own = made and claim == workspace_claim_name(job.name)
            place = (job.namespace, f"{claim} of {job.uid}" if is_own else claim)
            seen_at = self._claims_seen.get(place)
            if seen_at is None or (now - seen_at).total_seconds() > CLAIM_SEEN_SECONDS:
                document = await self._api.get(CLAIMS, job.namespace, claim)
                state = self._template_claim(document, job, is_begun=is_begun) if is_own and document is not None else None
                if state is TemplateClaim.VANISHING:
                    vanishing.add((CLAIMS, claim))
                if document is None or state in (TemplateClaim.VANISHING, TemplateClaim.FOREIGN):
                    self._claims_seen.pop(place, None)
                    revisits.append(MISSING_RETRY_SECONDS if state is not TemplateClaim.VANISHING else VANISHING_RETRY_SECONDS)
                    continue
                if is_begun or not is_own:
                    # A claim that is not the job's yet is read in each pass until the plan is frozen.
                    self._note_claim(place, now)
            present.add(claim)
        return frozenset(present)

    def _template_claim(self, claim: Document, job: JobView, *, is_begun: bool) -> TemplateClaim:
        key = self._cache.key_of(CLAIMS, claim)
        return TemplateClaim.FOREIGN if key is None else template_claim(key, claim, job, is_begun=is_begun)

    def _note_claim(self, place: tuple[str, str], now: datetime) -> None:
        self._claims_seen[place] = now
        if len(self._claims_seen) > MOST_CLAIMS_SEEN:
            is_old = {other: (now - seen_at).total_seconds() > CLAIM_SEEN_SECONDS for other, seen_at in self._claims_seen.items()}
            self._claims_seen = {other: seen_at for other, seen_at in self._claims_seen.items() if not is_old[other]}

    def _with_events(self, observed: Observed, now: datetime, revisits: list[float]) -> Observed:
        """Add the Warning events of Jobs, and of pods that have been pending for a while: in the first seconds of a pod they
        report what passes by itself.
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
        """Objects that have the name of a child and are not ours: those that an earlier job of this name has left and that go
        away, and the others.
        """
        vanishing: set[tuple[Kind, str]] = set()
        standing: set[tuple[Kind, str]] = set()
        for kind, name in notes.conflicts:
            document = await self._api.get(kind, job.namespace, name)
            key = None if document is None else self._cache.key_of(kind, document)
            if document is None or key is None or belongs_to(document, job.uid):
                continue
            is_marked = kind == CLAIMS and template_claim(key, document, job) is TemplateClaim.VANISHING
            (vanishing if is_marked or is_of_namesake(key, job) else standing).add((kind, name))
        notes.conflicts = frozenset(vanishing | standing)
        if notes.conflicts:
            revisits.append(VANISHING_RETRY_SECONDS if vanishing else MISSING_RETRY_SECONDS)
        return vanishing, standing

    def _forget_settled_evidence(self, job: JobView) -> None:
        """Forget the gone pods that are no longer needed, because status has the outcome of their attempt."""
        existing = {cached.key.uid for cached in self._cache.owned(BATCH_JOBS, job.uid)}
        role = current_role(job.status)
        current = (role, job_number(job.status, role, attempt_of(job.status, role)))
        finished = is_terminal(job.status)

        def is_settled(cached: CachedObject) -> bool:
            pod = cached.pod
            if pod is None or cached.key.owner_uid in existing:
                return False
            return finished or (pod.role, pod.attempt) != current

        self._cache.forget_evidence(job.uid, is_settled)


def _pods_that_count(pods: list[CachedObject], batch_jobs: tuple[BatchJobView, ...]) -> tuple[PodView, ...]:
    """Leave out pods of a deleted Job if another one of its name exists: they are no evidence about the new one."""
    uids, places = {batch_job.uid for batch_job in batch_jobs}, {(batch_job.role, batch_job.attempt) for batch_job in batch_jobs}
    shown = [(item.key.owner_uid, item.pod) for item in pods if item.pod is not None]
    return tuple(pod for owner_uid, pod in shown if owner_uid in uids or (pod.role, pod.attempt) not in places)


def _waits_for_name(observed: Observed) -> bool:
    """Whether nothing is created because a name is taken, perhaps for weeks. A live list would be useless then, except at the
    end of the job.
    """
    job = observed.job
    return bool(observed.vanishing or observed.conflicts) and not (is_ended(job.status) or job.deleting)


def _named(objects: set[tuple[Kind, str]]) -> tuple[str, ...]:
    return tuple(sorted(f"{kind.name}/{name}" for kind, name in objects))
