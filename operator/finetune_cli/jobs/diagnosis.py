"""Diagnosis of a job: the reason, the evidence, what to do, and, if one is known, a patch for a new job."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from finetune_cli.jobs import documents
from finetune_cli.jobs.durations import duration_text
from finetune_cli.jobs.patches import NO_PATCH, Patch, assignments, patch_for
from finetune_cli.jobs.progress import current_stage, stage_name
from finetune_cli.jobs.seen import SeenEvent, SeenJob, SeenPod
from finetune_job.api.documentation import member_docs
from finetune_job.api.status import Attempt, Condition
from finetune_job.conditions import find_condition
from finetune_job.failures import FailureClass
from finetune_job.names import Role, workspace_folder
from finetune_job.reasons import AttemptOutcome, ConditionType, Reason
from finetune_operator.decide.restart_policy import POLICY, Retry

SILENT_SECONDS = 900
"""A job that trains and shows no new step for so long is said to be silent."""
_MOST_EVENTS = 5
_MOST_EVIDENCE = 8
_WATCHDOG = "the ranks' own watchdog ends the attempt after spec.training.stepTimeoutSeconds."


@dataclass(frozen=True)
class Diagnosis:
    """The answer of `explain JOB`."""

    reason: str = ""
    """The reason in a sentence or two; empty: nothing is wrong."""
    word: str = ""
    """The failure class or reason that `explain` tells more of."""
    evidence: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    """Advice, the surest first."""
    commands: tuple[str, ...] = ()
    """Commands for a shell."""
    patch: Patch | None = None
    """JSON merge patch of a manifest of a new job; None: no change is known that would help."""


def diagnose(
    job: SeenJob, now: datetime, pods: Sequence[SeenPod] = (), events: Sequence[SeenEvent] = (), fixes: Patch | None = None
) -> Diagnosis:
    """Diagnose a job from its status, and from pods and events as far as they were seen.

    `fixes`: of the rules' findings, as a patch.
    """
    diagnosis = _of_status(job, now, fixes)
    if not diagnosis.reason:
        return diagnosis
    evidence = [*diagnosis.evidence, *_pod_evidence(pods), *_event_evidence(events)]
    return replace(diagnosis, evidence=tuple(dict.fromkeys(evidence))[:_MOST_EVIDENCE])


def _of_status(job: SeenJob, now: datetime, fixes: Patch | None) -> Diagnosis:
    if not job.status.conditions:
        doctor = shlex.join(["finetune", "doctor", *job.flags])
        return Diagnosis(
            "No operator has looked at this job yet.",
            Reason.NOT_OBSERVED,
            advice=(f"See with `{doctor}` whether an operator runs that serves this namespace.",),
        )
    match job.phase:
        case "Succeeded":
            return Diagnosis()
        case "Cancelled":
            return Diagnosis(
                "spec.run.cancel is true: somebody ended this job for good.",
                Reason.CANCELLED,
                commands=(_new_job(job, None),),
            )
        case "Failed":
            return _failed(job)
        case "Stalled":
            return _stalled(job, fixes)
        case "Suspended":
            return Diagnosis(
                "spec.run.suspend is true: the job holds no pods, and its checkpoint is kept.",
                Reason.SUSPENDED_BY_USER,
                commands=(job.command("resume"),),
            )
    return _under_way(job, now)


def _failed(job: SeenJob) -> Diagnosis:
    condition = find_condition(job.status.conditions, ConditionType.SUCCEEDED)
    reason = condition.reason if condition is not None else Reason.FAILED
    attempt = last_failure(job)
    if attempt is None or attempt.failure is None:
        message = condition.message if condition is not None else ""
        return Diagnosis(
            f"{_meaning(reason)} {message}".strip(), reason, advice=(_STAYS_FAILED,), commands=(_new_job(job, None),)
        )
    exhausted = f" {_meaning(reason)}" if reason == Reason.RESTARTS_EXHAUSTED else ""
    patch = patch_for(attempt.failure, job, attempt.role)
    policy = POLICY[attempt.failure]
    advice = [attempt.hint or policy.advice]
    if patch is None:
        advice.append(NO_PATCH[attempt.failure])
    if policy.retry is not Retry.NEVER and (patch is None or policy.outside):
        advice.append("The cause may be gone by now: the same spec may run as a new job.")
    return Diagnosis(
        f"{attempt.role} failed: {attempt.message or attempt.failure}. {_meaning(attempt.failure)}{exhausted}",
        attempt.failure,
        tuple(_attempt_evidence(attempt)),
        (*(each for each in advice if each), _STAYS_FAILED),
        (_new_job(job, patch),),
        patch,
    )


def _room_for_new_job(job: SeenJob, failure: FailureClass) -> list[str]:
    """A claim that is full of this job is too small for another one on it."""
    claim = documents.text(job.spec, "workspace", "claimName")
    if failure is not FailureClass.DISK_FULL or not claim:
        return []
    folder = workspace_folder(job.name, job.uid)
    return [f"Before a new job writes to the same claim, remove the folder {folder} of claim {claim}: it holds this job's files."]


_STAYS_FAILED = "A job that has failed stays failed: make a new one of it."


def _new_job(job: SeenJob, patch: Patch | None) -> str:
    changes = "".join(f" --set {shlex.quote(each)}" for each in assignments(patch or {}, ""))
    # The manifest names no namespace, and the context's may be another.
    return f"{job.command('fork')}{changes} | {shlex.join(['finetune', 'submit', '-', *job.flags])}"


def _stalled(job: SeenJob, fixes: Patch | None) -> Diagnosis:
    stalled = find_condition(job.status.conditions, ConditionType.STALLED)
    reason, message = (stalled.reason, stalled.message) if stalled is not None else ("", "")
    attempt, patch = last_failure(job), fixes
    # The operator also tells as a finding, of no field, what the attempt ended with.
    of_attempt = f"{attempt.role}/{attempt.failure}" if attempt is not None else ""
    errors = [each for each in job.status.findings if each.severity == "error" and each.rule != of_attempt]
    evidence = [f"{each.rule}: {each.field} is {each.value or 'not set'}. {each.message}" for each in errors]
    advice = [each.fix for each in errors if each.fix]
    commands: list[str] = []
    of_new_job: list[str] = []
    if attempt is not None and not errors:
        failure = attempt.failure or FailureClass.UNKNOWN
        evidence += _attempt_evidence(attempt)
        advice += [attempt.hint or POLICY[failure].advice]
        patch = patch or patch_for(failure, job, attempt.role)
        advice += [NO_PATCH[failure]] if patch is None else []
        if patch is not fixes:
            commands.append(_new_job(job, patch))
            of_new_job = _room_for_new_job(job, failure)
    if job.started is not None:
        advice.append("After that, try it again.")
        commands.insert(0, job.command("retry"))
    else:
        advice.append("Change the spec of this job, which has not started: it is judged again at once.")
    advice += of_new_job
    if fixes is not None:
        text = shlex.quote(json.dumps(fixes, separators=(",", ":")))
        commands.append(f"{shlex.join(['kubectl', 'patch', 'finetunejob', job.name, *job.flags])} --type merge -p {text}")
    return Diagnosis(
        f"{_meaning(reason)} {message}".strip() or "The job waits until a human acts.",
        reason,
        tuple(evidence),
        tuple(dict.fromkeys(each for each in advice if each)),
        tuple(commands),
        patch,
    )


def _under_way(job: SeenJob, now: datetime) -> Diagnosis:
    ready = find_condition(job.status.conditions, ConditionType.READY)
    if ready is not None and ready.reason == Reason.OPERATOR_ERROR:
        advice = "Report this to your platform team; changing the manifest will not help. The job continues by itself."
        return Diagnosis(f"{_meaning(ready.reason)} {ready.message}".strip(), ready.reason, advice=(advice,))
    stage = current_stage(job)
    if stage is None or stage.reason == Reason.RUNNING:
        return _silent(job, now)
    if stage.reason in (Reason.PENDING, Reason.NOT_OBSERVED):
        return Diagnosis()
    return Diagnosis(f"{_meaning(stage.reason)} {stage.message}".strip(), stage.reason, advice=tuple(_waiting_advice(job, stage)))


def _silent(job: SeenJob, now: datetime) -> Diagnosis:
    progress = job.status.progress
    latest = documents.moment(progress.advanced_time) if progress is not None else None
    silence = (now - latest).total_seconds() if latest is not None else 0.0
    if silence < SILENT_SECONDS or stage_name(job) != Role.TRAIN:
        return Diagnosis()
    return Diagnosis(
        f"No new step was seen for {duration_text(silence)}.",
        FailureClass.STALLED,
        advice=(f"Look at `{job.command('logs')}` and at the devices; {_WATCHDOG}",),
    )


def _waiting_advice(job: SeenJob, stage: Condition) -> Iterable[str]:
    match stage.reason:
        case Reason.QUEUED:
            yield "Nothing has to be done: the queue admits the job once there is room. Its own words are above."
        case Reason.UNSCHEDULABLE:
            yield f"Wait for room, or ask for less: the job wants {job.num_nodes} pods for training."
        case Reason.WAITING_IN_LINE:
            yield "Nothing has to be done: the job starts when an earlier one of this namespace has ended."
        case Reason.IMAGE_PULL_FAILED:
            yield POLICY[FailureClass.IMAGE_PULL].advice
        case Reason.MOUNT_FAILED:
            yield POLICY[FailureClass.MOUNT].advice
        case Reason.CREATE_REFUSED:
            yield POLICY[FailureClass.ADMISSION].advice
        case Reason.NODE_LOST | Reason.BLOCKED_ON_NODE:
            yield POLICY[FailureClass.NODE_LOST].advice
        case Reason.WAITING_FOR_SOURCE:
            yield POLICY[FailureClass.SOURCE_UNAVAILABLE].advice
        case Reason.WAITING_FOR_DESTINATION:
            yield POLICY[FailureClass.DESTINATION_UNAVAILABLE].advice


def last_failure(job: SeenJob) -> Attempt | None:
    """The attempt that failed last."""
    return next((each for each in reversed(job.status.attempts) if each.outcome is AttemptOutcome.FAILED), None)


def _attempt_evidence(attempt: Attempt) -> Iterable[str]:
    for each in attempt.evidence:
        place = [
            *([f"rank {each.rank}"] if each.rank is not None else []),
            *([f"step {each.step}"] if each.step is not None else []),
            *([f"exit code {each.exit_code}"] if each.exit_code is not None else []),
            *([f"node {each.node}"] if each.node else []),
        ]
        yield f"{each.pod} ({', '.join(place)}): {each.failure}: {each.message}"


def _pod_evidence(pods: Sequence[SeenPod]) -> Iterable[str]:
    for pod in pods:
        for one in pod.containers:
            if one.state == "waiting" and one.reason not in ("", "ContainerCreating", "PodInitializing"):
                yield f"{pod.name} waits: {one.reason}: {one.message}"
            elif one.state == "terminated" and one.exit_code:
                yield f"{pod.name} ended with exit code {one.exit_code}: {one.reason}"
        if pod.phase == "Pending" and not pod.node:
            for each in documents.elements(pod.document, "status", "conditions"):
                if documents.text(each, "type") == "PodScheduled" and documents.text(each, "message"):
                    yield f"{pod.name} has no node: {documents.text(each, 'message')}"


def _event_evidence(events: Sequence[SeenEvent]) -> Iterable[str]:
    warnings = [each for each in events if each.kind == "Warning"][-_MOST_EVENTS:]
    for each in reversed(warnings):
        often = f" ({each.count} times)" if each.count > 1 else ""
        yield f"event of {each.subject}: {each.reason}: {each.message}{often}"


def _meaning(word: str) -> str:
    """The meaning of a failure class or a reason."""
    return member_docs(FailureClass).get(word) or member_docs(Reason).get(word) or ""
