"""A trace of spot nodes against the real operator in the simulated cluster: one job, a pod for each node.

What runs in the pods is played: a gang of W of V nodes does a step in V / W times the seconds, starts for so long, and saves at
its interval. The operator, the scheduler, the Job controller and everything that it is told are those of `tests/simulation`.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

from bench.spot.trace import Event
from finetune_job.names import LABEL_ROLE
from finetune_job.progress import Progress
from finetune_operator.client.kinds import JOBS, PODS, JobKey
from finetune_trainer.checkpoint.interval import best_interval
from tests.simulation.api_server import Document, owned_by
from tests.simulation.controllers import is_over, is_true, phase_of
from tests.simulation.nodes import Node
from tests.simulation.virtual_time import VirtualLoop, run
from tests.simulation.world import TEAM, World, a_manifest

ROUND_SECONDS = 15.0
TOTAL_STEPS = 1_000_000


@dataclass(frozen=True)
class Workload:
    """What is trained. node_hours: of productive work, on however many nodes."""

    nodes: int
    node_hours: float
    startup_seconds: float
    save_seconds: float
    interval_seconds: float
    """Between two saves, at most."""
    is_adaptive: bool


@dataclass
class Account:
    """Node seconds of a run, and when it ended."""

    productive: float = 0.0
    lost: float = 0.0
    """Done and thrown away."""
    starting: float = 0.0
    saving: float = 0.0
    held: float = 0.0
    """Nodes on which a pod of the gang ran, whatever it did."""
    seconds: float = 0.0
    attempts: int = 0
    losses: int = 0
    is_done: bool = False

    @property
    def goodput(self) -> float:
        """Share of the node hours that were paid for."""
        return self.productive / self.held if self.held else 0.0


@dataclass
class _Gang:
    """A training attempt whose pods all run."""

    uid: str
    attempt: int
    nodes: int
    names: frozenset[str]
    """Of its nodes."""
    starting: float
    """Seconds until it works."""
    saving: float = 0.0
    """Seconds of a save that are left; steps wait for it."""
    unsaved: float = 0.0
    """Node seconds of work since the latest save."""
    since_save: float = 0.0


class Replay:
    """One job on one trace."""

    def __init__(self, workload: Workload, fewest: int | None, events: list[Event], seed: int) -> None:
        self._workload, self._events = workload, list(events)
        self._loop = VirtualLoop()
        self._world = World(self._loop, random.Random(seed))
        self._world.nodes.nodes = [Node(f"node-{number}", room=1) for number in range(workload.nodes)]
        self._gang: _Gang | None = None
        self.account = Account()
        manifest = a_manifest(TEAM, "tune", nodes=workload.nodes, fewest=fewest)
        manifest["spec"]["training"] = {**manifest["spec"].get("training", {}), "globalBatchSize": 16 * workload.nodes}
        self._world.people_prepare([manifest], {})

    def run(self, most_seconds: float) -> Account:
        """Until the work is done or so much time has passed."""
        run(self._live(most_seconds), self._loop)
        return self.account

    async def _live(self, most_seconds: float) -> None:
        world, account = self._world, self.account
        world.start_operator()
        while self._loop.time() < most_seconds and not account.is_done:
            self._nodes_come_and_go()
            world.cluster_works()
            self._other_roles_succeed()
            self._train(ROUND_SECONDS)
            if process := world.running_operator():
                process.deliver_all()
            await asyncio.sleep(ROUND_SECONDS)
            world.check()
        account.seconds = self._loop.time()
        (job,) = world.server.all(JOBS)
        account.attempts = (job.get("status") or {}).get("attempt", 0) + 1

    # The market.

    def _nodes_come_and_go(self) -> None:
        while self._events and self._events[0].at <= self._loop.time():
            event = self._events.pop(0)
            name = f"node-{event.node}"
            node = self._world.nodes.node(name)
            if event.comes and node is None:
                self._world.nodes.nodes.append(Node(name, room=1))
            elif not event.comes and node is not None:
                self._take(node, event)

    def _take(self, node: Node, event: Event) -> None:
        """The node object goes, and with it its pods; with a notice the gang has been told in time to save."""
        nodes, server = self._world.nodes, self._world.server
        is_of_gang = self._gang is not None and node.name in self._gang.names
        if is_of_gang and self._gang is not None and event.notice >= self._workload.save_seconds + ROUND_SECONDS:
            self._save(self._gang)
        for pod in [one for one in server.all(PODS) if one["spec"].get("nodeName") == node.name and not is_over(one)]:
            nodes.disrupt(pod, "DeletionByPodGC")
            # No kubelet is left that would end them: the garbage collector of pods does.
            server.kubelet_confirms(nodes.fail_without_status(pod, ""))
        nodes.nodes.remove(node)
        if is_of_gang:
            self._end_gang()

    # What runs in the pods.

    def _other_roles_succeed(self) -> None:
        for job in self._world.batch_jobs_running():
            if job["metadata"]["labels"].get(LABEL_ROLE) != "train":
                self._world.succeed(job)

    def _running_gang(self) -> tuple[Document, list[Document]] | None:
        for job in self._world.batch_jobs_running():
            if job["metadata"]["labels"].get(LABEL_ROLE) == "train":
                pods = owned_by(self._world.server.all(PODS), job["metadata"]["uid"])
                return job, [pod for pod in pods if phase_of(pod) == "Running" and "deletionTimestamp" not in pod["metadata"]]
        return None

    def _train(self, seconds: float) -> None:
        """Whatever the gang's pods do in one round."""
        found, account, workload = self._running_gang(), self.account, self._workload
        held = [pod for pod in self._world.server.all(PODS) if phase_of(pod) == "Running" and not is_over(pod)]
        account.held += seconds * sum(pod["metadata"]["labels"].get(LABEL_ROLE) == "train" for pod in held)
        if self._gang is not None and (found is None or found[0]["metadata"]["uid"] != self._gang.uid):
            # SIGTERM, as for a gang that is resized: it saves before it ends.
            self._save(self._gang)
            self._end_gang()
        if found is None:
            return
        (document, pods), (job,) = found, self._world.server.all(JOBS)
        if self._gang is None:
            names = frozenset(pod["spec"]["nodeName"] for pod in pods)
            attempt = job["status"].get("attempt", 0)
            self._gang = _Gang(document["metadata"]["uid"], attempt, len(pods), names, workload.startup_seconds)
        gang = self._gang
        starting = min(seconds, gang.starting)
        saving = min(seconds - starting, gang.saving)
        working = seconds - starting - saving
        gang.starting, gang.saving = gang.starting - starting, gang.saving - saving
        account.starting += starting * gang.nodes
        account.saving += saving * gang.nodes
        gang.unsaved += working * gang.nodes
        gang.since_save += working
        if gang.since_save >= self._interval() or account.productive + gang.unsaved >= workload.node_hours * 3600:
            self._save(gang)
        if account.productive >= workload.node_hours * 3600:
            account.is_done = True
        self._tell(job, gang)

    def _interval(self) -> float:
        workload, account = self._workload, self.account
        if not workload.is_adaptive or not account.losses:
            return workload.interval_seconds
        return min(workload.interval_seconds, best_interval(workload.save_seconds, self._loop.time() / account.losses))

    def _save(self, gang: _Gang) -> None:
        self.account.productive += gang.unsaved
        gang.unsaved, gang.since_save, gang.saving = 0.0, 0.0, self._workload.save_seconds

    def _end_gang(self) -> None:
        if self._gang is not None:
            self.account.lost += self._gang.unsaved
            self.account.losses += self._gang.unsaved > 0
        self._gang = None

    def _tell(self, job: Document, gang: _Gang) -> None:
        process, metadata = self._world.running_operator(), job["metadata"]
        if process is None or not is_true(job, "Prepared"):
            return
        share = self.account.productive / (self._workload.node_hours * 3600)
        left = (1 - share) * self._workload.node_hours * 3600 / gang.nodes
        step = min(int(share * TOTAL_STEPS), TOTAL_STEPS - 1)
        told: dict[str, Any] = {"step": step, "total_steps": TOTAL_STEPS, "checkpoint_step": step or None, "seconds_left": left}
        process.tell_progress(
            metadata["uid"], JobKey(metadata["namespace"], metadata["name"]), Progress(attempt=gang.attempt, **told)
        )
