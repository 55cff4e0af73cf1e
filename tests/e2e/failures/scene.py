"""One job on the real nodes while something breaks: start it, wait for its steps, note the time of the fault, and follow it."""

import json
import time
from collections.abc import Callable
from typing import Any

import yaml

from finetune_job.names import API_VERSION, JOB_PLURAL, PROFILE_KIND, Role
from tests.e2e.failures.case import FailedAttempt, Outcome
from tools.cluster.errors import ClusterError, wait_until
from tools.cluster.node import Node
from tools.stack import NAMESPACE, ROOT, Stack

_EXAMPLE = "examples/quickstart-cluster.yaml"
_STEPS = 60
SPEC: dict[str, Any] = {
    "preflight": {"rehearsal": "Skip"},
    "training": {"maxSteps": _STEPS, "globalBatchSize": 8, "learningRate": "1e-2"},
    "parallelism": {"nodes": 2, "processesPerNode": 1, "fsdp": {"version": 2}},
    "checkpoint": {"everySteps": 5},
    "evaluation": {},
    "merge": {"enabled": False},
    "workspace": {"claimName": "workspace"},
}
"""A gang of two pods, one on each node, that saves often and trains for some seconds."""
_ENOUGH_STEPS = 7
"""After the first checkpoint."""
_PATIENCE_SECONDS = 480.0
_DETAILS_SECONDS = 30.0
"""For a message to say more than its first version."""
_POLL_SECONDS = 0.1


class Scene:
    """A job and what is seen of it."""

    def __init__(self, stack: Stack, name: str) -> None:
        self.stack = stack
        self.name = name
        self._started: float | None = None
        self._attempt_then = -1
        self._says: tuple[str, float] | None = None
        self.seconds: float | None = None
        """From the start of the clock to the next trained step."""
        self._resumes = False
        self._undo: list[Callable[[], object]] = []

    def kubectl(self, *arguments: str) -> str:
        """kubectl in the job's namespace."""
        return self.stack.cluster.kubectl("--namespace", NAMESPACE, *arguments)

    def start(self, spec: dict[str, Any] | None = None, profile: dict[str, Any] | None = None) -> None:
        """Apply the job; with a profile of its own where settings of one are given."""
        extra: dict[str, Any] = {}
        if profile is not None:
            merged = self.default_profile() | profile
            self.stack.apply({"apiVersion": API_VERSION, "kind": PROFILE_KIND, "metadata": {"name": self.name}, "spec": merged})
            self.at_the_end(lambda: self.kubectl("delete", "finetuneprofile", self.name))
            extra["profile"] = self.name
        self.stack.apply_example(_EXAMPLE, SPEC | extra | (spec or {}), name=self.name)
        self.at_the_end(lambda: self.kubectl("delete", "finetunejob", self.name, "--timeout=200s"))

    def default_profile(self) -> dict[str, Any]:
        """The settings of the profile that the chart installed."""
        spec: dict[str, Any] = json.loads(self.kubectl("get", "finetuneprofile", "default", "--output", "json"))["spec"]
        return spec

    def example(self) -> dict[str, Any]:
        """The spec that jobs of the cases begin with."""
        spec: dict[str, Any] = yaml.safe_load((ROOT / _EXAMPLE).read_text())["spec"]
        return spec | SPEC

    def taint(self, node: Node, key: str, effect: str) -> None:
        """Taint a node until the case is over."""
        self.at_the_end(lambda: self.untaint(node, key))
        self.kubectl("taint", "node", node.place.name, f"{key}=yes:{effect}")

    def untaint(self, node: Node, key: str) -> None:
        """Take a taint away, if it is there."""
        taints = json.loads(self.kubectl("get", "node", node.place.name, "--output", "json"))["spec"].get("taints", [])
        if any(one["key"] == key for one in taints):
            self.kubectl("taint", "node", node.place.name, f"{key}-")

    def is_ready(self, node: Node) -> bool:
        """Whether the cluster takes a node for alive."""
        conditions = json.loads(self.kubectl("get", "node", node.place.name, "--output", "json"))["status"]["conditions"]
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    def failed_jobs(self) -> int:
        """How many of the job's batch Jobs have failed, by their own account."""
        jobs = self.stack.batch_jobs(self.name)
        return sum(any(one["type"] == "Failed" for one in job["status"].get("conditions", [])) for job in jobs)

    def at_the_end(self, undo: Callable[[], object]) -> None:
        """Have something done when the case is over, however it ends; the last first."""
        self._undo.append(undo)

    def leave(self) -> None:
        """Do all of that; the first error is raised when all has been tried."""
        errors: list[ClusterError] = []
        while self._undo:
            try:
                self._undo.pop()()
            except ClusterError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def wait_for_checkpoint(self) -> None:
        """Wait until the gang trains and has saved its state."""
        self.wait(lambda: max((line["step"] for line in self._history()), default=0) >= _ENOUGH_STEPS, "the first checkpoint")

    def training_pod_elsewhere(self) -> dict[str, Any]:
        """The training pod that is not on the operator's node."""
        first = self.stack.cluster.node.place.name
        pods = self.stack.pods(self.name, Role.TRAIN)
        found = [pod for pod in pods if pod["spec"].get("nodeName") not in (None, first) and pod["status"]["phase"] == "Running"]
        if len(found) != 1:
            placed = {pod["metadata"]["name"]: pod["spec"].get("nodeName") for pod in pods}
            raise ClusterError(f"{self.name}: expected one training pod on another node than {first}, found {placed}")
        return found[0]

    @property
    def other_node(self) -> Node:
        """The node without the operator."""
        return self.stack.cluster.nodes[1]

    def start_clock(self) -> None:
        """It breaks now, or is fixed now: the seconds count from here."""
        self._started = time.monotonic()
        self._attempt_then = max((line["attempt"] for line in self._history()), default=-1)

    def wait_until_said(self, reason: str, text: str = "") -> None:
        """Wait until a condition shows a reason; its message must have this text, then or soon."""
        start = self._started if self._started is not None else time.monotonic()

        def messages() -> list[str]:
            conditions = self.status().get("conditions", [])
            found = [one.get("message", "") for one in conditions if one["reason"] == reason]
            if not found and any(one["type"] == "Finished" and one["status"] == "True" for one in conditions):
                raise ClusterError(f"{self.name} has ended and never said {reason}")
            return found

        self.wait(messages, f"a condition to say {reason}")
        seconds = time.monotonic() - start
        try:
            self.wait(lambda: any(text in message for message in messages()), f"{reason} to name {text}", _DETAILS_SECONDS)
        except ClusterError:
            reason = f"{reason} without a word of {text}"
        self._says = reason, seconds

    def wait_until_failed(self, failure: str) -> None:
        """Wait until status has an attempt that failed with a class."""
        self.wait(
            lambda: any(one.get("failure") == failure for one in self.status().get("attempts", [])),
            f"an attempt that failed with {failure}",
        )

    def wait_for_step_after(self, step: int) -> None:
        """Wait until a later step is trained, in whatever attempt."""
        self.wait(lambda: self.last_step() > step, f"a step after {step}")
        assert self._started is not None, "the case never started its clock"
        self.seconds = time.monotonic() - self._started

    def last_step(self) -> int:
        """The last step of the history."""
        return max((int(line["step"]) for line in self._history()), default=0)

    def wait_for_next_step(self) -> None:
        """Wait until an attempt after the fault has trained a step."""

        def trained() -> tuple[int, int] | None:
            """The first new step, and the last one that is kept of earlier attempts."""
            lines = self._history()
            new = [line["step"] for line in lines if line["attempt"] > self._attempt_then and line["step"] > 0]
            kept = [line["step"] for line in lines if line["attempt"] <= self._attempt_then]
            return (min(new), max(kept, default=0)) if new else None

        first, kept = self.wait(trained, "the next trained step")
        assert self._started is not None, "the case never started its clock"
        self.seconds = time.monotonic() - self._started
        self._resumes = kept > 0 and first == kept + 1

    def wait_for_step_after_restart_in_pod(self, number: int) -> None:
        """Wait until the ranks were started again for the `number`-th time in the first pod and have trained a step."""

        def trained() -> bool:
            starts = [line["step"] for line in self._lines("accounts.jsonl") if line["kind"] == "started"]
            return len(starts) > number and self.last_step() > starts[number]

        self.wait(trained, f"a step after restart {number} in the pod")
        assert self._started is not None, "the case never started its clock"
        self.seconds = time.monotonic() - self._started

    def finish(self) -> Outcome:
        """Wait until the job has ended or needs a human, and say what was seen."""

        def ended() -> bool:
            conditions = self.status().get("conditions", [])
            return any(one["type"] in ("Finished", "Stalled") and one["status"] == "True" for one in conditions)

        self.wait(ended, "the end")
        status = self.status()
        return Outcome(
            final=status["phase"],
            failures=tuple(
                FailedAttempt(one.get("role", Role.TRAIN.value), one.get("failure", ""), one.get("counted", False))
                for one in status.get("attempts", [])
                if one["outcome"] == "Failed"
            ),
            says=self._says[0] if self._says else "",
            resumes=self._resumes,
            seconds=None if self.seconds is None else round(self.seconds, 1),
            seconds_until_said=round(self._says[1], 1) if self._says else None,
        )

    def status(self) -> dict[str, Any]:
        """The job's status now."""
        path = f"/apis/{API_VERSION}/namespaces/{NAMESPACE}/{JOB_PLURAL}/{self.name}"
        found = self.stack.cluster.control_plane.api.read_object(path)
        status: dict[str, Any] = (found or {}).get("status", {})
        return status

    def wait(self, condition: Callable[[], Any], what: str, seconds: float = _PATIENCE_SECONDS) -> Any:
        """Wait for a condition, asked ten times a second; when it does not come, the error shows the job's status."""

        def slowly() -> Any:
            time.sleep(_POLL_SECONDS)
            return condition()

        try:
            return wait_until(slowly, f"{what} of {self.name}", seconds)
        except ClusterError as error:
            raise ClusterError(f"{error}\n{json.dumps(self.status(), indent=2)}") from error

    def _history(self) -> list[dict[str, Any]]:
        """The lines of the run's history."""
        return self._lines("history.jsonl")

    def _lines(self, name: str) -> list[dict[str, Any]]:
        """The lines of a file of the workspace; the last one may be half written."""
        found = list(self.stack.directory.glob(f"claims/workspace/{self.name}-????????/{name}"))
        if not found:
            return []
        lines = []
        for text in found[0].read_text(errors="replace").splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                break
        return lines
