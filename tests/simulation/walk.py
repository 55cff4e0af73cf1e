"""A walk: many small steps, each drawn from its own seed, so that a failing walk can be replayed and shrunk step by step."""

import asyncio
import contextlib
import random
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from finetune_job.failures import FailureClass
from finetune_operator.client.kinds import BATCH_JOBS, CLAIMS, CONFIG_MAPS, JOBS, PODS, PROFILES, SERVICES
from tests.simulation.api_server import Document
from tests.simulation.controllers import end_namespace_step, is_over, phase_of
from tests.simulation.invariants import is_gated
from tests.simulation.operator_process import OperatorProcess
from tests.simulation.virtual_time import VirtualLoop, run
from tests.simulation.world import LAB, TEAM, World, a_manifest, role_of

Step = Callable[[World, random.Random], str | None]
"""One thing that happens; what it says goes into the trace, None: nothing happened."""

OWN_FAULTS = (
    FailureClass.INTERNAL,
    FailureClass.COLLECTIVE,
    FailureClass.STALLED,
    FailureClass.CHECKPOINT_INVALID,
    FailureClass.DISK_FULL,
    FailureClass.HOST_OUT_OF_MEMORY,
    FailureClass.NON_FINITE,
    FailureClass.USER_DATA,
    FailureClass.SOURCE_UNAVAILABLE,
    FailureClass.DESTINATION_UNAVAILABLE,
    FailureClass.DESTINATION_REFUSED,
)
FOR_ROLE = {
    FailureClass.SOURCE_UNAVAILABLE: ("fetch",),
    FailureClass.DESTINATION_UNAVAILABLE: ("publish",),
    FailureClass.DESTINATION_REFUSED: ("publish",),
    FailureClass.STALLED: ("train",),
    FailureClass.CHECKPOINT_INVALID: ("train",),
    FailureClass.COLLECTIVE: ("train",),
    FailureClass.NON_FINITE: ("train",),
    FailureClass.USER_DATA: ("preflight",),
}
"""Roles in which a class occurs; the others occur in all."""


@dataclass
class Trace:
    """What happened, latest last."""

    lines: deque[str] = field(default_factory=lambda: deque(maxlen=400))
    counts: Counter[str] = field(default_factory=Counter)
    current: int | None = None
    """Number of the step in progress."""

    def add(self, number: int, at: float, name: str, said: str) -> None:
        self.counts[name] += 1
        self.lines.append(f"{number:5d} {at:10.2f} s  {name}: {said}")


class NothingError(Exception):
    """There is nothing that a step could happen to."""


def _pick(rng: random.Random, items: Sequence[Document]) -> Document:
    if not items:
        raise NothingError
    return rng.choice(items)


def _running_operator(world: World) -> OperatorProcess:
    if (process := world.running_operator()) is None:
        raise NothingError
    return process


# Steps: the cluster.


def cluster_works(world: World, rng: random.Random) -> str:
    world.cluster_works()
    return "one round"


def one_controller(world: World, rng: random.Random) -> str:
    which = rng.randrange(4)
    if which == 0:
        world.nodes.schedule()
    elif which == 1:
        world.nodes.kubelets()
    elif which == 2:
        world.collector.sync()
    else:
        world.jobs.sync(_pick(rng, world.server.all(BATCH_JOBS)))
    return ("scheduler", "kubelets", "garbage collector", "Job controller")[which]


def role_succeeds(world: World, rng: random.Random) -> str | None:
    job = _pick(rng, world.batch_jobs_running())
    world.succeed(job)
    return str(job["metadata"]["name"])


def preparation_succeeds(world: World, rng: random.Random) -> str | None:
    job = _pick(rng, [one for one in world.batch_jobs_running() if role_of(one) in ("fetch", "preflight")])
    world.succeed(job)
    return str(job["metadata"]["name"])


def rank_ends_well(world: World, rng: random.Random) -> str | None:
    pod = _pick(rng, world.nodes.running(lambda pod: "deletionTimestamp" not in pod["metadata"]))
    world.nodes.end(pod, None)
    return str(pod["metadata"]["name"])


def pod_fails(world: World, rng: random.Random) -> str | None:
    pods = world.nodes.running()
    pod = rng.choice(pods) if pods else None
    failure = rng.choice(OWN_FAULTS)
    if pod is None or role_of(pod) not in FOR_ROLE.get(failure, (role_of(pod),)):
        return None
    world.invariants.counted_faults = world.nodes.restarts_ranks = True
    message, reason = (None, "Error") if rng.random() < 0.8 else ("", "Error")
    if failure is FailureClass.HOST_OUT_OF_MEMORY and rng.random() < 0.5:
        message, reason = "", "OOMKilled"
    world.nodes.end(pod, failure, message=message, reason=reason)
    return f"{pod['metadata']['name']}: {failure}"


def verification_fails(world: World, rng: random.Random) -> str | None:
    pod = _pick(rng, world.nodes.running(lambda pod: role_of(pod) == "merge"))
    if rng.random() < 0.7:
        return None
    world.nodes.end(pod, FailureClass.VERIFICATION_FAILED)
    return str(pod["metadata"]["name"])


def pod_is_disrupted(world: World, rng: random.Random) -> str | None:
    pod = _pick(rng, [pod for pod in world.server.all(PODS) if not is_over(pod)])
    how = rng.choice(["EvictionByEvictionAPI", "PreemptionByScheduler", "delete", "force"])
    if how == "delete":
        world.delete(PODS, pod)
    elif how == "force":
        # The one who forces a deletion has made sure that nothing runs there any more.
        world.nodes.processes.pop(pod["metadata"]["uid"], None)
        world.delete(PODS, pod, grace=0)
    else:
        world.nodes.disrupt(pod, how)
    return f"{pod['metadata']['name']}: {how}"


def pod_is_rejected(world: World, rng: random.Random) -> str | None:
    pending = [pod for pod in world.server.all(PODS) if phase_of(pod) == "Pending" and pod["spec"].get("nodeName")]
    pod = _pick(rng, pending)
    world.nodes.fail_without_status(pod, rng.choice(["UnexpectedAdmissionError", "OutOfcpu", "NodeAffinity"]))
    return str(pod["metadata"]["name"])


def node_changes(world: World, rng: random.Random) -> str:
    node = rng.choice(world.nodes.nodes)
    what = rng.choice(["lost", "lost", "heals", "heals", "heals", "pulls nothing"])
    if what == "lost":
        power = world.lost_nodes_are_off or rng.random() < 0.5
        world.nodes.lose(node, power=power)
        what = "lost its power" if power else "is cut off"
    elif what == "heals":
        world.nodes.heal(node)
    else:
        node.starts_pods = False
    return f"{node.name} {what}"


def taint_manager(world: World, rng: random.Random) -> str:
    world.nodes.taint_manager()
    return "marks pods of lost nodes"


def room_changes(world: World, rng: random.Random) -> str:
    world.nodes.is_full = not world.nodes.is_full and rng.random() < 0.3
    for node in world.nodes.nodes:
        # Few, often, so that a gang gets some of its nodes and not all.
        node.room = rng.choice([0, 1, 4, 4])
    return "full" if world.nodes.is_full else f"room for {sum(node.room for node in world.nodes.nodes)} pods"


def quota_changes(world: World, rng: random.Random) -> str:
    namespace = rng.choice([TEAM, LAB])
    if world.server.quotas.get(namespace) or rng.random() < 0.4:
        world.server.quotas.pop(namespace, None)
        return f"{namespace}: none"
    kinds = rng.choice([{BATCH_JOBS}, {PODS}, {CONFIG_MAPS}, {SERVICES}, {BATCH_JOBS, PODS}])
    world.server.quotas[namespace] = kinds
    return f"{namespace}: no {', '.join(sorted(kind.plural for kind in kinds))}"


def queue_changes(world: World, rng: random.Random) -> str | None:
    queued = [job for job in world.server.all(BATCH_JOBS) if "kueue.x-k8s.io/queue-name" in (job["metadata"].get("labels") or {})]
    job = _pick(rng, [one for one in queued if "deletionTimestamp" not in one["metadata"]])
    suspend = is_gated(job) or (not job["spec"].get("suspend") and rng.random() < 0.3)
    world.server.update(BATCH_JOBS, job, lambda item: item["spec"].update(suspend=suspend))
    return f"{job['metadata']['name']}: {'preempted' if suspend else 'admitted'}"


# Steps: people.


def user_edits(world: World, rng: random.Random) -> str | None:
    job = _pick(rng, world.server.all(JOBS))
    what = rng.choice(["suspend", "suspend", "resume", "resume", "resume", "retry", "retry", "cancel"])
    if what == "cancel":
        if rng.random() < 0.8:
            return None
        world.edit_run(job, cancel=True)
    elif what == "retry":
        world.edit_run(job, retry=job["spec"].get("run", {}).get("retry", 0) + 1)
    else:
        world.edit_run(job, suspend=what == "suspend")
    return f"{job['metadata']['name']}: {what}"


def user_deletes_job(world: World, rng: random.Random) -> str | None:
    job = _pick(rng, world.server.all(JOBS))
    if rng.random() < 0.7:
        return None
    policy = rng.choice(["Foreground", "Background", "Background", "Orphan"])
    world.remove_job(job, policy)
    return f"{job['metadata']['name']}: {policy}"


def user_applies(world: World, rng: random.Random) -> str:
    namespace, name = rng.choice(sorted(world.manifests))
    world.apply(namespace, name)
    return f"{namespace}/{name}"


def label_goes(world: World, rng: random.Random) -> str | None:
    kind = rng.choice([BATCH_JOBS, BATCH_JOBS, PODS, CONFIG_MAPS, SERVICES])
    item = _pick(rng, world.server.all(kind))
    if kind == CONFIG_MAPS and rng.random() < 0.7:
        return None
    world.unlabel(kind, item)
    return f"{kind.name} {item['metadata']['name']}"


def child_is_deleted(world: World, rng: random.Random) -> str | None:
    kind = rng.choice([BATCH_JOBS, BATCH_JOBS, BATCH_JOBS, SERVICES, CONFIG_MAPS])
    item = _pick(rng, world.server.all(kind))
    if kind == CONFIG_MAPS and rng.random() < 0.8:
        return None
    if kind == CONFIG_MAPS and world.has_hidden_jobs(item):
        # Nothing would be left that tells that the plan was used.
        return None
    policy = rng.choice(["Foreground", "Background", "Orphan"]) if kind == BATCH_JOBS else "Background"
    world.delete(kind, item, policy=policy)
    return f"{kind.name} {item['metadata']['name']}: {policy}"


def claim_changes(world: World, rng: random.Random) -> str | None:
    namespace = rng.choice([TEAM, LAB])
    claims = world.server.all(CLAIMS, namespace)
    claim = rng.choice(claims) if claims else None
    if claim is not None and rng.random() < 0.4:
        world.delete(CLAIMS, claim)
        return f"{namespace}/{claim['metadata']['name']} is deleted"
    world.restore_claims(namespace)
    return f"{namespace}: all there"


def profile_is_edited(world: World, rng: random.Random) -> str | None:
    profile = _pick(rng, world.server.all(PROFILES))
    digest = f"registry.example/trainer@sha256:{rng.randrange(16):x}" + "b" * 63
    world.server.update(PROFILES, profile, lambda item: item["spec"].update(trainerImage=digest))
    return "another image"


def namespace_ends(world: World, rng: random.Random) -> str | None:
    if world.server.terminating or rng.random() < 0.9:
        return None
    world.server.terminating.add(LAB)
    end_namespace_step(world.server, LAB)
    return LAB


# Steps: the operator and what it hears.


def events_arrive(world: World, rng: random.Random) -> str | None:
    process = _running_operator(world)
    process.deliver_all()
    return "all"


def one_event_arrives(world: World, rng: random.Random) -> str | None:
    process = _running_operator(world)
    places = [(kind, uid) for kind, watch in process.watches.items() for uid in watch.pending]
    if not places:
        return None
    kind, uid = rng.choice(places)
    latest_only = rng.random() < 0.5
    process.deliver(kind, uid, latest_only=latest_only)
    return f"{kind.name} {uid[:8]}{' (the latest only)' if latest_only else ''}"


def event_is_repeated(world: World, rng: random.Random) -> str | None:
    process = _running_operator(world)
    kind = rng.choice(list(process.watches))
    item = _pick(rng, world.server.all(kind))
    # An older state can only be repeated before a newer one is told.
    if item["metadata"]["uid"] in process.watches[kind].pending:
        return None
    process.watches[kind].pending[item["metadata"]["uid"]] = [(False, item)]
    process.deliver(kind, item["metadata"]["uid"])
    return f"{kind.name} {item['metadata']['name']}"


def watch_breaks(world: World, rng: random.Random) -> str | None:
    process = _running_operator(world)
    if rng.random() < 0.3:
        process.restart_watches()
        return "all of them"
    kind = rng.choice(list(process.watches))
    process.watches[kind].list_again()
    return str(kind.name)


def events_are_lost(world: World, rng: random.Random) -> str | None:
    process = _running_operator(world)
    places = [(kind, uid) for kind, watch in process.watches.items() for uid in watch.pending]
    if not places:
        return None
    kind, uid = rng.choice(places)
    process.watches[kind].take(uid, latest_only=True)
    return f"{kind.name} {uid[:8]}"


def operator_dies(world: World, rng: random.Random) -> str | None:
    if world.operator is None or not world.operator.is_alive:
        return None
    world.operator.kill()
    return f"life {world.num_lives} ends"


def operator_starts(world: World, rng: random.Random) -> str | None:
    if world.operator is not None and world.operator.is_alive:
        return None
    world.start_operator()
    return f"life {world.num_lives}"


def weather_changes(world: World, rng: random.Random) -> str:
    world.weather.faults = rng.choice([0.0, 0.0, 0.05, 0.3])
    world.weather.deaths = rng.choice([0.0, 0.0, 0.0, 0.02])
    world.weather.latency = rng.choice([0.005, 0.01, 0.2, 2.0])
    return f"{world.weather}"


def progress_is_told(world: World, rng: random.Random) -> str | None:
    job = _pick(rng, world.server.all(JOBS))
    known = ((job.get("status") or {}).get("progress") or {}).get("step", 0)
    # The next checkpoint, or whatever a run says that went back to an earlier one.
    world.tell_progress(job, min(known + 1, 10) if rng.random() < 0.7 else rng.randrange(11))
    return str(job["metadata"]["name"])


def nothing(world: World, rng: random.Random) -> str:
    return ""


WEIGHTED: tuple[tuple[int, Step], ...] = (
    (14, cluster_works),
    (6, one_controller),
    (6, role_succeeds),
    (1, rank_ends_well),
    (2, pod_fails),
    (1, verification_fails),
    (2, pod_is_disrupted),
    (1, pod_is_rejected),
    (1, node_changes),
    (1, taint_manager),
    (1, room_changes),
    (1, quota_changes),
    (2, queue_changes),
    (2, user_edits),
    (1, user_deletes_job),
    (2, user_applies),
    (1, label_goes),
    (1, child_is_deleted),
    (1, claim_changes),
    (1, profile_is_edited),
    (1, namespace_ends),
    (14, events_arrive),
    (8, one_event_arrives),
    (2, event_is_repeated),
    (1, watch_breaks),
    (1, events_are_lost),
    (1, operator_dies),
    (4, operator_starts),
    (1, weather_changes),
    (2, progress_is_told),
    (8, nothing),
)
STEPS = [step for weight, step in WEIGHTED for _ in range(weight)]
_MORE = (
    (60, cluster_works),
    (60, events_arrive),
    (30, preparation_succeeds),
    (30, progress_is_told),
    (8, room_changes),
    (8, pod_is_disrupted),
    (8, queue_changes),
)
ELASTIC_STEPS = [*STEPS, *(step for weight, step in _MORE for _ in range(weight))]
"""Of walks with an elastic gang, which is to live long enough to change its size."""
QUEUED = {"queueName": "gpus", "startupDeadlineSeconds": 60}
"""The deadline is shorter than many a wait in the queue, which is no start."""
PAUSES = (0.0, 0.0, 0.01, 0.05, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 120.0)


@dataclass(frozen=True)
class Outcome:
    """How a walk ended."""

    seed: int
    steps: int
    error: str
    """Empty where every invariant held."""
    last_step: int | None
    """The step in which it failed; None where it failed on coming to rest, or not at all."""
    trace: Trace
    phases: Counter[str]


def _is_elastic(seed: int) -> bool:
    return seed % 3 == 0


def _world(seed: int, loop: VirtualLoop) -> World:
    rng = random.Random(f"world {seed}")
    world = World(loop, rng)
    is_elastic = _is_elastic(seed)
    run_of_first = {"maxRestarts": rng.choice([0, 1, 3])} | (QUEUED if rng.random() < (0.4 if is_elastic else 0.25) else {})
    nodes, fewest = (3, rng.choice([1, 1, 2])) if is_elastic else (rng.choice([1, 2, 3]), None)
    manifests = [a_manifest(TEAM, "tune", nodes=nodes, fewest=fewest, elsewhere=rng.random() < 0.5, **run_of_first)]
    if rng.random() < (0.2 if is_elastic else 0.6):
        manifests.append(a_manifest(TEAM, "second", nodes=rng.choice([1, 2])))
    if rng.random() < (0.2 if is_elastic else 0.5):
        manifests.append(a_manifest(LAB, "tune", elsewhere=rng.random() < 0.5, ttlSecondsAfterFinished=3600))
    profile: Document = {"elastic": {"shrinkAfterSeconds": 30, "growAfterSeconds": 10}}
    if rng.random() < 0.2:
        profile["maxActiveJobs"] = 1
    if rng.random() < 0.2:
        # The one who allows this has made sure that a node that does not answer has no power.
        profile["forceDeletePodsOfLostNodes"] = world.lost_nodes_are_off = True
    if rng.random() < 0.5:
        profile["kueue"] = {"queueDuringPreflight": True}
    if is_elastic:
        # The gang is to find fewer nodes than it asks for.
        for node in world.nodes.nodes:
            node.room = 1
        rng.choice(world.nodes.nodes).room = 0
    world.people_prepare(manifests, profile)
    return world


async def _walk(world: World, seed: int, numbers: Sequence[int], trace: Trace) -> None:
    world.start_operator()
    await asyncio.sleep(1.0)
    for number in numbers:
        # Each step draws from its own seed: leaving one out does not change what the others do.
        trace.current = number
        rng = random.Random(zlib.crc32(f"{seed} {number}".encode()))
        world.random.seed(rng.random())
        step = rng.choice(ELASTIC_STEPS if _is_elastic(seed) else STEPS)
        with contextlib.suppress(NothingError):
            if (said := step(world, rng)) is not None:
                trace.add(number, world.loop.time(), step.__name__, said)
        await asyncio.sleep(rng.choice(PAUSES))
        world.check()
    trace.current = None
    trace.lines.append("faults stop")
    await world.faults_stop()
    trace.lines.append("everything heals")
    await world.everything_heals()


def walk(seed: int, numbers: Sequence[int]) -> Outcome:
    """Take these steps of the walk with this seed, and see it come to rest."""
    loop = VirtualLoop()
    trace = Trace()
    world = _world(seed, loop)
    error = ""
    try:
        run(_walk(world, seed, numbers, trace), loop)
    except AssertionError as complaint:
        error = str(complaint) or repr(complaint)
    phases = Counter(str((job.get("status") or {}).get("phase", "")) for job in world.server.all(JOBS))
    return Outcome(seed, len(numbers), error, trace.current, trace, phases)


def shrink(seed: int, numbers: Sequence[int], is_same: Callable[[Outcome], bool], most_seconds: float = 120.0) -> list[int]:
    """The fewest steps found that still fail in the same way, within so much processor time."""
    kept = list(numbers)
    until = time.process_time() + most_seconds
    last = walk(seed, kept).last_step
    if last is not None:
        kept = kept[: kept.index(last) + 1]
    size = max(len(kept) // 2, 1)
    while time.process_time() < until:
        shorter, start = False, 0
        while start < len(kept) and time.process_time() < until:
            candidate = kept[:start] + kept[start + size :]
            if is_same(walk(seed, candidate)):
                kept, shorter = candidate, True
            else:
                start += size
        if size == 1 and not shorter:
            break
        size = max(size // 2, 1)
    return kept
