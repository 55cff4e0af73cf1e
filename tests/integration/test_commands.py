"""The commands that look at jobs, against a real API server, with the least rights that docs/reference/rights.md names."""

import copy
import itertools
import json
import shlex
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import yaml

from finetune_cli.cluster.errors import Right
from finetune_job.plan.digest import canonical_json
from tests.integration.command_rights import COMMANDS, EVENTS, JOB, PODS, PROFILE, CommandRights
from tests.integration.conftest import Installed
from tests.integration.kube import Document
from tests.integration.workload import Workload
from tests.support.builders import a_job
from tests.support.forked_program import run_forked
from tests.unit.finetune_cli.jobs import objects
from tools.cluster.errors import wait_until

pytestmark = pytest.mark.integration
_numbers = itertools.count()
STATES = {each["metadata"]["name"]: each for each in (objects.SUCCEEDED, objects.RUNNING, objects.FAILED, objects.STALLED)}


@dataclass
class Caller:
    """Calls commands with the rights of one ServiceAccount."""

    installed: Installed
    workload: Workload
    directory: Path

    def users(self, sets: Sequence[tuple[Right, ...]]) -> dict[tuple[Right, ...], Path]:
        """Kubeconfigs of users with these rights alone, each right in a Role of its own that all who have it are bound to."""
        kube, namespace = self.workload.kube, self.workload.namespace
        names = {rights: f"user-{next(_numbers)}" for rights in sets}
        kubeconfigs = {rights: self._kubeconfig(name) for rights, name in names.items()}
        for right in {right for rights in sets for right in rights}:
            kind, place = ("ClusterRole", "") if right.resource == "finetuneprofiles" else ("Role", namespace)
            role = f"right-{next(_numbers)}" + ("" if place else f"-of-{namespace}")
            rules = [{"apiGroups": [right.group], "resources": [right.resource], "verbs": [right.verb]}]
            kube.create(kind, place, {"metadata": {"name": role}, "rules": rules})
            having = [name for rights, name in names.items() if right in rights]
            binding = {
                "metadata": {"name": role},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role},
                "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace} for name in having],
            }
            kube.create(f"{kind}Binding", place, binding)
            user = f"system:serviceaccount:{namespace}:{having[-1]}"
            wait_until(partial(self._is_allowed, user, right), f"the right to {right}", 60)
        return kubeconfigs

    def _kubeconfig(self, name: str) -> Path:
        kube, namespace = self.workload.kube, self.workload.namespace
        kube.create("ServiceAccount", namespace, {"metadata": {"name": name}})
        asked = {"spec": {"audiences": [], "expirationSeconds": 3600}}
        token = kube.request("POST", kube.path("ServiceAccount", namespace, name, "token"), asked)["status"]["token"]
        config = yaml.safe_load(self.installed.cluster.kubeconfig.read_text())
        config["users"] = [{"name": config["users"][0]["name"], "user": {"token": token}}]
        config["contexts"][0]["context"]["namespace"] = namespace
        kubeconfig = self.directory / f"kubeconfig-{name}"
        kubeconfig.write_text(json.dumps(config))
        return kubeconfig

    def with_rights(self, rights: tuple[Right, ...]) -> Callable[[str], subprocess.CompletedProcess[str]]:
        """A user with these rights alone."""
        (kubeconfig,) = self.users([rights]).values()

        def call(line: str) -> subprocess.CompletedProcess[str]:
            return run_forked("finetune_cli", *shlex.split(line), directory=self.directory, KUBECONFIG=str(kubeconfig))

        return call

    def _is_allowed(self, user: str, right: Right) -> bool:
        resource, _, sub = right.resource.partition("/")
        place = "" if resource == "finetuneprofiles" else self.workload.namespace
        asked = {"namespace": place, "group": right.group, "resource": resource, "subresource": sub, "verb": right.verb}
        spec = {"user": user, "groups": ["system:serviceaccounts", "system:authenticated"], "resourceAttributes": asked}
        answer = self.workload.kube.create("SubjectAccessReview", "", {"spec": spec})
        return answer["status"]["allowed"] is True


@pytest.fixture
def caller(installed: Installed, workload: Workload, tmp_path: Path) -> Caller:
    """Five jobs in their states, the last one as nobody has looked at it yet, and a pod of the running one."""
    for name, document in {**STATES, "new": objects.NEW}.items():
        spec = copy.deepcopy(document["spec"])
        created = workload.kube.create("FineTuneJob", workload.namespace, {**_head(name), "spec": spec})
        if "status" in document:
            workload.kube.patch("FineTuneJob", workload.namespace, name, {"status": document["status"]}, "status")
        if name == "running":
            pod = objects.pod(document, "train", 1, 0)
            labels = pod["metadata"]["labels"] | {"finetune.dev/job-uid": created["metadata"]["uid"]}
            spec = {
                "containers": [{"name": "trainer", "image": "registry.test/none:1", "env": [{"name": "T", "value": "hunter2"}]}]
            }
            workload.kube.create(
                "Pod", workload.namespace, {"metadata": {"name": "running-train-1-0", "labels": labels}, "spec": spec}
            )
    return Caller(installed, workload, tmp_path)


def _head(name: str) -> Document:
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": name, "labels": {"finetune.dev/team": "vision"}},
    }


def rights_of(command: str) -> CommandRights:
    return next(each for each in COMMANDS if each.command == command)


def test_a_diagnosis_says_what_it_could_not_see(caller: Caller) -> None:
    few, all_rights = caller.with_rights((JOB,)), caller.with_rights((JOB, PODS, EVENTS, PROFILE))
    done = few("explain job/stalled -o json")
    assert [each.partition(":")[0] for each in json.loads(done.stdout)["unseen"]] == ["its pods", "its events", "its profile"]
    found = json.loads(all_rights("explain job/stalled -o json").stdout)
    assert (found["unseen"], found["patch"]) == ([], {"spec": {"data": {"format": "Text"}}})
    patched = caller.workload.kube.patch("FineTuneJob", caller.workload.namespace, "stalled", found["patch"])
    assert patched["spec"]["data"]["format"] == "Text"
    failed = json.loads(all_rights("explain job/failed -o json").stdout)
    assert (failed["word"], failed["patch"]) == ("DeviceOutOfMemory", {"spec": {"training": {"microBatchSize": 2}}})


def test_the_pod_that_reads_a_workspace_is_admitted_and_deleted(caller: Caller) -> None:
    kube, namespace = caller.workload.kube, caller.workload.namespace
    kube.patch("Namespace", "", namespace, {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}})
    plan = {"metadata": {"name": "succeeded-plan"}, "data": {"plan.json": canonical_json(a_job().plan())}}
    kube.create("ConfigMap", namespace, plan)
    user = caller.with_rights(rights_of("status JOB --curve --checkpoints").needed)
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(user, "status succeeded --checkpoints")
        made = wait_until(lambda: kube.list("Pod", namespace, "finetune.dev/reader"), "the pod that reads", 60)
        # Nothing runs pods here, so this kubelet reports what one would of a claim that cannot be mounted.
        name = made[0]["metadata"]["name"]
        kube.patch("Pod", namespace, name, {"status": {"phase": "Failed", "message": "the claim is gone"}}, "status")
        done = answer.result()
    assert made[0]["metadata"]["ownerReferences"][0]["name"] == "succeeded"
    assert done.returncode == 3
    assert f"the pod {name}, which was to read the claim, did not do so (the claim is gone)" in done.stderr
    wait_until(lambda: not kube.list("Pod", namespace, "finetune.dev/reader"), "its deletion", 60)
