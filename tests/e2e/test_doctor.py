"""`finetune doctor` on real nodes: one whose network enforces policies, and one whose does not."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.documented import doctor_roles
from tests.support.installed_chart import as_account
from tools.stack import NAMESPACE, RELEASE, SYSTEM_NAMESPACE, Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
USER_ROLE = f"{RELEASE}-finetune-operator-{SYSTEM_NAMESPACE}-user"
COMMAND = (str(Path(sys.executable).with_name("finetune")), "doctor", "--namespace", NAMESPACE, "--output", "json")


@pytest.fixture(scope="module")
def environment(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of somebody who has the documented rights, those to make jobs, and no others."""
    cluster_role, role = doctor_roles(NAMESPACE)
    account = ("--serviceaccount", f"{NAMESPACE}:doctor")
    stack.apply(cluster_role, role)
    stack.cluster.kubectl("create", "serviceaccount", "doctor", "--namespace", NAMESPACE)
    stack.cluster.kubectl("create", "clusterrolebinding", "doctor", "--clusterrole", cluster_role["metadata"]["name"], *account)
    for name, reference in (("doctor", f"--role={role['metadata']['name']}"), ("doctor-user", f"--clusterrole={USER_ROLE}")):
        stack.cluster.kubectl("create", "rolebinding", name, reference, "--namespace", NAMESPACE, *account)
    kubeconfig = as_account(stack.cluster, "doctor", NAMESPACE, tmp_path_factory.mktemp("doctor"))
    return stack.cluster.environment | {"KUBECONFIG": str(kubeconfig)}


def diagnosis(environment: dict[str, str]) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(COMMAND, env=environment, capture_output=True, text=True, check=False)
    # A sign of life comes every half minute on a slow machine.
    assert [line for line in done.stderr.splitlines() if not line.startswith("still looking at the cluster")] == []
    checks = json.loads(done.stdout)["checks"]
    return done.returncode, {check["id"]: (check["outcome"], check["message"]) for check in checks}


def left(stack: Stack) -> list[dict[str, Any]]:
    """What is there of a probe."""
    found = [*stack.objects("pods"), *stack.objects("networkpolicies")]
    return [one for one in found if one["metadata"]["name"].startswith("finetune-doctor-")]


def test_a_cluster_with_everything_is_healthy(stack: Stack, environment: dict[str, str]) -> None:
    code, checks = diagnosis(environment)
    expected = "kubernetes-version definitions operator profile permission storage-class network-policies node-isolation dns"
    assert {name: outcome for name, (outcome, _) in checks.items()} == dict.fromkeys(expected.split(), "passed"), checks
    assert code == 0
    assert left(stack) == []


@pytest.mark.nightly
def test_a_network_without_enforcement_is_found_out(stack: Stack, environment: dict[str, str]) -> None:
    with stack.without_enforcement():
        code, checks = diagnosis(environment)
    assert [name for name, (outcome, _) in checks.items() if outcome != "passed"] == ["network-policies"]
    assert "does not enforce NetworkPolicies" in checks["network-policies"][1]
    assert code == 1
    assert left(stack) == []


@pytest.mark.nightly
def test_an_interrupted_probe_leaves_nothing(stack: Stack, environment: dict[str, str]) -> None:
    with subprocess.Popen(COMMAND, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        stack.wait(lambda: left(stack), "the probe's first pod", 60)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert left(stack) == []
