"""Jobs and observations for tests: minimal and valid by default, immutable, built through the real parser and the real resolver.

    job = a_job().nodes(2).run(maxRestarts=1)
    seen = observing(job).training().pod(1, exit_code=137, reason="OOMKilled").batch_job_failed()
    actions = reconcile(seen.build(), T0)

A test names only what matters to it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from finetune_job.api.job import FineTuneJob, parse_job
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.api.status import Attempt, FineTuneJobStatus, PlanStatus, Restarts
from finetune_job.conditions import initial_conditions, job_phase, with_condition
from finetune_job.failures import EXIT_CODES, FailureClass, Outcome, TerminationReport
from finetune_job.finding import Finding
from finetune_job.names import Role, batch_job_name, plan_configmap_name
from finetune_job.plan.digest import canonical_json, plan_sha256
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import JobIdentity, RunPlan
from finetune_job.progress import Progress
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.children.claims import claims_named_by
from finetune_operator.decide.seen.children_seen import (
    BatchJobView,
    ConfigMapView,
    JobConditionView,
    LiveChildren,
    PodView,
    RefusedWrite,
)
from finetune_operator.decide.seen.observed import JobView, NamespaceView, NodeView, Observed, PlaceInLine, ProfileView
from finetune_operator.decide.seen.stage import ATTEMPT_FIELD, CONDITION, attempt_of
from finetune_operator.decide.seen.times import timestamp

T0 = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
"""Now, in unit tests."""
UID = "11111111-2222-3333-4444-555555555555"


def after(seconds: float) -> datetime:
    """A moment after T0 (or before, where negative)."""
    return T0 + timedelta(seconds=seconds)


def a_profile(**fields: Any) -> FineTuneProfileSpec:
    """A profile; fields by their camelCase names. All ways out of the cluster are open where a field does not say otherwise."""
    ways_out = {
        "fetch": {"allowedSources": ["hf://", "s3://"], **fields.get("fetch", {})},
        "publish": {"allowedDestinations": ["hf://", "s3://", "oci://"], **fields.get("publish", {})},
    }
    return FineTuneProfileSpec.model_validate(
        {"trainerImage": "registry.example/trainer@sha256:" + "a" * 64, "gpu": {"memory": "80Gi"}, **fields, **ways_out}
    )


@dataclass(frozen=True)
class JobBuilder:
    """A manifest in the making."""

    document: dict[str, Any]
    profile: FineTuneProfileSpec

    def spec(self, path: str, value: Any) -> JobBuilder:
        """Set a field by its dotted path under spec; None removes it."""
        document = copy.deepcopy(self.document)
        *parents, last = path.split(".")
        here = document["spec"]
        for parent in parents:
            here = here.setdefault(parent, {})
        if value is None:
            here.pop(last, None)
        else:
            here[last] = value
        return replace(self, document=document)

    def named(self, name: str) -> JobBuilder:
        document = copy.deepcopy(self.document)
        document["metadata"]["name"] = name
        return replace(self, document=document)

    def nodes(self, count: int) -> JobBuilder:
        return self.spec("parallelism.nodes", count)

    def processes_per_node(self, count: int) -> JobBuilder:
        return self.spec("parallelism.processesPerNode", count)

    def run(self, **fields: Any) -> JobBuilder:
        """Set fields of spec.run."""
        builder = self
        for name, value in fields.items():
            builder = builder.spec(f"run.{name}", value)
        return builder

    def with_profile(self, **fields: Any) -> JobBuilder:
        return replace(self, profile=a_profile(**fields))

    def parse(self) -> FineTuneJob:
        return parse_job(self.document)

    def plan(self) -> RunPlan:
        job = self.parse()
        identity = JobIdentity(namespace=job.metadata.namespace, name=job.metadata.name, uid=job.metadata.uid)
        return resolve(identity, job.spec, self.profile, "default")


def a_job() -> JobBuilder:
    """A LoRA job of one node and one process."""
    return JobBuilder(
        {
            "apiVersion": "finetune.dev/v1alpha1",
            "kind": "FineTuneJob",
            "metadata": {"name": "tune", "namespace": "team", "uid": UID, "generation": 1},
            "spec": {
                "model": {"source": "pvc://models/base"},
                "data": {"source": "pvc://data/train.jsonl"},
                "training": {"maxSteps": 10, "globalBatchSize": 48},
                "parallelism": {"nodes": 1, "processesPerNode": 1},
                "output": {"destination": "pvc://results/tune"},
                "workspace": {"claimName": "scratch"},
            },
        },
        a_profile(),
    )


def envelope(
    failure: FailureClass | None = None, *, outcome: Outcome | None = None, role: Role = Role.TRAIN, **fields: Any
) -> str:
    """A container's termination message."""
    default = Outcome.SUCCEEDED if failure is None else Outcome.FAILED
    return TerminationReport(role=str(role), outcome=outcome or default, failure=failure, **fields).envelope()


@dataclass(frozen=True)
class ObservedBuilder:
    """Builds the state that the operator sees."""

    job: JobBuilder
    status: FineTuneJobStatus = field(default_factory=FineTuneJobStatus)
    plan_json: str | None = None
    batch_jobs: tuple[BatchJobView, ...] = ()
    pods: tuple[PodView, ...] = ()
    service_exists: bool = False
    missing_claims: frozenset[str] = frozenset()
    conflicts: tuple[str, ...] = ()
    vanishing: tuple[str, ...] = ()
    live: LiveChildren | None = None
    refused_write: RefusedWrite | None = None
    line: PlaceInLine | None = None
    profile: ProfileView | None = None
    namespace: NamespaceView | None = None
    role: Role = Role.PREFLIGHT
    progress: Progress | None = None
    nodes_seen: tuple[NodeView, ...] = ()
    waiting_in_queue: int | None = None

    # What has happened to the job so far.

    def frozen(self) -> ObservedBuilder:
        """The plan is in status; its ConfigMap is not there yet."""
        status = FineTuneJobStatus(conditions=initial_conditions(generation=1, now=timestamp(after(-600))))
        plan = PlanStatus(hash=plan_sha256(self.job.plan()), trainer_image=self.job.profile.trainer_image)
        builder = replace(self, status=status.model_copy(update={"start_time": timestamp(after(-600)), "plan": plan}))
        for stage in CONDITION.values():
            builder = builder.condition(stage, None, Reason.PENDING)
        for kind, reason in (
            (ConditionType.FINISHED, Reason.RUNNING),
            (ConditionType.STALLED, Reason.HEALTHY),
            (ConditionType.SUSPENDED, Reason.NOT_SUSPENDED),
        ):
            builder = builder.condition(kind, False, reason)
        return builder.condition(ConditionType.VALIDATED, True, Reason.ACCEPTED)

    def fetching(self) -> ObservedBuilder:
        """The plan is stored, fetch comes next."""
        builder = replace(self.frozen(), plan_json=canonical_json(self.job.plan()), role=Role.FETCH)
        return builder.condition(ConditionType.FETCHED, None, Reason.PENDING)

    def started(self) -> ObservedBuilder:
        """The plan is stored, there was nothing to fetch, preflight comes next."""
        builder = replace(self.fetching().condition(ConditionType.FETCHED, True, Reason.SKIPPED), role=Role.PREFLIGHT)
        return builder.condition(ConditionType.PREPARED, None, Reason.PENDING)

    def prepared(self) -> ObservedBuilder:
        """Preflight is done, training comes next."""
        return replace(self.started().condition(ConditionType.PREPARED, True, Reason.COMPLETED), role=Role.TRAIN)

    def training(self, attempt: int = 0) -> ObservedBuilder:
        """The gang's Job of an attempt exists, and every pod of it runs."""
        builder = self.prepared().attempt(attempt).condition(ConditionType.TRAINED, None, Reason.RUNNING)
        attempts = [Attempt(number=attempt, start_time=timestamp(after(-300)))]
        builder = replace(builder, service_exists=True, status=builder.status.model_copy(update={"attempts": attempts}))
        return builder.batch_job(attempt=attempt).running()

    def trained(self) -> ObservedBuilder:
        """Training is done, the merge comes next."""
        return replace(self.prepared().condition(ConditionType.TRAINED, True, Reason.COMPLETED), role=Role.MERGE)

    def merged(self) -> ObservedBuilder:
        """The merge is done and verified, its results are still to be published."""
        return replace(self.trained().condition(ConditionType.MERGED, True, Reason.COMPLETED), role=Role.PUBLISH)

    def attempt(self, number: int) -> ObservedBuilder:
        """Set the number of the current attempt of the role that is due."""
        return self.with_status(**{ATTEMPT_FIELD[self.role]: number})

    def restarts(self, counted: int = 0, uncounted: int = 0) -> ObservedBuilder:
        return self.with_status(restarts=Restarts(counted=counted, uncounted=uncounted))

    def with_status(self, **fields: Any) -> ObservedBuilder:
        return replace(self, status=self.status.model_copy(update=fields))

    def condition(self, kind: ConditionType, status: bool | None, reason: Reason, message: str = "") -> ObservedBuilder:
        now = timestamp(after(-600))
        conditions = with_condition(self.status.conditions, kind, status, reason, message, generation=1, now=now)
        return self.with_status(conditions=conditions, phase=job_phase(conditions), observed_generation=1)

    # What exists in the cluster.

    def batch_job(self, *conditions: str, attempt: int | None = None, **fields: Any) -> ObservedBuilder:
        """The Job of the role that is due, created five minutes ago, with these conditions True."""
        number = self._attempt() if attempt is None else attempt
        nodes = self._nodes()
        view = BatchJobView(
            name=batch_job_name(self._name(), self.role, number, nodes),
            uid=f"uid-{self.role}-{number}",
            role=self.role,
            attempt=number,
            created=after(-300),
            start_time=after(-300),
            conditions=tuple(JobConditionView(condition, since=after(-1)) for condition in conditions),
        )
        others = tuple(job for job in self.batch_jobs if (job.role, job.attempt) != (self.role, number))
        return replace(self, batch_jobs=(*others, replace(view, **fields)))

    def pod(self, node_rank: int = 0, **fields: Any) -> ObservedBuilder:
        """A pod of the current Job; an exit code ends it, one second ago unless said otherwise."""
        number = self._attempt()
        name = f"{batch_job_name(self._name(), self.role, number, self._nodes())}-{node_rank}"
        before = next((pod for pod in self.pods if pod.name == name), None)
        view = before or PodView(name, f"uid-{name}", self.role, number, created=after(-300), node_rank=node_rank, node="node-a")
        if fields.get("exit_code") is not None:
            ended = {
                "phase": "Succeeded" if fields["exit_code"] == 0 else "Failed",
                "finished": after(-1),
                "started": after(-290),
            }
            fields = {**ended, **fields}
        others = tuple(pod for pod in self.pods if pod.name != name)
        return replace(self, pods=(*others, replace(view, **fields)))

    def failed_pod(self, node_rank: int, failure: FailureClass, **report: Any) -> ObservedBuilder:
        """A pod that ended with the exit code and the report of a class."""
        message = envelope(failure, role=self.role, node_rank=node_rank, **report)
        return self.pod(node_rank, exit_code=EXIT_CODES[failure], termination_message=message, reason="Error")

    def running(self) -> ObservedBuilder:
        """Every pod of the current Job runs."""
        builder = self
        for node_rank in range(self._nodes()):
            builder = builder.pod(node_rank, phase="Running", started=after(-290))
        return builder

    def batch_job_failed(self, reason: str = "BackoffLimitExceeded") -> ObservedBuilder:
        """The Job controller gave the current Job up."""
        builder = self.batch_job()
        conditions = (JobConditionView("FailureTarget", reason, since=after(-1)),)
        *others, job = builder.batch_jobs
        return replace(builder, batch_jobs=(*others, replace(job, conditions=conditions)))

    def succeeded(self, **facts: str) -> ObservedBuilder:
        """The current Job is complete, with a report of node rank 0."""
        builder = self.batch_job("Complete")
        for node_rank in range(self._nodes()):
            builder = builder.pod(node_rank, exit_code=0, termination_message=envelope(role=self.role, facts=facts))
        return builder

    def refused(self, *findings: Finding) -> ObservedBuilder:
        """Preflight's container refused the job."""
        message = envelope(
            FailureClass.USER_CONFIG, outcome=Outcome.REFUSED, role=self.role, findings=list(findings), message="refused"
        )
        return self.pod(0, exit_code=40, termination_message=message).batch_job_failed()

    def nothing_left(self) -> ObservedBuilder:
        """A live list shows nothing of earlier attempts."""
        return replace(self, live=LiveChildren())

    def but(self, **fields: Any) -> ObservedBuilder:
        """Set fields of this builder."""
        return replace(self, **fields)

    def build(self) -> Observed:
        """The observation."""
        parsed = self.job.parse()
        name = parsed.metadata.name
        plan = None
        if self.plan_json is not None:
            plan = ConfigMapView(plan_configmap_name(name), "uid-plan", self.plan_json)
        return Observed(
            job=JobView(
                namespace=parsed.metadata.namespace,
                name=name,
                uid=parsed.metadata.uid,
                generation=parsed.metadata.generation,
                resource_version="1",
                spec=parsed.spec,
                status=self.status,
            ),
            profile=self.profile or ProfileView("default", self.job.profile),
            namespace=self.namespace,
            batch_jobs=self.batch_jobs,
            pods=self.pods,
            plan=plan,
            service_uid="uid-service" if self.service_exists else "",
            claims=frozenset(claims_named_by(parsed.spec, name)) - self.missing_claims,
            conflicts=self.conflicts,
            vanishing=self.vanishing,
            live=self.live,
            refused=self.refused_write,
            line=self.line,
            nodes=self.nodes_seen,
            waiting_in_queue=self.waiting_in_queue,
            progress=self.progress,
        )

    def _attempt(self) -> int:
        return attempt_of(self.status, self.role)

    def _nodes(self) -> int:
        return self.job.parse().spec.parallelism.nodes if self.role is Role.TRAIN else 1

    def _name(self) -> str:
        return str(self.job.document["metadata"]["name"])


def observing(job: JobBuilder) -> ObservedBuilder:
    """Build the state in which the operator first sees a job."""
    return ObservedBuilder(job)
