"""Scheduler, kubelets and the life of nodes. `processes` is the truth about what runs, whatever the API says of it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from finetune_job.failures import EXIT_CODES, FailureClass, RankRestart
from finetune_job.names import LABEL_ROLE, Role
from finetune_operator.client.kinds import CONFIG_MAPS, PODS
from tests.simulation.api_server import ApiServer, Document
from tests.simulation.controllers import INDEX, is_over, phase_of, warn
from tests.simulation.virtual_time import stamp
from tests.support.builders import envelope

ROOM = 4


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


@dataclass
class Nodes:
    """All of them."""

    server: ApiServer
    nodes: list[Node] = field(default_factory=lambda: [Node("node-a"), Node("node-b"), Node("node-c")])
    processes: dict[str, str] = field(default_factory=dict)
    """UID of a pod whose process runs -> name of its node."""
    restarts_ranks: bool = False
    """Whether supervisors may have started their ranks again."""
    is_full: bool = False
    """Nobody is scheduled any more."""

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
        self.server.update(PODS, pod, change)

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
        said = message
        if said is None:
            restarts = self._restarts_of_ranks(pod) if failure is not FailureClass.PREEMPTED else []
            said = envelope(failure, role=role, node_rank=rank, rank=rank, time=now.timestamp(), restarts=restarts)

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
                "phase": "Succeeded" if code == 0 else "Failed",
                "containerStatuses": [{**container, "state": {"terminated": ended}}],
            }

        self.processes.pop(pod["metadata"]["uid"], None)
        return self.server.update(PODS, pod, change)

    def _restarts_of_ranks(self, pod: Document) -> list[RankRestart]:
        """Restarts that the supervisor of a gang of one pod has made, up to as many as it may."""
        arguments = pod["spec"]["containers"][0]["args"]
        most = int(arguments[arguments.index("--restarts") + 1]) if "--restarts" in arguments else 0
        number = self.server.random.randint(0, most) if self.restarts_ranks else 0
        restart = RankRestart(failure=FailureClass.INTERNAL, message="a rank was killed", time=self.server.now().timestamp())
        return [restart] * number

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
