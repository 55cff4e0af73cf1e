"""From `kubectl apply` to a merged and verified model on a real node, undisturbed and disturbed."""

import json
import subprocess
import sys
from typing import Any

import pytest
import yaml

from finetune_job.names import Role
from tests.support.stack import NAMESPACE, ROOT, SYSTEM_NAMESPACE, USER_ID, Stack, condition_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]
EXAMPLE = "examples/quickstart-cluster.yaml"


def adapter_bytes(stack: Stack, name: str) -> bytes:
    return (stack.claim("models-out") / name / "adapter" / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> dict[str, Any]:
    """A job of 2 pods x 2 ranks that nobody touched, looked at while it trained."""
    name = stack.apply_example(EXAMPLE, name="undisturbed")
    stack.wait_for_step(name, 1)
    pods = stack.pods(name, Role.TRAIN)
    table = stack.cluster.kubectl("get", "ftj", name, "--namespace", NAMESPACE)
    job = stack.wait_for_condition(name, "Finished", "Stalled")
    return {"job": job, "training_pods": pods, "table": table}


def test_it_succeeds_with_a_verified_merged_model(stack: Stack, undisturbed: dict[str, Any]) -> None:
    job = undisturbed["job"]
    assert condition_of(job, "Succeeded").get("status") == "True", json.dumps(job["status"], indent=2)
    assert job["status"]["phase"] == "Succeeded"
    progress = job["status"]["progress"]
    assert progress["step"] == progress["totalSteps"] > 0
    assert float(progress["evalLoss"]) < 0.9 * float(progress["initialEvalLoss"])
    output = stack.claim("models-out") / "undisturbed"
    assert json.loads((output / "verification.json").read_text())["passed"] is True
    subprocess.run([sys.executable, "-m", "tests.support.plain_load", output / "merged"], cwd=ROOT, check=True, timeout=300)


def test_each_stage_ran_once(stack: Stack, undisturbed: dict[str, Any]) -> None:
    names = sorted(job["metadata"]["name"] for job in stack.batch_jobs("undisturbed"))
    assert names == ["undisturbed-merge-0", "undisturbed-preflight-0", "undisturbed-train-0"]
    assert undisturbed["job"]["status"]["restarts"] == {"counted": 0, "uncounted": 0}


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


def test_a_killed_rank_restarts_the_gang_once_and_changes_no_byte(stack: Stack, undisturbed: dict[str, Any]) -> None:
    name = stack.apply_example(EXAMPLE, name="killed-rank")
    stack.wait(
        lambda: (stack.job(name).get("status", {}).get("progress") or {}).get("checkpointStep"),
        "the first checkpoint of killed-rank",
    )
    victim = next(pod for pod in stack.pods(name, Role.TRAIN) if pod["metadata"]["name"].startswith(f"{name}-train-0-1"))
    stack.kill_container(victim)
    job = stack.wait_for_condition(name, "Finished", "Stalled")
    assert condition_of(job, "Succeeded").get("status") == "True", json.dumps(job["status"], indent=2)
    assert job["status"]["attempt"] == 1
    assert [attempt["outcome"] for attempt in job["status"]["attempts"]] == ["Failed", "Succeeded"]
    assert job["status"]["attempts"][0]["evidence"]
    assert sum(job["status"]["restarts"].values()) == 1
    # It went on from its checkpoint: the steps of the history are in order, and not all of them ran twice.
    history = stack.workspace(name) / "history.jsonl"
    steps = [line["step"] for line in map(json.loads, history.read_text().splitlines()) if "loss" in line]
    assert steps.count(1) == 1
    assert adapter_bytes(stack, name) == adapter_bytes(stack, "undisturbed")


def test_an_operator_killed_in_every_stage_starts_nothing_twice(stack: Stack, undisturbed: dict[str, Any]) -> None:
    def kill_operator() -> None:
        (pod,) = [
            one
            for one in stack.objects("pods", "app.kubernetes.io/name=finetune-operator", SYSTEM_NAMESPACE)
            if one["status"].get("containerStatuses", [{}])[0].get("state", {}).get("running")
        ]
        stack.kill_container(pod)

    # Its data lies in an object store, so that there is a fetch to be disturbed, too.
    secret = stack.upload("records", stack.claim("data"))
    data = yaml.safe_load((ROOT / EXAMPLE).read_text())["spec"]["data"]
    data |= {"source": "s3://records/train.jsonl", "validation": {"source": "s3://records/validation.jsonl"}}
    name = stack.apply_example(EXAMPLE, {"data": data, "fetch": {"s3SecretRef": {"name": secret}}}, name="killed-operator")
    for role in Role:
        stack.wait(lambda role=role: stack.batch_jobs(name, role), f"the {role} Job")
        kill_operator()
    job = stack.wait_for_condition(name, "Finished", "Stalled")
    assert condition_of(job, "Succeeded").get("status") == "True", json.dumps(job["status"], indent=2)
    names = sorted(one["metadata"]["name"] for one in stack.batch_jobs(name))
    assert names == sorted(f"{name}-{role}-0" for role in Role)
    assert adapter_bytes(stack, name) == adapter_bytes(stack, "undisturbed")
