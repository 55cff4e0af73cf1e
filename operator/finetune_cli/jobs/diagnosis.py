"""Diagnosis of a job: the reason, the evidence, what to do, and, if one is known, a patch for a new job."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from finetune_cli.jobs import documents
from finetune_cli.jobs.durations import duration_text
from finetune_cli.jobs.patches import ADVICE, NO_PATCH, Patch, assignments, patch_for
from finetune_cli.jobs.progress import current_stage, stage_name
from finetune_cli.jobs.seen import SeenEvent, SeenJob, SeenPod
from finetune_job.api.documentation import member_docs
from finetune_job.api.status import Attempt
from finetune_job.conditions import find_condition
from finetune_job.failures import FailureClass
from finetune_job.names import Role, workspace_folder
from finetune_job.reasons import AttemptOutcome, ConditionType, Reason
from finetune_operator.decide.failures.restart_policy import POLICY, Retry

SILENT_SECONDS = 900
"""Training that shows no new step for this many seconds is reported as silent."""
_MOST_EVENTS = 5
_MOST_EVIDENCE = 8


@dataclass(frozen=True)
class Diagnosis:
    """The answer of `explain JOB`."""

    reason: str = ""
    """The reason in a sentence or two; empty: nothing is wrong."""
    word: str = ""
    """The failure class or reason about which `explain` says more."""
    evidence: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    """Advice, the most promising first."""
    commands: tuple[str, ...] = ()
    """Commands for a shell."""
    patch: Patch | None = None
    """JSON merge patch for the manifest of a new job; None if no helpful change is known."""


def diagnose(
    job: SeenJob, now: datetime, pods: Sequence[SeenPod] = (), events: Sequence[SeenEvent] = (), fixes: Patch | None = None
) -> Diagnosis:
    """Diagnose a job from its status, and from those of its pods and events that could be read.

    `fixes`: a patch with the fixes of the rules' findings.
    """
    diagnosis = _of_status(job, now, fixes)
    if not diagnosis.reason:
        return diagnosis
    warnings = [event for event in events if event.kind == "Warning"][-_MOST_EVENTS:]
    seen = [
        f"event of {event.subject}: {event.reason}: {event.message}{f' ({event.count} times)' if event.count > 1 else ''}"
        for event in reversed(warnings)
    ]
    evidence = [*diagnosis.evidence, *_pod_evidence(pods), *seen]
    return replace(diagnosis, evidence=tuple(dict.fromkeys(evidence))[:_MOST_EVIDENCE])


def _of_status(job: SeenJob, now: datetime, fixes: Patch | None) -> Diagnosis:
    if not job.status.conditions:
        doctor = shlex.join(["finetune", "doctor", *job.flags])
        return Diagnosis(
            "No operator has looked at this job yet.",
            Reason.NOT_OBSERVED,
            advice=(f"Run `{doctor}` to see whether an operator serves this namespace.",),
        )
    match job.phase:
        case "Succeeded":
            return Diagnosis()
        case "Cancelled":
            return Diagnosis(
                "spec.run.cancel is true: somebody cancelled the job.", Reason.CANCELLED, commands=(_new_job(job, None),)
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
        advice.append("The cause may be gone by now, so a new job with the same spec might succeed.")
    return Diagnosis(
        f"{attempt.role} failed: {attempt.message or attempt.failure}. {_meaning(attempt.failure)}{exhausted}",
        attempt.failure,
        tuple(_attempt_evidence(attempt)),
        (*(text for text in advice if text), _STAYS_FAILED),
        (_new_job(job, patch),),
        patch,
    )


_STAYS_FAILED = "A failed job does not run again: make a new job from it."


def _new_job(job: SeenJob, patch: Patch | None) -> str:
    changes = "".join(f" --set {shlex.quote(each)}" for each in assignments(patch or {}, ""))
    # The printed manifest names no namespace, and the context's namespace may differ.
    return f"{job.command('fork')}{changes} | {shlex.join(['finetune', 'submit', '-', *job.flags])}"


def _stalled(job: SeenJob, fixes: Patch | None) -> Diagnosis:
    stalled = find_condition(job.status.conditions, ConditionType.STALLED)
    reason, message = (stalled.reason, stalled.message) if stalled is not None else ("", "")
    attempt, patch = last_failure(job), fixes
    # The operator also reports the end of the attempt as a finding without a field.
    of_attempt = f"{attempt.role}/{attempt.failure}" if attempt is not None else ""
    errors = [finding for finding in job.status.findings if finding.severity == "error" and finding.rule != of_attempt]
    evidence = [f"{error.rule}: {error.field} is {error.value or 'not set'}. {error.message}" for error in errors]
    advice = [error.fix for error in errors if error.fix]
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
            claim = documents.text(job.spec, "workspace", "claimName")
            if failure is FailureClass.DISK_FULL and claim:
                folder = f"the folder {workspace_folder(job.name, job.uid)} of claim {claim}"
                of_new_job = [f"Before a new job writes to the same claim, remove {folder}: it holds this job's files."]
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
        progress = job.status.progress
        latest = documents.moment(progress.advanced_time) if progress is not None else None
        silence = (now - latest).total_seconds() if latest is not None else 0.0
        if silence < SILENT_SECONDS or stage_name(job) != Role.TRAIN:
            return Diagnosis()
        watchdog = "the ranks' own watchdog ends the attempt after spec.training.stepTimeoutSeconds."
        return Diagnosis(
            f"No new step was seen for {duration_text(silence)}.",
            FailureClass.STALLED,
            advice=(f"Look at `{job.command('logs')}` and at the devices; {watchdog}",),
        )
    if stage.reason in (Reason.PENDING, Reason.NOT_OBSERVED):
        return Diagnosis()
    like = ADVICE["waiting_like"].get(stage.reason)
    advice = ADVICE["waiting"].get(stage.reason, "") if like is None else POLICY[FailureClass(like)].advice
    return Diagnosis(
        f"{_meaning(stage.reason)} {stage.message}".strip(),
        stage.reason,
        advice=(advice.format(pods=job.num_nodes),) if advice else (),
    )


def last_failure(job: SeenJob) -> Attempt | None:
    """Return the attempt that failed last."""
    return next((attempt for attempt in reversed(job.status.attempts) if attempt.outcome is AttemptOutcome.FAILED), None)


def _attempt_evidence(attempt: Attempt) -> Iterable[str]:
    for fact in attempt.evidence:
        place = [
            *([f"rank {fact.rank}"] if fact.rank is not None else []),
            *([f"step {fact.step}"] if fact.step is not None else []),
            *([f"exit code {fact.exit_code}"] if fact.exit_code is not None else []),
            *([f"node {fact.node}"] if fact.node else []),
        ]
        yield f"{fact.pod} ({', '.join(place)}): {fact.failure}: {fact.message}"


def _pod_evidence(pods: Sequence[SeenPod]) -> Iterable[str]:
    for pod in pods:
        for container in pod.containers:
            if container.state == "waiting" and container.reason not in ("", "ContainerCreating", "PodInitializing"):
                yield f"{pod.name} waits: {container.reason}: {container.message}"
            elif container.state == "terminated" and container.exit_code:
                yield f"{pod.name} exited with code {container.exit_code}: {container.reason}"
        if pod.phase == "Pending" and not pod.node:
            for each in documents.elements(pod.document, "status", "conditions"):
                if documents.text(each, "type") == "PodScheduled" and documents.text(each, "message"):
                    yield f"{pod.name} has no node: {documents.text(each, 'message')}"


def _meaning(word: str) -> str:
    """Return the meaning of a failure class or a reason."""
    return member_docs(FailureClass).get(word) or member_docs(Reason).get(word) or ""
