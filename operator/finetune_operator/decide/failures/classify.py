"""Derives the failure class and the root rank from the evidence of pods.

When one rank fails, the others fail too: the collectives break, and the Job controller deletes their pods. So each pod is first
classified on its own, and then the cause is chosen: the earliest failure that is not just an echo of another failure. If there is
none, the cause is the earliest failed collective, SIGTERM or deletion.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from finetune_job.api.status import RankFailure
from finetune_job.failures import CLASS_OF_EXIT_CODE, FailureClass, Outcome, TerminationReport, parse_envelope
from finetune_job.finding import Finding
from finetune_operator.children.pod_template import SHARED_MEMORY_VOLUME
from finetune_operator.decide.failures.restart_policy import POLICY
from finetune_operator.decide.seen.children_seen import PodView
from finetune_operator.decide.seen.times import timestamp

EVIDENCE_LIMIT = 16
"""Maximum number of an attempt's pod failures that status keeps: the cause, and the next most likely ones."""
_MESSAGE_LIMIT = 1024
_ECHOES = frozenset({FailureClass.COLLECTIVE, FailureClass.PREEMPTED})
_WHOLE_SECOND = timedelta(seconds=1)
_SIGKILL = 137
_SIGTERM = 143
OVERDUE = "DeletionOverdue"
"""Our own reason for `DisruptionTarget`: the pod still exists after its grace period."""
NODE_LOST = {
    "DeletionByTaintManager": "its node stopped answering",
    "DeletionByPodGC": "its node is gone",
    OVERDUE: "it should have ended but is still there after its grace period, so its node does not answer",
}
"""Reason of `DisruptionTarget` that indicates a lost node -> text for the message."""
_UNKNOWN_TO_RUNTIME = frozenset({"Unknown", "ContainerStatusUnknown"})
"""Reasons of a container that was found dead after a node restart, by the runtime (exit code 255) or the kubelet (137)."""
_OVER_LIMIT = re.compile(
    "Usage of EmptyDir volume .* exceeds the limit|ephemeral local storage usage exceeds|exceeded its local ephemeral storage"
)
"""Matches the kubelet's messages about a pod whose volumes or containers exceeded their limits on the node's disk."""
_ENDED_BY_KUBELET = frozenset({"Evicted", "Preempting", "Shutdown", "NodeShutdown", "Terminated"})
"""Reasons of failed pods that the kubelet had admitted. A pod with any other reason was not admitted."""


@dataclass(frozen=True)
class PodFailure:
    """Why one pod ended without success."""

    pod: PodView
    failure: FailureClass
    is_echo: bool
    """Whether this may be just a consequence of another rank's failure."""
    time: datetime
    message: str
    report: TerminationReport | None
    advice: str = ""
    """Advice that overrides the advice of the container and of the class's policy; empty to use theirs."""

    @property
    def evidence(self) -> RankFailure:
        """The failure as status shows it."""
        report = self.report
        return RankFailure(
            pod=self.pod.name,
            node_rank=report.node_rank if report is not None and report.node_rank is not None else self.pod.node_rank,
            exit_code=self.pod.exit_code,
            failure=self.failure,
            rank=report.rank if report is not None else None,
            step=report.step if report is not None else None,
            message=self.message[:_MESSAGE_LIMIT],
            node=self.pod.node,
            hint=(self.advice or (report.hint if report is not None else "") or POLICY[self.failure].advice)[:_MESSAGE_LIMIT],
            time=timestamp(self.time),
        )


@dataclass(frozen=True)
class Failure:
    """Why a Job failed."""

    failure: FailureClass
    message: str
    hint: str
    evidence: tuple[RankFailure, ...] = ()
    """Failures of the pods, the cause first."""
    refused: bool = False
    """Whether the container itself found out that the job cannot work; if so, `findings` explain why."""
    findings: tuple[Finding, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    """Facts that the container reported."""
    step: int | None = 0
    """Step at which the cause occurred; None if its report has no step, 0 if there is no report."""

    @property
    def text(self) -> str:
        """Class, cause and advice in one message."""
        return f"{self.failure}: {self.message}" + (f" {self.hint}" if self.hint else "")


def classify_pod(pod: PodView) -> PodFailure | None:
    """Why a pod ended without success; None if it is running or has succeeded."""
    report = parse_envelope(pod.termination_message) if pod.termination_message else None
    if report is not None and report.outcome is Outcome.SUCCEEDED:
        report = None
    refused = report is not None and report.outcome is Outcome.REFUSED
    if (pod.exit_code == 0 or (pod.phase == "Succeeded" and pod.exit_code is None)) and not refused:
        return None
    classified = _class_of(pod, report)
    if classified is None:
        return None
    failure, is_echo, default_message = classified
    message = report.message or report.exception if report is not None else ""
    if failure is FailureClass.DEVICE_FAULT and pod.node:
        message = f"on node {pod.node}, {message or default_message}"
    evicted = _local_storage(pod)
    if evicted is not None and evicted[0] is failure and default_message == pod.eviction:
        return PodFailure(pod, failure, is_echo, _time_of(pod, report), default_message, report, advice=evicted[1])
    return PodFailure(pod, failure, is_echo, _time_of(pod, report), message or default_message, report)


def _class_of(pod: PodView, report: TerminationReport | None) -> tuple[FailureClass, bool, str] | None:
    """Return the class, whether it may be an echo, and a message in case the container left none. The strongest evidence wins."""
    reported = report.failure if report is not None else None
    if report is not None and report.outcome is Outcome.REFUSED and reported is None:
        reported = FailureClass.USER_CONFIG
    if reported is not None and reported not in _ECHOES and reported is not FailureClass.INTERNAL:
        return reported, False, str(reported)
    if pod.reason == "OOMKilled":
        return FailureClass.HOST_OUT_OF_MEMORY, False, "The kernel killed a process: the container's memory limit was reached."
    evicted = _local_storage(pod)
    if evicted is not None:
        return evicted[0], False, pod.eviction
    if reported is FailureClass.INTERNAL:
        return reported, False, str(reported)
    if pod.disruption in NODE_LOST:
        return FailureClass.NODE_LOST, False, f"The pod on node {pod.node or 'unknown'} is lost: {NODE_LOST[pod.disruption]}."
    if pod.disruption:
        return FailureClass.INFRASTRUCTURE, False, f"The pod was disrupted ({pod.disruption}) on node {pod.node or 'unknown'}."
    if pod.phase == "Failed" and pod.exit_code is None and pod.reason:
        failure = FailureClass.INFRASTRUCTURE if pod.reason in _ENDED_BY_KUBELET else FailureClass.REJECTED
        return failure, False, f"The kubelet of node {pod.node or 'unknown'} failed the pod: {pod.reason}."
    if pod.exit_code is not None and pod.reason in _UNKNOWN_TO_RUNTIME:
        return FailureClass.INFRASTRUCTURE, False, f"Node {pod.node or 'unknown'} or its container runtime was restarted."
    if reported is not None:
        return reported, True, str(reported)
    coded = CLASS_OF_EXIT_CODE.get(pod.exit_code) if pod.exit_code is not None else None
    if coded is not None and coded not in _ECHOES:
        return coded, False, f"The container exited with code {pod.exit_code} and left no report."
    if pod.deletion_requested is not None or pod.gone:
        return FailureClass.INFRASTRUCTURE, True, f"The pod was deleted from node {pod.node or 'unknown'} by somebody else."
    if coded is not None:
        return coded, True, f"The container exited with code {pod.exit_code} and left no report."
    if pod.exit_code == _SIGTERM:
        return FailureClass.PREEMPTED, True, "The container was terminated by SIGTERM and left no report."
    if pod.exit_code == _SIGKILL:
        return FailureClass.INTERNAL, False, "The container was killed by SIGKILL, not because of memory, and left no report."
    if pod.exit_code is not None:
        return FailureClass.INTERNAL, False, f"The container exited with code {pod.exit_code} and left no report."
    if pod.phase == "Failed":
        return FailureClass.UNKNOWN, True, "The pod failed without any container status."
    return None


def _local_storage(pod: PodView) -> tuple[FailureClass, str] | None:
    """Return class and advice for a pod that was evicted because it exceeded a limit of its own; None for any other pod.

    Unlike an eviction that is the node's fault, this one sets no `DisruptionTarget`, and would happen again.
    """
    if pod.disruption or _OVER_LIMIT.search(pod.eviction) is None:
        return None
    if f'"{SHARED_MEMORY_VOLUME}"' in pod.eviction:
        return FailureClass.HOST_OUT_OF_MEMORY, f"Use a profile with more sharedMemory in resources.{pod.role}."
    return FailureClass.DISK_FULL, "Use a profile with more scratchStorage, which is the limit of /tmp in each pod."


def _time_of(pod: PodView, report: TerminationReport | None) -> datetime:
    """Return when the failure was first seen. If the pod was deleted, this is no later than the request for its deletion.

    Kubernetes truncates times to whole seconds, while reports keep fractions. So the API server's times are taken as the end of
    their second: otherwise, a pod that was deleted because of a failure could seem to have ended before that failure.
    """
    times = [moment + _WHOLE_SECOND for moment in (pod.deletion_requested, pod.finished) if moment is not None]
    if report is not None and report.time > 0:
        times.append(datetime.fromtimestamp(report.time, UTC))
    return min(times, default=pod.created)


def failures_of(pods: Iterable[PodView]) -> list[PodFailure]:
    """Return the failures of these pods, the most likely cause first."""
    failures = [failure for failure in map(classify_pod, pods) if failure is not None]
    return sorted(
        failures,
        key=lambda failure: (
            failure.failure is FailureClass.UNKNOWN,
            failure.is_echo,
            failure.time,
            failure.pod.node_rank,
            failure.pod.name,
        ),
    )


def classify(pods: Iterable[PodView], otherwise: FailureClass, message: str) -> Failure:
    """Return why a Job with these pods failed. `otherwise` and `message` apply if no pod left evidence."""
    failures = failures_of(pods)
    if not failures or (failures[0].is_echo and otherwise is FailureClass.INFRASTRUCTURE):
        return Failure(
            otherwise, message, POLICY[otherwise].advice, tuple(failure.evidence for failure in failures[:EVIDENCE_LIMIT])
        )
    cause = failures[0]
    report = cause.report
    evidence = tuple(failure.evidence for failure in failures[:EVIDENCE_LIMIT])
    place = [f"rank {report.rank}"] if report is not None and report.rank is not None else []
    place += [f"step {report.step}"] if report is not None and report.step is not None else []
    return Failure(
        failure=cause.failure,
        message=f"{', '.join([*place, f'pod {cause.pod.name}'])}: {evidence[0].message}",
        hint=evidence[0].hint,
        evidence=evidence,
        refused=report is not None and report.outcome is Outcome.REFUSED,
        findings=tuple(report.findings) if report is not None else (),
        facts=report.facts if report is not None else {},
        step=report.step if report is not None else 0,
    )
