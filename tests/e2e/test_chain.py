"""From `kubectl apply` to a merged and verified model on a real node, undisturbed and disturbed."""

import base64
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.chain import __main__ as chain
from finetune_job.names import Role
from tests.e2e.pod_network import Answer
from tests.e2e.publishing import LOGIN_SECRET, PROFILE, REPOSITORY, keep_login, publishing_registry
from tests.e2e.surroundings import Surroundings
from tests.support.registry import PASSWORD, NotThereError, Registry
from tools.s3 import SECRET_KEY as S3_SECRET_KEY
from tools.stack import NAMESPACE, ROOT, SYSTEM_NAMESPACE, USER_ID, Stack, condition_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]
EXAMPLE = "examples/quickstart-cluster.yaml"
NOT_REHEARSED: dict[str, Any] = {"preflight": {"rehearsal": "Skip"}}
"""Once is enough: the undisturbed job is."""


def adapter_bytes(stack: Stack, name: str) -> bytes:
    return (stack.claim("models-out") / name / "adapter" / "adapter_model.safetensors").read_bytes()


EVERYWHERE: dict[str, Answer] = {
    "another run's rendezvous": "open",
    "another run's metrics": "open",
    "port 53 of a pod of the namespace": "open",
    "another namespace's pod": "open",
    "port 9400 of another namespace": "open",
    "port 53 of another namespace": "open",
    "the operator": "open",
    "the first node's kubelet": "open",
    "the second node's kubelet": "open",
    "port 53 of a node": "refused",
    "the API server's Service": "open",
    "the API server": "open",
    "the metadata service": "open",
    "a private address that no profile names": "open",
    "the object store": "open",
    "a public address": "open",
}
NOWHERE: dict[str, Answer] = dict.fromkeys(EVERYWHERE, "nothing")
WAYS_OUT: dict[str, Answer] = NOWHERE | {"the object store": "open", "a public address": "open"}


@pytest.fixture(scope="module")
def surroundings(stack: Stack) -> Iterator[Surroundings]:
    with Surroundings(stack).standing() as standing:
        yield standing


@pytest.fixture(scope="module")
def undisturbed(stack: Stack, surroundings: Surroundings) -> dict[str, Any]:
    """A job of 2 pods x 2 ranks that ran on its own, looked at while its pods stood still for a moment.

    It is run as the benchmark of the chain runs one, which is so tried here.
    """
    name = "undisturbed"
    reached: dict[str, Any] = {}
    seen: dict[str, Any] = {}

    def when_applied() -> None:
        reached["preflight"] = surroundings.from_role(name, Role.PREFLIGHT)

    def when_training() -> None:
        seen["training_pods"] = stack.pods(name, Role.TRAIN)
        seen["table"] = stack.cluster.kubectl("get", "ftj", name, "--namespace", NAMESPACE)
        reached["gang"] = surroundings.of_gang(name)
        reached["merge"] = surroundings.from_role(name, Role.MERGE)

    seconds = chain.on_the_node(stack, name, EXAMPLE, when_applied=when_applied, when_training=when_training)
    return {"job": stack.job(name), "reached": reached, "seconds": seconds, **seen}


def test_its_results_are_downloaded_by_a_pod_of_which_nothing_is_left(
    stack: Stack, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    here = tmp_path / "here"
    command = [Path(sys.executable).with_name("finetune"), "download", "undisturbed", here, "--namespace", NAMESPACE]
    done = subprocess.run(command, env=stack.cluster.environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=here, check=True)
    there = stack.claim("models-out") / "undisturbed"
    names = {str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()}
    assert {str(path.relative_to(here)) for path in here.rglob("*") if path.is_file()} == names
    assert [pod["metadata"]["name"] for pod in stack.objects("pods") if "reader" in pod["metadata"]["name"]] == []


def test_its_logs_losses_and_checkpoints_are_read_from_the_workspace(stack: Stack, undisturbed: dict[str, Any]) -> None:
    def finetune(*arguments: str) -> str:
        command = [Path(sys.executable).with_name("finetune"), *arguments, "--namespace", NAMESPACE]
        done = subprocess.run(command, env=stack.cluster.environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    status = json.loads(finetune("status", "undisturbed", "--curve", "--checkpoints", "-o", "json"))
    assert len(status["losses"]) == status["totalSteps"] > 0
    assert status["losses"][-1] == pytest.approx(float(status["loss"]), rel=1e-5)
    assert status["checkpoints"][-1]["step"] == status["totalSteps"]
    of_pods = finetune("logs", "undisturbed", "--stage", "train", "--rank", "0")
    assert {line.partition("[rank ")[2].partition("]")[0] for line in of_pods.splitlines()} == {"0"}
    stack.cluster.kubectl("delete", "pods", "-n", NAMESPACE, "-l", "finetune.dev/job=undisturbed,finetune.dev/role=train")
    of_workspace = finetune("logs", "undisturbed", "--stage", "train", "--rank", "0")
    assert [line.partition("] ")[2] for line in of_workspace.splitlines()] == [
        line.rpartition("[rank 0] ")[2] for line in of_pods.splitlines()
    ]


def test_it_succeeds_with_a_verified_merged_model(stack: Stack, undisturbed: dict[str, Any]) -> None:
    job = undisturbed["job"]
    assert condition_of(job, "Succeeded").get("status") == "True", json.dumps(job["status"], indent=2)
    assert job["status"]["phase"] == "Succeeded"
    progress = job["status"]["progress"]
    assert progress["step"] == progress["totalSteps"] > 0
    assert float(progress["evalLoss"]) < 0.9 * float(progress["initialEvalLoss"])
    output = stack.claim("models-out") / "undisturbed"
    assert json.loads((output / "verification.json").read_text())["passed"] is True
    subprocess.run([sys.executable, "-m", "tools.plain_load", output / "merged"], cwd=ROOT, check=True, timeout=300)


def test_the_benchmark_of_the_chain_has_its_parts(undisturbed: dict[str, Any]) -> None:
    seconds = dict(undisturbed["seconds"])
    first_step, succeeded = seconds.pop("first_step"), seconds.pop("succeeded")
    assert set(seconds) == {"preflight", "train", "merge", "between"}
    assert 0 < seconds["preflight"] < first_step < succeeded == pytest.approx(sum(seconds.values()))
    between = seconds.pop("between")
    assert min(seconds.values()) > 0
    # Each stage is measured between two times in whole seconds, so it may seem up to a second longer than it was.
    assert between > -len(seconds)


def test_each_stage_ran_once(stack: Stack, undisturbed: dict[str, Any]) -> None:
    names = sorted(job["metadata"]["name"] for job in stack.batch_jobs("undisturbed"))
    assert names == ["undisturbed-merge-0", "undisturbed-preflight-0", "undisturbed-train-0"]
    restarts = undisturbed["job"]["status"]["restarts"]
    assert (restarts["counted"], restarts["uncounted"]) == (0, 0)


def test_the_training_pods_are_hardened(undisturbed: dict[str, Any]) -> None:
    pods = undisturbed["training_pods"]
    assert len(pods) == 2
    for pod in pods:
        spec = pod["spec"]
        (container,) = spec["containers"]
        assert spec["securityContext"]["runAsUser"] == USER_ID
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert not any("serviceaccount" in mount["mountPath"] for mount in container["volumeMounts"])
        assert container["resources"]["requests"] == container["resources"]["limits"]


def test_kubectl_get_shows_state_progress_and_loss(undisturbed: dict[str, Any]) -> None:
    header, line = undisturbed["table"].splitlines()
    assert header.split() == ["NAME", "PHASE", "STEP", "LOSS", "EVALLOSS", "RESTARTS", "AGE"]
    fields = line.split()
    assert fields[1] == "Training"
    assert "/" in fields[2]
    assert float(fields[3]) > 0


def test_the_places_around_a_job_are_open(surroundings: Surroundings) -> None:
    assert surroundings.from_outside() == EVERYWHERE


def test_pods_without_a_way_out_reach_nothing(undisturbed: dict[str, Any]) -> None:
    reached = undisturbed["reached"]
    assert reached["preflight"] == NOWHERE
    assert reached["gang"]["around"] == NOWHERE
    assert reached["merge"] == NOWHERE


def test_ranks_reach_each_other_and_nobody_else_joins_them(undisturbed: dict[str, Any]) -> None:
    gang = undisturbed["reached"]["gang"]
    assert gang["rank 0"] == {"unused port of rank 1": "refused"}, "collectives take any port"
    assert gang["rank 1"] == {"rendezvous": "open", "metrics": "open"}
    for uninvited in ("the neighbour", "the foreigner"):
        assert gang[uninvited] == {"rendezvous": "nothing", "metrics": "nothing"}
    for reader in ("the operator", "monitoring"):
        assert gang[reader] == {"rendezvous": "nothing", "metrics": "open"}


def test_the_operator_reaches_the_api_server_and_metrics_of_ranks(surroundings: Surroundings) -> None:
    expected = {"the API server's Service", "the API server", "another run's metrics", "the operator"}
    assert surroundings.from_operator() == NOWHERE | dict.fromkeys(expected, "open")


def test_only_who_is_named_reads_the_operators_metrics(surroundings: Surroundings) -> None:
    allowed: dict[str, Answer] = {"the operator": "open", "a public address": "open"}
    refused = allowed | {"the operator": "nothing"}
    assert surroundings.readers_of_operator() == {"monitoring": allowed, "the neighbour": refused, "the foreigner": refused}


@pytest.fixture(scope="module")
def registry(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with publishing_registry(stack, tmp_path_factory.mktemp("registry")) as running:
        yield running


def test_an_operator_killed_in_every_stage_and_a_killed_rank_change_no_byte(
    stack: Stack, undisturbed: dict[str, Any], registry: Registry, surroundings: Surroundings
) -> None:
    """Nothing is started twice but the gang, once; and a publication that is refused costs a look at its Secret."""
    reached: dict[Role, dict[str, Answer]] = {}

    def kill_operator() -> None:
        stack.kill_container(stack.operator_pod())

    # Its data lies in an object store and its results go to a registry, so that there is a fetch and a publication to be
    # disturbed.
    secret = stack.upload("records", stack.claim("data"))
    data = yaml.safe_load((ROOT / EXAMPLE).read_text())["spec"]["data"]
    data |= {"source": "s3://records/train.jsonl", "validation": {"source": "s3://records/validation.jsonl"}}
    output = {"destination": f"oci://{registry.host}/{REPOSITORY}:v1", "secretRef": {"name": LOGIN_SECRET}}
    keep_login(stack, replace(registry, login=("publisher", "not-the-password")))
    # What a pod waits for stands still until the pod was looked at: it would end too soon.
    waited_for = {Role.FETCH: stack.s3.server, Role.PUBLISH: registry.server}
    for server in waited_for.values():
        server.pause()
    try:
        name = stack.apply_example(
            EXAMPLE,
            NOT_REHEARSED | {"data": data, "fetch": {"s3SecretRef": {"name": secret}}, "profile": PROFILE, "output": output},
            name="killed-operator",
        )
        for role in Role:
            stack.wait(lambda role=role: stack.batch_jobs(name, role), f"the {role} Job")
            if role in waited_for:
                reached[role] = surroundings.from_role(name, role)
                waited_for[role].resume()
            kill_operator()
            if role is Role.TRAIN:
                kill_a_rank(stack, name)
    finally:
        for server in waited_for.values():
            server.resume()
    assert reached == {Role.FETCH: WAYS_OUT, Role.PUBLISH: WAYS_OUT}
    # A wrong password costs a look at the Secret, not the results.
    job = stack.wait_for_condition(name, "Finished", "Stalled")
    assert condition_of(job, "Published").get("reason") == "PublishRefused", json.dumps(job["status"], indent=2)
    assert job["status"]["phase"] == "Stalled"
    with pytest.raises(NotThereError):
        registry.digest(REPOSITORY, "v1")
    keep_login(stack, registry)
    stack.cluster.kubectl(
        *("patch", "finetunejob", name, "--namespace", NAMESPACE, "--type", "merge", "--patch", '{"spec": {"run": {"retry": 1}}}')
    )
    job = stack.wait_for_condition(name, "Finished")
    assert condition_of(job, "Succeeded").get("status") == "True", json.dumps(job["status"], indent=2)
    names = {one["metadata"]["name"] for one in stack.batch_jobs(name)}
    assert names == {f"{name}-{end}" for end in ("fetch-0", "preflight-0", "train-1", "merge-0", "publish-1")}
    attempts = [attempt for attempt in job["status"]["attempts"] if attempt["role"] == Role.TRAIN]
    assert [attempt["outcome"] for attempt in attempts] == ["Failed", "Succeeded"]
    assert attempts[0]["evidence"][0]["node"]
    # It went on from its checkpoint: the steps of the history are in order, and not all of them ran twice.
    history = stack.workspace(name) / "history.jsonl"
    steps = [line["step"] for line in map(json.loads, history.read_text().splitlines()) if "loss" in line]
    assert steps.count(1) == 1

    pulled = registry.pull(REPOSITORY, "v1")
    digest = registry.digest(REPOSITORY, "v1")
    assert job["status"]["artifacts"] == [
        {"name": "published", "path": f"{output['destination']}@{digest}", "sha256": digest.removeprefix("sha256:")}
    ]
    assert pulled["adapter/adapter_model.safetensors"] == adapter_bytes(stack, "undisturbed")
    merged = stack.claim("models-out") / "undisturbed/merged"
    weights = sorted(path.name for path in merged.glob("*.safetensors"))
    assert weights
    assert [one for one in weights if pulled[one] != (merged / one).read_bytes()] == []
    assert {"README.md", "report.html", "config.json", "provenance.json", "verification.json", "SHA256SUMS"} <= set(pulled)
    for line in pulled["SHA256SUMS"].decode().splitlines():
        sha256, _, file = line.partition("  ")
        assert hashlib.sha256(pulled[file]).hexdigest() == sha256
    assert_no_trace_of_credentials(stack, name)


def kill_a_rank(stack: Stack, name: str) -> None:
    """Kill the second pod's container once there is a checkpoint."""
    stack.wait(
        lambda: (stack.job(name).get("status", {}).get("progress") or {}).get("checkpointStep"), f"the first checkpoint of {name}"
    )
    victim = next(pod for pod in stack.pods(name, Role.TRAIN) if pod["metadata"]["name"].startswith(f"{name}-train-0-1"))
    stack.kill_container(victim)


def assert_no_trace_of_credentials(stack: Stack, name: str) -> None:
    """In no object but the Secrets, in no log, in no file of the job's, and so in no process list, which shows pods'
    arguments."""
    system = ("--namespace", SYSTEM_NAMESPACE, "--selector", "app.kubernetes.io/name=finetune-operator", "--tail=-1")
    texts = {
        "objects": stack.cluster.kubectl(
            "get", "finetunejobs,finetuneprofiles,jobs,pods,configmaps,events", "--namespace", NAMESPACE, "--output", "yaml"
        ),
        "operator": stack.cluster.kubectl("logs", *system),
    }
    for role in Role:
        for pod in stack.pods(name, role):
            texts[pod["metadata"]["name"]] = stack.cluster.kubectl("logs", pod["metadata"]["name"], "--namespace", NAMESPACE)
    for path in stack.workspace(name).rglob("*"):
        if path.is_file() and path.suffix in (".json", ".jsonl", ".log", ".txt", ".md"):
            texts[str(path)] = path.read_text(errors="replace")
    assert any("publish-1" in place for place in texts), "the publish pod's log was read"
    login = base64.b64encode(f"publisher:{PASSWORD}".encode()).decode()
    secrets = (PASSWORD, login, S3_SECRET_KEY, "not-the-password")
    assert [(place, secret) for place, text in texts.items() for secret in secrets if secret in text] == []
