"""What each command prints of each kind of job on a real API server: what tests against one in memory have by hand in golden/.

Uids and the namespace are put back to those of the golden files. Manifests have the defaults of the schema in addition.
"""

import re
import shlex
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from finetune_cli.app import app
from tests.integration.conftest import Installed
from tests.integration.played_pods import played_pods
from tests.integration.workload import Workload
from tests.unit.finetune_cli.commands.test_cluster_jobs import GOLDEN, session
from tests.unit.finetune_cli.jobs import objects
from tests.unit.finetune_cli.manifests import ACCEPTED

pytestmark = pytest.mark.integration
LOGS = {f"running-train-1-{index}": f"[rank {4 * index}] loss 1.25\x1b[2J\n[rank {4 * index + 1}] ready\n" for index in (0, 1)}
LOGS["failed-train-0-1"] = "[rank 4] CUDA out of memory\n[rank 5] hf_abcdefghijklmnopqrstuv\n"
NOT_COMPARED = {("missing", "submit job.yaml")}
"""Its answer is about the cluster's profile, which is another one than in memory; test_change_commands.py has it."""


def store(workload: Workload, document: dict[str, Any], *pods: dict[str, Any]) -> str:
    """The job with its status, and its pods; its uid."""
    kube, namespace, name = workload.kube, workload.namespace, document["metadata"]["name"]
    head = {"metadata": {"name": name, "labels": document["metadata"]["labels"]}}
    kinds = {"apiVersion": document["apiVersion"], "kind": document["kind"]}
    made = kube.create("FineTuneJob", namespace, {**kinds, **head, "spec": document["spec"]})
    if "status" in document:
        kube.patch("FineTuneJob", namespace, name, {"status": document["status"]}, "status")
    for pod in pods:
        labels = pod["metadata"]["labels"] | {"finetune.dev/job-uid": made["metadata"]["uid"]}
        # Nobody is to say that it cannot be scheduled.
        spec = {
            "schedulerName": "none",
            "containers": [{"image": "registry.test/none:1", **each} for each in pod["spec"]["containers"]],
        }
        kube.create("Pod", namespace, {"metadata": {"name": pod["metadata"]["name"], "labels": labels}, "spec": spec})
        states = [{"image": "", "imageID": "", "ready": False, **each} for each in pod["status"]["containerStatuses"]]
        status = {"phase": pod["status"]["phase"], "containerStatuses": states}
        kube.patch("Pod", namespace, pod["metadata"]["name"], {"status": status}, "status")
    return str(made["metadata"]["uid"])


@pytest.fixture
def uids(installed: Installed, workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The jobs and their pods as the tests in memory have them; uid in the cluster -> uid there."""
    ended = {"terminated": {"exitCode": 44, "reason": "Error"}}
    pods = {
        "running": [objects.pod(objects.RUNNING, "train", 1, index) for index in (0, 1)],
        "failed": [objects.pod(objects.FAILED, "train", 0, 1, "Failed", **ended)],
    }
    pods["waiting"] = [objects.pod(objects.WAITING, "train", 0, 0, "Pending", waiting={"reason": "ContainerCreating"})]
    found = {}
    hostile = {key: value for key, value in objects.HOSTILE.items() if key != "status"}  # which this server does not take
    for document in (*objects.ALL, hostile):
        name = document["metadata"]["name"]
        found[store(workload, document, *pods.get(name, []))] = document["metadata"]["uid"]
    pod = workload.kube.get("Pod", workload.namespace, "waiting-train-0-0")
    assert pod is not None
    involved = {"kind": "Pod", **{key: pod["metadata"][key] for key in ("name", "namespace", "uid")}}
    event = {
        "metadata": {"name": "event"},
        "type": "Warning",
        "reason": "FailedScheduling",
        "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
        "count": 12,
        "lastTimestamp": "2026-03-01T11:58:00Z",
        "involvedObject": involved,
    }
    workload.kube.create("Event", workload.namespace, event)
    for module in ("inspect_jobs", "diagnose_job"):
        monkeypatch.setattr(f"finetune_cli.commands.{module}.utc_now", lambda: objects.NOW)
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(installed.cluster.kubeconfig))
    monkeypatch.chdir(tmp_path)
    with played_pods(workload.kube, workload.namespace, tmp_path, monkeypatch, LOGS):
        yield found


def answers(text: str) -> dict[str, str]:
    """What was printed, by command."""
    return dict(part.split("\n", 1) for part in f"\n{text}".split("\n$ finetune ")[1:])


def within(found: Any, expected: Any) -> Any:
    """What was found, without fields that are not expected."""
    if isinstance(found, dict) and isinstance(expected, dict):
        return {key: within(value, expected[key]) for key, value in found.items() if key in expected}
    return found


def parted(text: str) -> tuple[list[str], Any]:
    """The lines around a manifest or an answer for programs, and what it holds."""
    lines = text.splitlines()
    first = next((place for place, line in enumerate(lines) if line == "{" or line.startswith("apiVersion:")), len(lines))
    document = list(takewhile(re.compile(r" |[{}]|(apiVersion|kind|metadata|spec):").match, lines[first:]))
    return lines[:first] + lines[first + len(document) :], yaml.safe_load("\n".join(document))


def is_same(line: str, found: str, expected: str) -> bool:
    if line.startswith("fork ") or line.endswith("-o json"):
        (around, document), (known_around, known) = parted(found), parted(expected)
        return (around, within(document, known)) == (known_around, known)
    # Commands name the namespace, and lines break elsewhere after a longer name.
    return found.split() == expected.split()


def test_what_is_printed_is_what_the_tests_in_memory_have(workload: Workload, uids: dict[str, str], tmp_path: Path) -> None:
    def run(line: str) -> Any:
        return CliRunner().invoke(app, [*shlex.split(line), "-n", workload.namespace])

    differences = []
    # The first has to see all jobs, the last is what others are compared with.
    for name in ("missing", "running", "failed", "stalled", "waiting", "new", "succeeded"):
        (tmp_path / "job.yaml").write_text(ACCEPTED.replace("name: tuned", f"name: {name}"))
        golden = answers((GOLDEN / f"{name}.txt").read_text())
        found = session(run, list(golden))
        for uid, there in uids.items():
            found = found.replace(uid, there).replace(uid[:8], there)
        for line, said in answers(found.replace(workload.namespace, "team")).items():
            if (name, line) not in NOT_COMPARED and not is_same(line, said, golden[line]):
                differences.append(f"$ finetune {line}\n{said}")
    assert differences == [], "\n".join(differences)
