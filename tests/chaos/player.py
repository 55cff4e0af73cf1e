"""The kubelets and the users of a run: every pod gets the outcome that its job's story has for it, and every story its end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from finetune_job.failures import FailureClass, Outcome, TerminationReport
from finetune_job.names import Role
from tests.integration.kube import RefusedError
from tests.integration.workload import Workload

Document = dict[str, Any]
ATTEMPT, JOB, ROLE = "finetune.dev/attempt", "finetune.dev/job", "finetune.dev/role"
INDEX = "batch.kubernetes.io/job-completion-index"
ROUND_SECONDS = 0.2


@dataclass(frozen=True)
class Story:
    """What happens to a job, and how it must end; written by hand."""

    phase: str
    """At the end; empty: the job is deleted."""
    train_attempts: int = 1
    counted: int = 0
    uncounted: int = 0
    nodes: int = 1
    failures: tuple[FailureClass, ...] = ()
    """Of the first attempts at training; later ones succeed."""
    spec: dict[str, Any] = field(default_factory=dict)
    on_training: str = ""
    """What the user does once training pods are there: cancel or delete."""


STORIES = {
    "plain": Story("Succeeded"),
    "gang": Story("Succeeded", nodes=2, spec={"parallelism": {"nodes": 2}}),
    "restarted": Story("Succeeded", train_attempts=2, counted=1, failures=(FailureClass.INTERNAL,)),
    "gang restarted": Story(
        "Succeeded", train_attempts=2, counted=1, nodes=2, failures=(FailureClass.INTERNAL,), spec={"parallelism": {"nodes": 2}}
    ),
    "preempted": Story("Succeeded", train_attempts=2, uncounted=1, failures=(FailureClass.PREEMPTED,)),
    "not finite": Story("Failed", failures=(FailureClass.NON_FINITE,)),
    "budget spent": Story(
        "Failed", train_attempts=2, counted=1, failures=(FailureClass.INTERNAL,) * 2, spec={"run": {"maxRestarts": 1}}
    ),
    "cancelled": Story("Cancelled", on_training="cancel"),
    "deleted": Story("", on_training="delete"),
}


class Player:
    """Context manager: plays until it is left. `stories`: by name of job."""

    def __init__(self, workload: Workload, stories: dict[str, Story]) -> None:
        self._workload, self._stories = workload, stories
        self._done: set[str] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="player", daemon=True)
        self.error: Exception | None = None

    def __enter__(self) -> Player:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(60)

    def _run(self) -> None:
        try:
            while not self._stopping.wait(ROUND_SECONDS):
                for pod in self._workload.kube.list("Pod", self._workload.namespace):
                    self._play(pod)
        except Exception as error:  # noqa: BLE001 - told by the run
            self.error = error

    def _play(self, pod: Document) -> None:
        metadata, labels = pod["metadata"], pod["metadata"].get("labels") or {}
        phase = (pod.get("status") or {}).get("phase")
        if (
            metadata["uid"] in self._done
            or "deletionTimestamp" in metadata
            or phase in {"Succeeded", "Failed"}
            or JOB not in labels
        ):
            return
        name, role, attempt = labels[JOB], Role(labels[ROLE]), int(labels.get(ATTEMPT, 0))
        story = self._stories[name]
        if role is Role.TRAIN and story.on_training:
            self._done.add(metadata["uid"])
            self._workload.set_running(pod)
            self._ignoring_absence(lambda: self._act(story.on_training, name))
            return
        if phase != "Running":
            self._workload.set_running(pod)
            return
        self._done.add(metadata["uid"])
        if role is Role.TRAIN and attempt < len(story.failures):
            # One rank fails; the Job controller ends the others.
            if int(labels.get(INDEX, 0)) == 0:
                self._workload.fail(pod, story.failures[attempt], "chaos", attempt=attempt)
        else:
            self._workload.set_ended(pod, TerminationReport(role=role, attempt=attempt, outcome=Outcome.SUCCEEDED))

    def _act(self, what: str, name: str) -> None:
        if what == "delete":
            self._workload.kube.delete("FineTuneJob", self._workload.namespace, name)
        else:
            self._workload.kube.patch("FineTuneJob", self._workload.namespace, name, {"spec": {"run": {"cancel": True}}})

    @staticmethod
    def _ignoring_absence(act: Callable[[], None]) -> None:
        try:
            act()
        except RefusedError as refusal:
            if refusal.code != 404:
                raise


def wrong_end(story: Story, job: Document | None, train_attempts: int) -> str:
    """What is not as the story has it, or nothing; `unfinished` where it has no end yet."""
    if job is None:
        return "" if not story.phase else "lost: the job is gone"
    status = job.get("status") or {}
    if not story.phase or not any(
        item["type"] == "Finished" and item["status"] == "True" for item in status.get("conditions", ())
    ):
        return f"unfinished: {status.get('phase')}"
    restarts = status.get("restarts") or {}
    is_ = (status.get("phase"), train_attempts, restarts.get("counted", 0), restarts.get("uncounted", 0))
    should = (story.phase, story.train_attempts, story.counted, story.uncounted)
    return "" if is_ == should else f"wrong: ended as {is_}, expected {should} (phase, training attempts, counted, uncounted)"
