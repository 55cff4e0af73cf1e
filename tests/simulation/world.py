"""Server, controllers, nodes, users and the operator in one virtual hour after the other."""

import asyncio
import copy
import random
from typing import Any

from finetune_job.names import LABEL_MANAGED_BY, LABEL_ROLE
from finetune_job.progress import Progress
from finetune_operator.client.kinds import (
    BATCH_JOBS,
    CLAIMS,
    CONFIG_MAPS,
    JOBS,
    NETWORK_POLICIES,
    PODS,
    PROFILES,
    SERVICES,
    JobKey,
    Kind,
)
from tests.simulation.api_server import ApiServer, Change, Document, RefusedError, owned_by
from tests.simulation.controllers import (
    GarbageCollector,
    JobController,
    condition_list,
    end_namespace_step,
    is_over,
    is_true,
    phase_of,
)
from tests.simulation.invariants import Invariants, is_gated, orphans
from tests.simulation.nodes import ROOM, Nodes
from tests.simulation.operator_process import OperatorProcess
from tests.simulation.transport import Weather
from tests.simulation.virtual_time import VirtualLoop
from tests.support.builders import a_job, a_profile

TEAM, LAB = "team", "lab"
CLAIM_NAMES = ("models", "data", "results", "scratch")
WAITING_REASONS = frozenset(
    {
        "WaitingForPods",
        "WaitingInLine",
        "Queued",
        "Unschedulable",
        "CreateRefused",
        "ImagePullFailed",
        "MountFailed",
        "NodeLost",
        "BlockedOnNode",
        "WaitingForSource",
        "WaitingForDestination",
        "BackingOff",
        "Restarting",
        "Resizing",
        "Stopping",
    }
)


class World:
    """Everything but the operator's own memory."""

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop = loop
        self.random = rng
        self.server = ApiServer(loop.now, rng)
        self.nodes = Nodes(self.server)
        self.jobs = JobController(self.server)
        self.collector = GarbageCollector(self.server)
        self.weather = Weather()
        self.invariants = Invariants(self.server, self.nodes, loop.time)
        self.server.has_queue = True
        self.server.watchers += [self.invariants.saw, self._watched]
        self.operator: OperatorProcess | None = None
        self.num_lives = 0
        self.released: set[str] = set()
        """UIDs of objects whose dependents a user orphaned."""
        self.manifests: dict[tuple[str, str], Document] = {}
        self.lost_nodes_are_off = False

    def _watched(self, change: Change) -> None:
        if self.operator is not None:
            self.operator.saw(change)
        if change.kind == PODS and change.after is not None and "deletionTimestamp" in change.after["metadata"]:
            uid, grace = change.after["metadata"]["uid"], change.after["metadata"].get("deletionGracePeriodSeconds", 0)
            self.loop.call_later(grace + 1.0, self.nodes.keep_grace, uid)

    # People.

    def people_prepare(self, manifests: list[Document], profile: dict[str, Any]) -> None:
        """The platform's profile, the users' claims and manifests."""
        spec = a_profile(**profile).model_dump(mode="json", by_alias=True, exclude_none=True)
        self.server.create(PROFILES, "", {"metadata": {"name": "default"}, "spec": spec})
        for document in manifests:
            metadata = document["metadata"]
            self.manifests[metadata["namespace"], metadata["name"]] = document
            self.restore_claims(metadata["namespace"])
            self.apply(metadata["namespace"], metadata["name"])

    def restore_claims(self, namespace: str) -> None:
        for name in CLAIM_NAMES:
            if self.server.get(CLAIMS, namespace, name) is None:
                self._try(lambda name=name: self.server.create(CLAIMS, namespace, {"metadata": {"name": name}, "spec": {}}))

    def apply(self, namespace: str, name: str) -> None:
        """Create a job from its manifest, if it is not there."""
        document = copy.deepcopy(self.manifests[namespace, name])
        document["metadata"] = {"name": name, "namespace": namespace}
        self._try(lambda: self.server.create(JOBS, namespace, document))

    def edit_run(self, job: Document, **fields: Any) -> None:
        """A user changes spec.run. What has been cancelled stays cancelled."""

        def change(item: Document) -> None:
            run = item["spec"].setdefault("run", {})
            if run.get("cancel"):
                fields.pop("cancel", None)
            run.update(fields)

        self.server.update(JOBS, job, change)

    def remove_job(self, job: Document, policy: str) -> None:
        """A user deletes a FineTuneJob."""
        self.delete(JOBS, job, policy=policy)

    def delete(self, kind: Kind, item: Document, **options: Any) -> None:
        """Somebody deletes an object."""
        metadata = item["metadata"]
        if options.get("policy") == "Orphan":
            self.released.add(metadata["uid"])
        self._try(lambda: self.server.delete(kind, metadata.get("namespace", ""), metadata["name"], **options))

    def unlabel(self, kind: Kind, item: Document) -> None:
        """Somebody takes the label off by which children are watched."""
        self._try(
            lambda: self.server.update(kind, item, lambda one: one["metadata"].get("labels", {}).pop(LABEL_MANAGED_BY, None))
        )

    def has_hidden_jobs(self, child: Document) -> bool:
        """Whether a Job of the same owner has lost its label."""
        owners = {owner["uid"] for owner in child["metadata"].get("ownerReferences") or ()}
        jobs = [item for uid in owners for item in owned_by(self.server.all(BATCH_JOBS), uid)]
        return any(LABEL_MANAGED_BY not in item["metadata"]["labels"] for item in jobs)

    def admit_all(self) -> None:
        """The queue has room for every Job."""
        for job in self.server.all(BATCH_JOBS):
            if job["spec"].get("suspend") and not is_gated(job):
                self.server.update(BATCH_JOBS, job, lambda item: item["spec"].update(suspend=False))

    @staticmethod
    def _try(action: Any) -> None:
        try:
            action()
        except RefusedError:
            return

    # The cluster.

    def cluster_works(self) -> None:
        """One round of everybody but the operator."""
        self.nodes.schedule()
        self.nodes.kubelets()
        for job in self.server.all(BATCH_JOBS):
            self.jobs.sync(job)
        self.jobs.release_orphans()
        self.collector.sync()
        for namespace in list(self.server.terminating):
            end_namespace_step(self.server, namespace)

    def batch_jobs_running(self) -> list[Document]:
        """Jobs all of whose pods have ended well or run and can report."""
        found = []
        for job in self.server.all(BATCH_JOBS):
            pods = owned_by(self.server.all(PODS), job["metadata"]["uid"])
            live = [pod for pod in pods if phase_of(pod) == "Running" and "deletionTimestamp" not in pod["metadata"]]
            num_done = sum(phase_of(pod) == "Succeeded" for pod in pods)
            if live and len(live) + num_done == job["spec"]["completions"] and "deletionTimestamp" not in job["metadata"]:
                nodes = [self.nodes.node(pod["spec"]["nodeName"]) for pod in live]
                if all(node is not None and node.answers for node in nodes):
                    found.append(job)
        return found

    def succeed(self, job: Document) -> None:
        """Every pod of a Job ends well."""
        for pod in owned_by(self.server.all(PODS), job["metadata"]["uid"]):
            if phase_of(pod) == "Running":
                self.nodes.end(pod, None)

    # The operator.

    def start_operator(self) -> None:
        self.num_lives += 1
        seed = str(self.random.random())
        self.operator = OperatorProcess(self.server, self.weather, self.loop, self.invariants.called, seed)

    def running_operator(self) -> OperatorProcess | None:
        """The operator, if it lives and has made its first list."""
        process = self.operator
        return process if process is not None and process.is_alive and process.is_synced else None

    def tell_progress(self, job: Document, step: int) -> None:
        """Rank 0 answers a poll."""
        process, metadata = self.running_operator(), job["metadata"]
        if process is not None and is_true(job, "Prepared") and not is_true(job, "Trained"):
            attempt = (job.get("status") or {}).get("attempt", 0)
            key = JobKey(metadata["namespace"], metadata["name"])
            process.tell_progress(
                metadata["uid"], key, Progress(attempt=attempt, step=step, total_steps=10, checkpoint_step=step or None)
            )

    def check(self) -> None:
        """Raises AssertionError with everything that must not have happened."""
        complaints = list(self.invariants.complaints)
        if self.operator is not None:
            complaints += self.operator.observer.complaints
            self.operator.check()
        assert not complaints, "\n".join(list(dict.fromkeys(complaints))[:3])

    # The end.

    async def rest(self, minutes: int, *, succeed: bool, quiet: bool = False) -> None:
        """Nothing fails any more. `succeed`: pods do what they should; `quiet`: nothing moves but time."""
        for _ in range(minutes * 2):
            if not quiet:
                self.cluster_works()
                self.nodes.taint_manager()
            if self.operator is None or not self.operator.is_alive:
                self.start_operator()
            if process := self.running_operator():
                process.deliver_all()
            await asyncio.sleep(1.0)
            if not quiet:
                if succeed:
                    self.admit_all()
                self.cluster_works()
                if succeed:
                    for job in self.batch_jobs_running():
                        self.succeed(job)
                    self.cluster_works()
                    self.cluster_works()
            if process := self.running_operator():
                process.deliver_all()
            await asyncio.sleep(29.0)
            self.check()

    async def faults_stop(self) -> None:
        """Requests are answered and every event arrives; what is broken in the cluster stays broken."""
        self.weather.faults = self.weather.deaths = 0.0
        self.weather.latency = 0.01
        await self.rest(15, succeed=False)
        for job in self.server.all(JOBS):
            self._says_so(job)

    async def everything_heals(self) -> None:
        """Nodes, quotas and claims are right again; then users resume and retry; then every job has ended or needs a human."""
        self.nodes.is_full = False
        self.server.quotas.clear()
        for node in self.nodes.nodes:
            self.nodes.heal(node)
            node.room = ROOM
        for namespace in {place for place, _ in self.manifests}:
            self.restore_claims(namespace)
        await self.rest(60, succeed=True)
        for job in self.server.all(JOBS):
            self._says_so(job, healed=True)
        for job in self.server.all(JOBS):
            if not is_true(job, "Finished"):
                self.edit_run(job, suspend=False)
        # What failed before the suspension is said now.
        await self.rest(30, succeed=True)
        for job in self.server.all(JOBS):
            if not is_true(job, "Finished"):
                self.edit_run(job, retry=job["spec"].get("run", {}).get("retry", 0) + 1)
        await self.rest(60, succeed=True)
        for job in self.server.all(JOBS):
            self._has_ended(job)
        left = orphans(self.server, self.invariants, self.released)
        assert not left, f"orphans: {left}"
        before = self.invariants.num_calls
        await self.rest(8, succeed=True, quiet=True)
        calls = self.invariants.num_calls - before
        limit = 120 + 60 * len(self.server.all(JOBS))
        assert calls <= limit, f"{calls} calls in eight minutes in which nothing happened; {limit} are enough"

    def _says_so(self, job: Document, *, healed: bool = False) -> None:
        """Whether a job's conditions tell how it stands."""
        name = job["metadata"]["name"]
        conditions = {item["type"]: item for item in condition_list(job)}
        told = {kind: f"{item['status']}/{item['reason']}: {item.get('message', '')[:150]}" for kind, item in conditions.items()}
        if "deletionTimestamp" in job["metadata"] or any(is_true(job, kind) for kind in ("Finished", "Stalled", "Suspended")):
            return
        assert conditions, f"{name} has no status"
        if self._waits_in_line(job):
            return
        assert not healed, f"{name} came to no rest: {told}"
        if self._stops_on_lost_node(job) or self._waits_for_namesake(job):
            return
        ready = conditions.get("Ready", {})
        if ready.get("status") == "True":
            pods = [pod for pod in self.server.all(PODS) if self._belongs(pod, job) and not is_over(pod)]
            running = [pod for pod in pods if self._runs(pod)]
            assert running, f"{name} is said to be Ready, and none of its pods runs: {told}"
            lost = [pod["metadata"]["name"] for pod in pods if not self._runs(pod)]
            assert not lost, f"{name} is said to be Ready, and {lost} do not run: {told}"
            return
        assert ready.get("reason") in WAITING_REASONS, f"{name} waits for something and does not say so: {told}"

    def _waits_in_line(self, job: Document) -> bool:
        """Whether it waits for another one that has not ended, and says so."""
        others = [one for one in self.server.all(JOBS, job["metadata"]["namespace"]) if one is not job]
        reasons = [item["reason"] for item in condition_list(job) if item["type"] == "Ready"]
        return reasons == ["WaitingInLine"] and any(not is_true(one, "Finished") for one in others)

    def _waits_for_namesake(self, job: Document) -> bool:
        """Whether it names what an earlier job of its name has left, and that cannot go because a node is away."""
        ready = next(item for item in condition_list(job) if item["type"] == "Ready")
        going = [
            item for item in self.server.all(BATCH_JOBS, job["metadata"]["namespace"]) if "deletionTimestamp" in item["metadata"]
        ]
        left = [f"Job/{item['metadata']['name']} of an earlier job of this name is still being deleted." for item in going]
        return ready["reason"] == "Pending" and ready["message"] in left

    def _stops_on_lost_node(self, job: Document) -> bool:
        """Whether its outcome is decided, and it names a pod that cannot end because its node is away."""
        said = [item for item in condition_list(job) if item["type"] == "Finished" and item["reason"] == "Stopping"]
        pods = [pod for pod in self.server.all(PODS) if self._belongs(pod, job) and not is_over(pod) and not self._runs(pod)]
        places = [f"pod {pod['metadata']['name']} on node {pod['spec'].get('nodeName')}" for pod in pods]
        return any(place in item["message"] for item in said for place in places)

    def _belongs(self, pod: Document, job: Document) -> bool:
        place = self.invariants.place_of_job.get(self.invariants.job_of_pod.get(pod["metadata"]["uid"], ""))
        return place is not None and place[0] == job["metadata"]["uid"]

    def _runs(self, pod: Document) -> bool:
        node = self.nodes.node(pod["spec"].get("nodeName", ""))
        return phase_of(pod) == "Running" and node is not None and node.answers and "deletionTimestamp" not in pod["metadata"]

    def _has_ended(self, job: Document) -> None:
        name = job["metadata"]["name"]
        told = {
            item["type"]: f"{item['status']}/{item['reason']}: {item.get('message', '')[:150]}" for item in condition_list(job)
        }
        if is_true(job, "Finished") or self._waits_in_line(job):
            return
        assert is_true(job, "Stalled"), f"{name} was resumed and retried, everything is well, and it has not ended: {told}"
        reason = next(item["reason"] for item in condition_list(job) if item["type"] == "Stalled")
        expected = {"PlanLost": self._plan_is_lost(job), "Conflict": self._has_conflict(job)}
        assert expected.get(reason, False), f"{name} is Stalled for a reason that does not hold: {told}"

    def _plan_is_lost(self, job: Document) -> bool:
        maps = owned_by(self.server.all(CONFIG_MAPS), job["metadata"]["uid"])
        plans = [item for item in maps if item["metadata"]["name"].endswith("-plan")]
        return not [item for item in plans if item["metadata"].get("labels", {}).get(LABEL_MANAGED_BY)]

    def _has_conflict(self, job: Document) -> bool:
        strangers = []
        for kind in (BATCH_JOBS, CONFIG_MAPS, SERVICES, CLAIMS, NETWORK_POLICIES):
            for item in self.server.all(kind, job["metadata"]["namespace"]):
                owners = [one["uid"] for one in item["metadata"].get("ownerReferences") or ()]
                if item["metadata"]["name"].startswith(job["metadata"]["name"] + "-") and job["metadata"]["uid"] not in owners:
                    strangers.append(item["metadata"]["name"])
        return bool(strangers)


def a_manifest(
    namespace: str, name: str, *, nodes: int = 1, fewest: int | None = None, elsewhere: bool = False, **run: Any
) -> Document:
    """A job; `elsewhere`: its data and results are outside the cluster, so that it fetches and publishes. `fewest`: nodes of an
    elastic gang.
    """
    builder = a_job().named(name).nodes(nodes).run(**run)
    if fewest is not None:
        builder = builder.spec("training.reduction", "Ordered").spec("parallelism.elastic.minNodes", fewest)
    if elsewhere:
        builder = builder.spec("data.source", "s3://bucket/train.jsonl").spec(
            "output.destination", "oci://registry.example/team/tuned:v1"
        )
    builder.document["metadata"]["namespace"] = namespace
    return builder.document


def role_of(item: Document) -> str:
    return str((item["metadata"].get("labels") or {}).get(LABEL_ROLE, ""))
