"""Scheduler, kubelets and the life of nodes. `processes` is the truth about what runs, whatever the API says of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from finetune_job.failures import EXIT_CODES, FailureClass
from finetune_job.names import LABEL_ATTEMPT, LABEL_ROLE, Role
from finetune_operator.cluster.kinds import CONFIG_MAPS, PODS
from tests.simulation.api_server import ApiServer, Document
from tests.simulation.controllers import INDEX, is_over, phase_of, warn
from tests.simulation.virtual_time import stamp
from tests.support.builders import envelope

ROOM = 4
LONGEST_WAIT_SECONDS = 300.0
"""Of a container that was started again and is not told its attempt."""


@dataclass
class Node:
    """A machine. `answers`: its kubelet reaches the API server. `runs`: it has power."""

    name: str
    room: int = ROOM
    """For so many pods."""
    answers: bool = True
    runs: bool = True
    tainted: bool = False
    """The taint manager has marked its pods."""
    starts_pods: bool = True
    """False: images cannot be pulled there."""
    knows_rules: bool = True
    """Its kubelet starts containers again that have a rule for that; one of an older release fails the pod."""


@dataclass
class Nodes:
    """All of them."""

    server: ApiServer
    nodes: list[Node] = field(default_factory=lambda: [Node("node-a"), Node("node-b"), Node("node-c")])
    processes: dict[str, str] = field(default_factory=dict)
    """UID of a pod whose process runs -> name of its node."""
    is_full: bool = False
    """Nobody is scheduled any more."""
    begun: dict[str, list[int]] = field(default_factory=dict)
    """UID of a pod -> the attempts of training that its containers have begun to run."""

    def node(self, name: str) -> Node | None:
        return next((node for node in self.nodes if node.name == name), None)

    def schedule(self) -> None:
        """Give every pending pod a node that has room."""
        for pod in self.server.all(PODS):
            if pod["spec"].get("nodeName") or phase_of(pod) != "Pending" or "deletionTimestamp" in pod["metadata"]:
                continue
            used = [other["spec"].get("nodeName") for other in self.server.all(PODS) if not is_over(other)]
            free = [node for node in self.nodes if node.answers and node.runs and used.count(node.name) < node.room]
            if self.is_full or not free:
                message = f"0/{len(self.nodes)} nodes are available: {len(self.nodes)} Insufficient nvidia.com/gpu."
                self._condition(pod, "PodScheduled", "False", "Unschedulable", message)
            else:
                chosen = self.server.random.choice(free).name

                def bind(item: Document, name: str = chosen) -> None:
                    item["spec"] = {**item["spec"], "nodeName": name}

                self._condition(self.server.update(PODS, pod, bind), "PodScheduled", "True", "", "")

    def kubelets(self) -> None:
        """Every kubelet that answers looks at each of its pods once."""
        for pod in self.server.all(PODS):
            node = self.node(pod["spec"].get("nodeName", ""))
            if node is None and "deletionTimestamp" in pod["metadata"] and not is_over(pod):
                # The garbage collector of pods: nobody else ends a pod that has no node.
                self.fail_without_status(pod, "")
            if node is None or not node.answers:
                continue
            if "deletionTimestamp" in pod["metadata"]:
                self._end_deleted(pod)
            elif phase_of(pod) == "Pending":
                self._start(pod, node)
            elif phase_of(pod) == "Running":
                self._run(self._start_again(pod, node))
        known = {pod["metadata"]["uid"] for pod in self.server.all(PODS)}
        for uid, name in list(self.processes.items()):
            node = self.node(name)
            if uid not in known and (node is None or node.answers):
                del self.processes[uid]

    def keep_grace(self, uid: str) -> None:
        """The grace period of a pod is over: a kubelet that answers has ended it by now, however long it takes for all else."""
        for pod in self.server.all(PODS):
            node = self.node(pod["spec"].get("nodeName", ""))
            if pod["metadata"]["uid"] == uid and node is not None and node.answers:
                self._end_deleted(pod)

    def _start(self, pod: Document, node: Node) -> None:
        namespace = pod["metadata"]["namespace"]
        for volume in pod["spec"]["volumes"]:
            name = (volume.get("configMap") or {}).get("name")
            if name and self.server.get(CONFIG_MAPS, namespace, name) is None:
                warn(self.server, "Pod", pod, "FailedMount", f'MountVolume.SetUp failed: configmap "{name}" not found')
                self._waiting(pod, "ContainerCreating")
                return
        if not node.starts_pods:
            warn(self.server, "Pod", pod, "Failed", "Failed to pull image: connection refused")
            self._waiting(pod, "ImagePullBackOff")
            return
        started = stamp(self.server.now())
        state = {"running": {"startedAt": started}}

        def change(item: Document) -> None:
            item["status"] = {
                **item["status"],
                "phase": "Running",
                "startTime": started,
                "podIP": "10.0.0.1",
                "containerStatuses": [{"name": "trainer", "state": state, "restartCount": 0}],
            }

        self.processes[pod["metadata"]["uid"]] = node.name
        self._run(self.server.update(PODS, pod, change))

    def _start_again(self, pod: Document, node: Node) -> Document:
        """A container that has ended in a pod that continues. After the first time the kubelet pauses, and says so."""
        container = pod["status"]["containerStatuses"][0]
        ended, restarts = container["state"].get("terminated"), container["restartCount"]
        waits = container["state"].get("waiting") is not None
        if ended is not None and restarts:
            state = {"waiting": {"reason": "CrashLoopBackOff"}}
        elif ended is not None or (waits and self.server.random.random() < 0.3):
            state, restarts = {"running": {"startedAt": stamp(self.server.now())}}, restarts + 1
            self.processes[pod["metadata"]["uid"]] = node.name
        else:
            return pod
        last = {"terminated": ended} if ended is not None else container["lastState"]
        again = {**container, "state": state, "lastState": last, "restartCount": restarts}

        def change(item: Document) -> None:
            item["status"] = {**item["status"], "containerStatuses": [again]}

        return self.server.update(PODS, pod, change)

    def _run(self, pod: Document) -> None:
        """The first container runs the attempt of its arguments; the one after it the next, once the pod's label names it."""
        labels, container = pod["metadata"]["labels"], pod["status"]["containerStatuses"][0]
        begun = self.begun.setdefault(pod["metadata"]["uid"], [])
        if labels.get(LABEL_ROLE) != Role.TRAIN or "running" not in container["state"] or len(begun) > container["restartCount"]:
            return
        arguments = pod["spec"]["containers"][0]["args"]
        attempt = int(arguments[arguments.index("--attempt") + 1]) + container["restartCount"]
        if not container["restartCount"] or labels.get(LABEL_ATTEMPT) == str(attempt):
            begun.extend([-1] * (container["restartCount"] - len(begun)))
            begun.append(attempt)
        elif self._since(container["state"]["running"]["startedAt"]) >= LONGEST_WAIT_SECONDS:
            self.end(pod, FailureClass.PREEMPTED)

    def _since(self, moment: str) -> float:
        return (self.server.now() - datetime.fromisoformat(moment)).total_seconds()

    def _goes_on(self, pod: Document, code: int) -> bool:
        """Whether the kubelet will start the container of this pod again."""
        node = self.node(pod["spec"].get("nodeName", ""))
        if node is None or not node.knows_rules or "deletionTimestamp" in pod["metadata"]:
            return False
        rules = pod["spec"]["containers"][0].get("restartPolicyRules") or ()
        return any(rule["action"] == "Restart" and code in rule["exitCodes"]["values"] for rule in rules)

    def _waiting(self, pod: Document, reason: str) -> None:
        def change(item: Document) -> None:
            statuses = [{"name": "trainer", "state": {"waiting": {"reason": reason}}}]
            item["status"] = {**item["status"], "containerStatuses": statuses}

        self.server.update(PODS, pod, change)

    def _end_deleted(self, pod: Document) -> None:
        if phase_of(pod) == "Running" and "running" in pod["status"]["containerStatuses"][0]["state"]:
            # The supervisor's word after SIGTERM; a pod that is deleted reaches a terminal phase before its object goes.
            pod = self.end(pod, FailureClass.PREEMPTED)
        elif phase_of(pod) == "Running":
            pod = self.server.update(PODS, pod, lambda item: item["status"].update(phase="Failed"))
        elif phase_of(pod) == "Pending":
            pod = self.fail_without_status(pod, "")
        self.server.kubelet_confirms(pod)

    def end(self, pod: Document, failure: FailureClass | None, *, message: str | None = None, reason: str = "Error") -> Document:
        """The container of a running pod ends. No failure: with success. `message`: instead of the report of our supervisor."""
        # 255 is what containerd says of a container that it finds dead.
        code = 0 if failure is None else EXIT_CODES.get(failure, 255)
        rank = int((pod["metadata"].get("annotations") or {}).get(INDEX, "0"))
        role = Role(pod["metadata"]["labels"].get(LABEL_ROLE, "train"))
        now = self.server.now()
        said = envelope(failure, role=role, node_rank=rank, rank=rank, time=now.timestamp()) if message is None else message

        def change(item: Document) -> None:
            container = item["status"]["containerStatuses"][0]
            running = container["state"].get("running") or {"startedAt": stamp(now)}
            ended = {
                "exitCode": code,
                "reason": "Completed" if code == 0 else reason,
                "message": said,
                "startedAt": running["startedAt"],
                "finishedAt": stamp(now),
            }
            item["status"] = {
                **item["status"],
                "phase": "Succeeded" if code == 0 else "Running" if self._goes_on(item, code) else "Failed",
                "containerStatuses": [{**container, "state": {"terminated": ended}}],
            }

        self.processes.pop(pod["metadata"]["uid"], None)
        return self.server.update(PODS, pod, change)

    def fail_without_status(self, pod: Document, reason: str) -> Document:
        """The kubelet fails a pod whose container never ran (`OutOfcpu`, `Evicted`, ...)."""

        def change(item: Document) -> None:
            item["status"] = {**item["status"], "phase": "Failed", **({"reason": reason} if reason else {})}
            item["status"].pop("containerStatuses", None)

        self.processes.pop(pod["metadata"]["uid"], None)
        return self.server.update(PODS, pod, change)

    def disrupt(self, pod: Document, reason: str) -> None:
        """Somebody evicts a pod: the condition first, then the deletion."""
        pod = self._condition(pod, "DisruptionTarget", "True", reason, reason)
        self.server.delete(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"])

    def taint_manager(self) -> None:
        """Pods on nodes that do not answer are marked and asked to end, which nobody there hears."""
        for node in self.nodes:
            if node.answers:
                continue
            for pod in self.server.all(PODS):
                if pod["spec"].get("nodeName") == node.name and not is_over(pod) and "deletionTimestamp" not in pod["metadata"]:
                    self.disrupt(pod, "DeletionByTaintManager")

    def lose(self, node: Node, *, power: bool) -> None:
        """A node stops answering; with `power` its processes end, without it they go on."""
        node.answers = False
        if power:
            node.runs = False
            for uid in [uid for uid, name in self.processes.items() if name == node.name]:
                del self.processes[uid]

    def heal(self, node: Node) -> None:
        """The node is back. What lost its power cannot go on: the kubelet fails those pods."""
        if not node.runs:
            for pod in self.server.all(PODS):
                if pod["spec"].get("nodeName") == node.name and phase_of(pod) == "Running":
                    self.end(pod, FailureClass.UNKNOWN, message="", reason="Unknown")
        node.answers = node.runs = node.starts_pods = True

    def _condition(self, pod: Document, kind: str, state: str, reason: str, message: str) -> Document:
        def change(item: Document) -> None:
            kept = [one for one in item["status"].get("conditions") or () if one["type"] != kind]
            known = [one for one in item["status"].get("conditions") or () if one["type"] == kind]
            if known and (known[0]["status"], known[0].get("reason", "")) == (state, reason):
                return
            new = {"type": kind, "status": state, "reason": reason, "message": message}
            item["status"] = {**item["status"], "conditions": [*kept, {**new, "lastTransitionTime": stamp(self.server.now())}]}

        return self.server.update(PODS, pod, change)

    def running(self, chosen: Callable[[Document], bool] = lambda _: True) -> list[Document]:
        """Pods whose containers run and whose kubelet can say so."""
        return [
            pod
            for pod in self.server.all(PODS)
            if phase_of(pod) == "Running"
            and "running" in pod["status"]["containerStatuses"][0]["state"]
            and chosen(pod)
            and (node := self.node(pod["spec"]["nodeName"]))
            and node.answers
        ]

    def works(self, pod: Document) -> bool:
        """Whether a container runs that may end well: one of training that was started again waits before it trains."""
        container = pod["status"]["containerStatuses"][0]
        if "running" not in container["state"]:
            return False
        if pod["metadata"]["labels"].get(LABEL_ROLE) != Role.TRAIN:
            return True
        return len(self.begun.get(pod["metadata"]["uid"], ())) > container.get("restartCount", 0)
