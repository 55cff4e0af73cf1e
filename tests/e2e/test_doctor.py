"""`finetune doctor` on real nodes: one whose network enforces policies, and one whose does not."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.stack import NAMESPACE, Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
COMMAND = (str(Path(sys.executable).with_name("finetune")), "doctor", "--namespace", NAMESPACE, "--output", "json")


def diagnosis(stack: Stack) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(COMMAND, env=stack.cluster.environment, capture_output=True, text=True, check=False)
    # A sign of life comes every half minute on a slow machine.
    assert [line for line in done.stderr.splitlines() if not line.startswith("still looking at the cluster")] == []
    checks = json.loads(done.stdout)["checks"]
    return done.returncode, {check["id"]: (check["outcome"], check["message"]) for check in checks}


def left(stack: Stack) -> list[dict[str, Any]]:
    """What is there of a probe."""
    found = [*stack.objects("pods"), *stack.objects("networkpolicies")]
    return [one for one in found if one["metadata"]["name"].startswith("finetune-doctor-")]


def test_a_cluster_with_everything_is_healthy(stack: Stack) -> None:
    code, checks = diagnosis(stack)
    assert {name: outcome for name, (outcome, _) in checks.items()} == dict.fromkeys(
        (
            "kubernetes-version",
            "definitions",
            "operator",
            "profile",
            "permission",
            "storage-class",
            "network-policies",
            "node-isolation",
            "dns",
        ),
        "passed",
    ), checks
    assert code == 0
    assert left(stack) == []


def test_a_network_without_enforcement_is_found_out(stack: Stack) -> None:
    with stack.without_enforcement():
        code, checks = diagnosis(stack)
    assert [name for name, (outcome, _) in checks.items() if outcome != "passed"] == ["network-policies"]
    assert "does not enforce NetworkPolicies" in checks["network-policies"][1]
    assert code == 1
    assert left(stack) == []


def test_an_interrupted_probe_leaves_nothing(stack: Stack) -> None:
    with subprocess.Popen(COMMAND, env=stack.cluster.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        stack.wait(lambda: left(stack), "the probe's first pod", 60)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert left(stack) == []
