"""docs/tutorial/getting-started.md on a cluster, block by block, against a real API server with the chart and the operator.

There are no nodes: the test plays the kubelets, and a stand-in for `kubectl cp` keeps what is copied where: it has to be what
the manifest reads. All else is `kubectl` itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from finetune_job.names import Role
from tests.integration.conftest import Installed, OperatorFactory
from tests.integration.workload import Workload
from tests.support.documented import ROOT, Reader, blocks_of
from tools.cluster.errors import wait_until

pytestmark = pytest.mark.integration
PAGE = ROOT / "docs/tutorial/getting-started.md"
NAMESPACE, NAME = "support", "support-bot"
KUBECTL = """#!/bin/sh
case "$1" in
  cp) echo "$@" >> {kept}; exec {kubectl} get --output jsonpath='{{.metadata.name}}' "$2" "$3" "pod/${{5%%:*}}";;
  *) exec {kubectl} "$@";;
esac
"""
"""`kubectl cp` needs a node: it only asks whether the pod is there."""


@pytest.fixture
def namespace(installed: Installed) -> Iterator[Workload]:
    yield Workload(installed.kube, NAMESPACE)
    installed.kube.delete("Namespace", "", NAMESPACE)


def test_the_manifest_of_the_page_ends_as_a_served_adapter(
    installed: Installed, namespace: Workload, operator: OperatorFactory, tmp_path: Path
) -> None:
    kept = tmp_path / "copied"
    program = tmp_path / "kubectl"
    program.write_text(KUBECTL.format(kept=kept, kubectl=installed.cluster.kubectl_command))
    program.chmod(0o755)
    environment = {**installed.cluster.environment, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": "/home/reader"}
    reader = Reader(tmp_path, environment)
    (manifest,) = blocks_of(PAGE, section="The manifest")
    claims, copies, submitted, ended, served = blocks_of(PAGE, section="On a cluster")
    reader.run(PAGE, manifest)
    reader.run(PAGE, claims)
    (pod,) = [pod for pod in installed.kube.list("Pod", NAMESPACE) if pod["metadata"]["name"] == "copy"]
    namespace.set_running(pod)
    reader.run(PAGE, copies)
    job = yaml.safe_load((tmp_path / "job.yaml").read_text())["spec"]
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["spec"]["containers"][0]["volumeMounts"]}
    claim_of = {volume["name"]: volume.get("persistentVolumeClaim", {}).get("claimName") for volume in pod["spec"]["volumes"]}
    targets = re.findall(r"copy:(\S+)", kept.read_text())
    copied = [f"pvc://{claim_of[mounts['/'.join(target.split('/')[:3])]]}/{target.split('/', 3)[3]}" for target in targets]
    assert copied == [job["model"]["source"], job["data"]["source"]]
    assert installed.kube.get("Pod", NAMESPACE, "copy") is None or "deletionTimestamp" in pod["metadata"]

    operator("getting-started", everywhere=True)
    reader.run(PAGE, submitted)
    for role in (Role.PREFLIGHT, Role.TRAIN, Role.MERGE):
        namespace.succeed(role, name=NAME)
    namespace.wait_for("Finished", name=NAME)
    assert "Succeeded" in reader.run(PAGE, ended)
    reader.run(PAGE, served)
    deployment = wait_until(lambda: installed.kube.get("Deployment", NAMESPACE, NAME), "the server's Deployment", 60)
    spec = deployment["spec"]["template"]["spec"]
    (server,) = spec["containers"]
    mounted = {mount["mountPath"]: mount["name"] for mount in server["volumeMounts"]}
    claims_of_server = {volume["name"]: volume["persistentVolumeClaim"]["claimName"] for volume in spec["volumes"]}

    def on_claim(path: str) -> str:
        place = next(place for place in mounted if path.startswith(f"{place}/"))
        return f"pvc://{claims_of_server[mounted[place]]}{path.removeprefix(place)}"

    model, *named = server["args"]
    options = dict(argument.partition("=")[::2] for argument in named)
    assert on_claim(model) == job["model"]["source"]
    name, _, adapter = options["--lora-modules"].partition("=")
    assert (name, on_claim(adapter)) == (NAME, f"{job['output']['destination']}/adapter")
    assert "--enable-lora" in options
