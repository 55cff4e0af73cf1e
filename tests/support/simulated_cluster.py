"""A small in-memory cluster for the operator's decisions: API server, Job controller, kubelet and garbage collector, step by
step.

It enforces while it runs what must never happen (see `_check_create` and `_check_status`): a violation raises AssertionError.
The operator sees children through a cache that may lag behind but never goes back, its own status writes at once, and live
lists as they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from finetune_job.api.job import parse_job
from finetune_job.api.status import FineTuneJobStatus
from finetune_job.conditions import find_condition, is_condition_true
from finetune_job.failures import EXIT_CODES, FailureClass
from finetune_job.names import LABEL_ATTEMPT, LABEL_ROLE, PLAN_KEY, Role
from finetune_job.reasons import ConditionType
from finetune_operator.children.claims import claims_named_by
from finetune_operator.decide.actions import Actions, Create, Delete
from finetune_operator.decide.gang.attempts import restarts_of
from finetune_operator.decide.reconcile import reconcile
from finetune_operator.decide.seen.children_seen import (
    BatchJobView,
    ConfigMapView,
    JobConditionView,
    LiveChildren,
    LiveJob,
    LivePod,
    PodView,
)
from finetune_operator.decide.seen.observed import JobView, Observed, ProfileView
from finetune_operator.decide.seen.stage import attempt_of, is_ended, is_terminal
from finetune_operator.decide.stages.blocked import needs_live_list
from tests.support.builders import T0, JobBuilder, envelope


@dataclass(frozen=True)
class Children:
    """The children in a cache."""

    batch_jobs: tuple[BatchJobView, ...] = ()
    pods: tuple[PodView, ...] = ()
    plan: ConfigMapView | None = None
    service_exists: bool = False
    claims: frozenset[str] = frozenset()


@dataclass
class SimulatedCluster:
    """One FineTuneJob and its children."""

    job: JobBuilder
    now: datetime = T0
    status: FineTuneJobStatus = field(default_factory=FineTuneJobStatus)
    generation: int = 1
    children: Children = field(default_factory=Children)
    seen: list[Children] = field(default_factory=list)
    """States of the children, oldest first. The cache shows the first one and has not yet seen the others."""
    created: list[tuple[str, str]] = field(default_factory=list)
    """Kind and name of every object ever created."""
    uids: int = 0

    def __post_init__(self) -> None:
        spec = parse_job(self.job.document).spec
        made = spec.workspace.volume_claim_template is not None
        ours = {"tune-workspace"} if made else set()
        self.children = Children(claims=frozenset(set(claims_named_by(spec, "tune")) - ours))
        self.seen = [self.children]

    # The operator.

    def observe(self) -> Observed:
        """Return the state that the operator sees now."""
        parsed = parse_job(self.job.document)
        shown = self.seen[0]
        observed = Observed(
            job=JobView("team", "tune", parsed.metadata.uid, self.generation, "1", parsed.spec, status=self.status),
            profile=ProfileView("default", self.job.profile),
            batch_jobs=shown.batch_jobs,
            pods=shown.pods,
            plan=shown.plan,
            service_uid="uid-service" if shown.service_exists else "",
            claims=shown.claims,
        )
        if not needs_live_list(observed):
            return observed
        running = tuple(LivePod(pod.name, pod.uid, pod.node) for pod in self.children.pods if not pod.is_terminal)
        jobs = tuple(LiveJob(job.name, job.uid, job.deleting) for job in self.children.batch_jobs)
        return replace(observed, live=LiveChildren(jobs, running))

    def reconcile_once(self) -> Actions:
        """One pass of the operator with all of its effects."""
        actions = reconcile(self.observe(), self.now)
        if actions.status is not None:
            self._check_status(actions.status)
            self.status = FineTuneJobStatus.model_validate(actions.status.model_dump(mode="json", by_alias=True))
        for delete in actions.deletes:
            self._delete(delete)
        for create in actions.creates:
            self._create(create)
        return actions

    def catch_up(self, steps: int = 1_000_000) -> None:
        """Let the cache see what happened since, at most so many changes of it."""
        for _ in range(min(steps, len(self.seen) - 1)):
            self.seen.pop(0)

    def edit(self, job: JobBuilder) -> None:
        """A user applies another manifest."""
        if job.document != self.job.document:
            self.job = job
            self.generation += 1

    # The invariants.

    def _check_status(self, after: FineTuneJobStatus) -> None:
        before = self.status
        assert not is_terminal(before) or is_terminal(after), "terminal stays terminal"
        if is_ended(before):
            kind = ConditionType.SUCCEEDED
            assert find_condition(before.conditions, kind) == _regenerated(find_condition(after.conditions, kind), before, kind)
        if is_terminal(before):
            kind = ConditionType.FINISHED
            assert find_condition(before.conditions, kind) == _regenerated(find_condition(after.conditions, kind), before, kind)
            assert before.completion_time == after.completion_time
        assert not before.start_time or before.start_time == after.start_time, "the start is written once"
        if before.plan is not None:
            assert after.plan is not None
            assert before.plan.hash == after.plan.hash, "the plan is frozen"
        for role in Role:
            assert attempt_of(after, role) in (attempt_of(before, role), attempt_of(before, role) + 1)
        if after.attempt > before.attempt:
            closed = [one for one in after.attempts if (one.role, one.number) == (Role.TRAIN, before.attempt)]
            ended = bool(closed) and closed[0].outcome in ("Failed", "Suspended")
            retried = after.retry_handled > before.retry_handled
            assert ended or retried, "the end of an attempt is recorded with the number of the next"
        for role in Role:
            assert restarts_of(after, role).counted <= parse_job(self.job.document).spec.run.max_restarts
        if is_condition_true(before.conditions, ConditionType.TRAINED) and is_ended(after) and not is_ended(before):
            end = find_condition(after.conditions, ConditionType.SUCCEEDED)
            assert end is not None
            allowed = ("Completed", "Cancelled", "VerificationFailed", "ActiveDeadlineExceeded")
            assert end.reason in allowed, f"what was trained is thrown away: {end.reason}: {end.message}"
        if is_terminal(after):
            alive = [pod.name for pod in self.seen[0].pods if not pod.is_terminal]
            assert not alive, f"finished while pods run: {alive}"

    def _check_create(self, body: Mapping[str, Any]) -> None:
        assert self.status.start_time, "the freeze comes before every child"
        assert not is_ended(self.status), "a job that has ended creates nothing"
        if body["kind"] != "Job":
            return
        role, attempt = _role_and_attempt(body)
        assert attempt_of(self.status, role) == attempt, "only the Job of the current attempt is created"
        alive = [pod.name for pod in self.children.pods if not pod.is_terminal]
        assert not alive, f"pods of another Job still run: {alive}"
        assert not [job.name for job in self.children.batch_jobs if job.role is role], "the earlier Job is still there"
        name = body["metadata"]["name"]
        assert ("Job", name) not in self.created or not self._was_recorded(role, attempt), f"Job {name} is created twice"

    def _was_recorded(self, role: Role, attempt: int) -> bool:
        return any((one.role, one.number) == (role, attempt) for one in self.status.attempts)

    # The API server.

    def _create(self, action: Create) -> None:
        body, kind, name = action.body, action.kind, action.name
        now = self.children
        exists = {
            "Job": name in {job.name for job in now.batch_jobs},
            "ConfigMap": now.plan is not None,
            "Service": now.service_exists,
            "PersistentVolumeClaim": name in now.claims,
            "NetworkPolicy": (kind, name) in self.created,
        }[kind]
        if exists:
            return
        self._check_create(body)
        self.created.append((kind, name))
        self.uids += 1
        if kind == "ConfigMap":
            self._become(plan=ConfigMapView(name, f"uid-{self.uids}", body["data"][PLAN_KEY]))
        elif kind == "Service":
            self._become(service_exists=True)
        elif kind == "PersistentVolumeClaim":
            self._become(claims=now.claims | {name})
        elif kind == "NetworkPolicy":
            pass  # what was created is noted above; nothing looks at it again
        else:
            role, attempt = _role_and_attempt(body)
            job = BatchJobView(name, f"uid-{self.uids}", role, attempt, created=self.now, start_time=self.now)
            pods = tuple(
                PodView(f"{name}-{rank}-{self.uids}", f"uid-{self.uids}-{rank}", role, attempt, created=self.now, node_rank=rank)
                for rank in range(body["spec"]["completions"])
            )
            self._become(batch_jobs=(*now.batch_jobs, job), pods=(*now.pods, *pods))

    def _delete(self, action: Delete) -> None:
        if action.kind == "ConfigMap":
            assert is_ended(self.status), "the plan of a running job is deleted"
            self._become(plan=None)
        elif action.kind == "Pod":
            self._each_pod(lambda pod: replace(pod, gone=True) if pod.uid == action.uid and action.force else pod)
        elif action.kind == "Service":
            self._become(service_exists=False)
        else:
            for job in self.children.batch_jobs:
                if job.uid == action.uid:
                    ahead = attempt_of(self.status, job.role) > job.attempt
                    stopped = is_condition_true(self.status.conditions, ConditionType.STALLED)
                    assert ahead or stopped or is_ended(self.status), "the next number is written before the Job is deleted"
                    self.delete_job(job)

    # The rest of the world.

    def delete_job(self, job: BatchJobView) -> None:
        """Foreground deletion: the pods are asked to end, the Job goes when they are gone."""
        pods = tuple(
            replace(pod, deletion_requested=pod.deletion_requested or self.now)
            if self._belongs(pod, job) and not pod.gone
            else pod
            for pod in self.children.pods
        )
        jobs = tuple(replace(one, deleting=True) if one.uid == job.uid else one for one in self.children.batch_jobs)
        self._become(pods=pods, batch_jobs=jobs)

    def start_pods(self) -> None:
        self._each_pod(lambda pod: replace(pod, phase="Running", started=self.now) if self._may_run(pod) else pod)

    def end_pod(self, index: int, failure: FailureClass | None) -> None:
        """A running pod ends by itself."""
        running = [pod for pod in self.children.pods if pod.phase == "Running" and not pod.gone]
        if running:
            self._replace_pod(running[index % len(running)], self._ended(running[index % len(running)], failure))

    def succeed_all(self) -> None:
        """Every running pod whose Job is healthy succeeds."""
        self._each_pod(lambda pod: self._ended(pod, None) if pod.phase == "Running" and self._may_run(pod) else pod)

    def finish_deletions(self, *, with_evidence: bool) -> None:
        """Pods that were asked to end do, and Jobs that are being deleted go when their pods are gone."""

        def gone(pod: PodView) -> PodView:
            if pod.gone or pod.deletion_requested is None:
                return pod
            ended = self._ended(pod, FailureClass.PREEMPTED) if with_evidence and pod.phase == "Running" else pod
            return replace(ended, gone=True)

        self._each_pod(gone)
        doomed = [job for job in self.children.batch_jobs if job.deleting and all(pod.gone for pod in self._pods_of(job))]
        for job in doomed:
            pods = tuple(pod for pod in self.children.pods if not self._belongs(pod, job))
            self._become(batch_jobs=tuple(one for one in self.children.batch_jobs if one.uid != job.uid), pods=pods)

    def job_controller(self) -> None:
        """Set the conditions of Jobs; when one pod fails the others are deleted."""
        for job in self.children.batch_jobs:
            pods = self._pods_of(job)
            broken = [pod for pod in pods if pod.phase == "Failed" or pod.gone]
            conditions = job.conditions
            if job.has("Complete", "Failed"):
                continue
            if broken and not job.has("FailureTarget") and not job.deleting:
                disrupted = any(pod.disruption for pod in broken)
                reason = "PodFailurePolicy" if disrupted else "BackoffLimitExceeded"
                conditions = (*conditions, JobConditionView("FailureTarget", reason, since=self.now))
                for pod in pods:
                    if not pod.is_terminal:
                        self._replace_pod(pod, replace(pod, deletion_requested=pod.deletion_requested or self.now))
            elif job.has("FailureTarget") and all(pod.is_terminal for pod in pods):
                conditions = (*conditions, JobConditionView("Failed", "BackoffLimitExceeded", since=self.now))
            elif pods and all(pod.phase == "Succeeded" for pod in pods):
                conditions = (*conditions, JobConditionView("Complete", since=self.now))
            changed = replace(job, conditions=conditions)
            self._become(batch_jobs=tuple(changed if one.uid == job.uid else one for one in self.children.batch_jobs))

    def pass_time(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def settle(self, passes: int = 200) -> None:
        """Everything goes well from here on, until the operator has nothing more to do."""
        for _ in range(passes):
            self.finish_deletions(with_evidence=True)
            self.start_pods()
            self.catch_up()
            self.reconcile_once()
            self.succeed_all()
            self.job_controller()
            self.catch_up()
            actions = self.reconcile_once()
            self.pass_time(400)
            quiet = actions.status is None and not actions.creates and not actions.deletes
            held = is_terminal(self.status) or any(
                is_condition_true(self.status.conditions, kind) for kind in (ConditionType.STALLED, ConditionType.SUSPENDED)
            )
            if quiet and held and not any(job.deleting for job in self.children.batch_jobs):
                return
        raise AssertionError(f"the job came to no rest: {self.status.model_dump_json(indent=1)}")

    # Details.

    def _become(self, **changes: Any) -> None:
        changed = replace(self.children, **changes)
        if changed != self.children:
            self.children = changed
            self.seen.append(changed)

    def _belongs(self, pod: PodView, job: BatchJobView) -> bool:
        return (pod.role, pod.attempt) == (job.role, job.attempt)

    def _pods_of(self, job: BatchJobView) -> list[PodView]:
        return [pod for pod in self.children.pods if self._belongs(pod, job)]

    def _may_run(self, pod: PodView) -> bool:
        jobs = [job for job in self.children.batch_jobs if self._belongs(pod, job)]
        healthy = bool(jobs) and not jobs[0].deleting and not jobs[0].has("FailureTarget")
        return healthy and pod.phase in ("Pending", "Running") and pod.deletion_requested is None and not pod.gone

    def _ended(self, pod: PodView, failure: FailureClass | None) -> PodView:
        code = 0 if failure is None else EXIT_CODES.get(failure, 1)
        message = envelope(failure, role=pod.role, node_rank=pod.node_rank, time=self.now.timestamp())
        phase = "Succeeded" if code == 0 else "Failed"
        return replace(
            pod, phase=phase, exit_code=code, started=pod.started or self.now, finished=self.now, termination_message=message
        )

    def _replace_pod(self, before: PodView, after: PodView) -> None:
        self._each_pod(lambda pod: after if pod.uid == before.uid else pod)

    def _each_pod(self, change: Any) -> None:
        self._become(pods=tuple(change(pod) for pod in self.children.pods))


def _role_and_attempt(body: Mapping[str, Any]) -> tuple[Role, int]:
    labels = body["metadata"]["labels"]
    return Role(labels[LABEL_ROLE]), int(labels[LABEL_ATTEMPT])


def _regenerated(condition: Any, before: FineTuneJobStatus, kind: ConditionType) -> Any:
    """The condition with the generation it was observed at before: only that may differ at the end of a job."""
    known = find_condition(before.conditions, kind)
    return condition.model_copy(update={"observed_generation": known.observed_generation}) if known is not None else condition
