"""A rank dies, hangs, takes too much memory, or is fed with bad data."""

import os
import signal

from finetune_job.names import Role
from finetune_trainer.processes.start import name_of_process
from finetune_trainer.ranks.reports import rank_process_name
from tests.e2e.failures.case import Case, Expected, FailedAttempt
from tests.e2e.failures.scene import SPEC, Scene
from tools.cluster.cgroups import processes_of_pod
from tools.cluster.errors import ClusterError
from tools.stack import SYSTEM_NAMESPACE

_TOO_LITTLE_MEMORY = "400Mi"
"""Less than a rank needs to import its libraries."""
_SHORTEST_STEP_TIMEOUT = 10


def signal_rank(scene: Scene, number: signal.Signals) -> None:
    """Send a signal to the training process of the pod on the other node."""
    pod = scene.training_pod_elsewhere()
    names = {rank_process_name(rank) for rank in range(SPEC["parallelism"]["nodes"])}
    ranks = [pid for pid in processes_of_pod(pod["metadata"]["uid"]) if name_of_process(pid) in names]
    if len(ranks) != 1:
        raise ClusterError(f"expected one rank in pod {pod['metadata']['name']}, found {ranks}")
    scene.start_clock()
    os.kill(ranks[0], number)


def _killed(scene: Scene) -> None:
    scene.start()
    scene.wait_for_checkpoint()
    signal_rank(scene, signal.SIGKILL)
    scene.wait_for_next_step()


def _hangs(scene: Scene) -> None:
    scene.start({"training": SPEC["training"] | {"stepTimeoutSeconds": _SHORTEST_STEP_TIMEOUT}})
    scene.wait_for_checkpoint()
    signal_rank(scene, signal.SIGSTOP)
    scene.wait_for_next_step()


def _out_of_memory(scene: Scene) -> None:
    resources = scene.default_profile()["resources"]
    small = resources["train"] | {"memory": _TOO_LITTLE_MEMORY}
    scene.start(profile={"resources": resources | {Role.TRAIN.value: small}})


def _bad_data(scene: Scene) -> None:
    file = scene.stack.claim("data") / f"{scene.name}.jsonl"
    file.write_text('{"prompt": 1}\n' * 8)
    scene.at_the_end(file.unlink)
    data = scene.example()["data"] | {"source": f"pvc://data/{file.name}"}
    scene.start_clock()
    scene.start({"data": data})
    scene.wait_until_said("PreflightRefused")


def _killed_without_operator(scene: Scene) -> None:
    def scale(replicas: int) -> None:
        scene.stack.cluster.kubectl(
            *("scale", "deployment", "--namespace", SYSTEM_NAMESPACE, "--selector", "app.kubernetes.io/name=finetune-operator"),
            *("--replicas", str(replicas)),
        )

    def operators() -> int:
        return len(scene.stack.objects("pods", "app.kubernetes.io/name=finetune-operator", SYSTEM_NAMESPACE))

    scene.start()
    scene.wait_for_checkpoint()
    scene.at_the_end(lambda: scale(1))
    scale(0)
    scene.wait(lambda: operators() == 0, "the operator's end")
    signal_rank(scene, signal.SIGKILL)
    # The Job controller fails the Job and deletes the other rank's pod while nobody looks.
    scene.wait(lambda: scene.failed_jobs() == 1, "the training Job's failure")
    scene.start_clock()
    scale(1)
    scene.wait_for_next_step()


CASES = (
    Case(
        "rank-killed",
        "`kill -9` of a rank's process",
        Expected("Succeeded", (FailedAttempt("train", "Internal", counted=True),), resumes=True),
        _killed,
    ),
    Case(
        "hang",
        "SIGSTOP of a rank's process, `stepTimeoutSeconds: 10`",
        Expected("Succeeded", (FailedAttempt("train", "Stalled", counted=True),), resumes=True),
        _hangs,
    ),
    Case(
        "out-of-memory",
        f"a memory limit of {_TOO_LITTLE_MEMORY} for the training pods",
        Expected("Failed", (FailedAttempt("train", "HostOutOfMemory", counted=False),)),
        _out_of_memory,
    ),
    Case(
        "bad-data",
        "records without the fields of their format",
        Expected("Stalled", (FailedAttempt("preflight", "UserData", counted=False),), says="PreflightRefused"),
        _bad_data,
    ),
    Case(
        "operator-away",
        "`kill -9` of a rank while no operator runs; the operator comes back",
        Expected("Succeeded", (FailedAttempt("train", "Internal", counted=True),), resumes=True),
        _killed_without_operator,
        fixed=True,
    ),
)
