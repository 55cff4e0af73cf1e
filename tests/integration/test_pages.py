"""The pages for platform teams: every command runs as written, and the cluster is then as the page says.

A control plane of its own, because the pages install and uninstall. It has no nodes: no Deployment runs here, so `helm` is told
to ask for no replica, and a test that needs the operator starts it with the rights of the release.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_job.names import Role
from tests.integration.kube import Kube, RefusedError
from tests.integration.monitoring_definitions import definitions
from tests.integration.operator_process import ForkedOperator, OperatorProcess
from tests.integration.workload import Workload
from tests.support.documented import ROOT, Reader, as_written, blocks_of
from tests.support.existing_cluster import EXISTING_VARIABLE, existing_kubeconfig
from tests.support.installed_chart import InstalledChart
from tools.cluster.control_plane import ControlPlane
from tools.cluster.errors import wait_until
from tools.cluster.requirements import install_packages

pytestmark = [pytest.mark.integration, pytest.mark.nightly]
PAGES = ROOT / "docs" / "how-to" / "platform"
OF_32 = {"maxSteps": 4, "globalBatchSize": 32}
SYSTEM, NAME = "finetune-system", "finetune-finetune-operator"
"""As the pages call the namespace, and the chart the objects of the release `finetune` in it."""
ELSEWHERE = ("helm test ", "helm rollback finetune 1")
"""Commands that need a running pod or an older release: test_chart.py and test_upgrade.py run them."""
FIRST_JOB = ROOT / "docs" / "tutorial" / "first-job-on-a-cluster.md"
WITH_YAML = ("tutorial/getting-started", "reference/network", "how-to/placement")
CHART_VALUES = yaml.safe_load((ROOT / "charts/finetune-operator/values.yaml").read_text()).keys()
WITHOUT_NODES = """#!/bin/sh
case "$1" in install|upgrade) exec {helm} "$@" --set replicas=0;; esac
exec {helm} "$@"
"""


class Platform:
    """A platform team's terminal, and what it works on."""

    def __init__(self, cluster: ControlPlane, directory: Path) -> None:
        self.cluster = cluster
        self.directory = directory
        self.kube = Kube(cluster.kubeconfig)
        self._program("kubectl", f'#!/bin/sh\nexec {cluster.binaries.kube} kubectl "$@"\n')
        self._program("helm", WITHOUT_NODES.format(helm=cluster.binaries.helm))
        checkout = directory / "checkout"
        checkout.mkdir()
        for name in ("charts", "examples"):
            (checkout / name).symlink_to(ROOT / name)
        environment = {**cluster.environment, "PATH": f"{directory}:{os.environ['PATH']}"}
        self._reader = Reader(checkout, environment, played=("helm",))

    def _program(self, name: str, text: str) -> None:
        (self.directory / name).write_text(text)
        (self.directory / name).chmod(0o755)

    def follow(self, name: str, *, only: slice = slice(None)) -> str:
        """Run the commands of a page, or of some of its blocks; what they printed."""
        page = PAGES / f"{name}.md"
        found = [block for block in blocks_of(page)[only] if not any(words in block.text for words in ELSEWHERE)]
        assert found, f"{page} has no commands"
        printed = ""
        for block in found:
            printed += self._reader.run(page, block)
            if re.search(f"helm (install|upgrade) finetune .*--namespace {SYSTEM}", block.text):
                self._play_deployment()
        return printed

    def _play_deployment(self) -> None:
        """What the Deployment's pod would do first: bring the profiles."""
        chart = self.release()
        if chart.has_profiles():
            brought = chart.bring_profiles()
            assert brought.returncode == 0, brought.stdout + brought.stderr

    def release(self) -> InstalledChart:
        """The release, with the rights of its ServiceAccount."""
        wait_until(lambda: self.kube.get("ServiceAccount", SYSTEM, NAME), "the chart's ServiceAccount", 60)
        token = self.cluster.kubectl("create", "token", NAME, "--namespace", SYSTEM, "--duration", "1h").strip()
        return InstalledChart(self.cluster, self.kube, token, self.directory, NAME, SYSTEM)

    def operator(self, name: str) -> OperatorProcess:
        """The operator, which is not started yet."""
        lease = (f"--lease-namespace={SYSTEM}", f"--lease-name={NAME}", f"--identity={name}")
        self.kube.delete("Lease", SYSTEM, NAME)
        return ForkedOperator(self.release().kubeconfig(), self.directory / f"operator-{name}.log", *lease)

    def team(self, namespace: str) -> Workload:
        """A namespace, with its claims."""
        if self.kube.get("Namespace", "", namespace) is None:
            self.kube.create("Namespace", "", {"metadata": {"name": namespace}})
        wait_until(lambda: self.kube.get("ServiceAccount", namespace, "default"), "the default ServiceAccount", 60)
        workload = Workload(self.kube, namespace)
        for name in ("models", "data", "results", "workspace"):
            if self.kube.get("PersistentVolumeClaim", namespace, name) is None:
                workload.make_claims(name)
        return workload


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[ControlPlane]:
    if existing_kubeconfig() is not None:
        pytest.skip(f"the pages install and uninstall, which the cluster that {EXISTING_VARIABLE} names may not bear")
    if shutil.which("jq") is None:
        install_packages(["jq"])
    with ControlPlane() as own:
        yield own
        own.keep_logs = request.session.testsfailed > 0


@pytest.fixture(scope="module")
def platform(cluster: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Platform:
    """With the release that the page on installation makes."""
    platform = Platform(cluster, tmp_path_factory.mktemp("platform"))
    platform.follow("install", only=slice(1))
    return platform


def test_every_page_is_followed() -> None:
    """A page with commands is named by a test below."""
    pages = {page.stem for page in PAGES.glob("*.md") if blocks_of(page)}
    source = Path(__file__).read_text()
    assert pages == {name for name in pages if f'follow("{name}"' in source}


def test_a_cluster_without_a_way_out(platform: Platform) -> None:
    platform.cluster.helm("uninstall", "finetune", "--namespace", SYSTEM)
    platform.cluster.kubectl("delete", "namespace", SYSTEM)
    printed = platform.follow("air-gapped")
    images = set(re.findall(r"mirror\.example:5000/team/(finetune-[a-z]+):", printed))
    assert images == {"finetune-operator", "finetune-trainer"}
    deployment = platform.kube.get("Deployment", SYSTEM, NAME)
    assert deployment is not None
    pod = deployment["spec"]["template"]["spec"]
    containers = [*pod["initContainers"], *pod["containers"]]
    assert {one["image"].rpartition(":")[0] for one in containers} == {"mirror.example:5000/team/finetune-operator"}
    assert pod["imagePullSecrets"] == [{"name": "mirror"}]
    profile = platform.kube.get("FineTuneProfile", "", "default")
    assert profile is not None
    assert profile["spec"]["trainerImage"].startswith("mirror.example:5000/team/finetune-trainer:")
    assert profile["spec"]["imagePullSecrets"] == [{"name": "mirror"}]
    assert profile["spec"]["fetch"] == {"hubEndpoint": "https://hub.mirror.example", "allowedSources": ["hf://"]}
    assert profile["spec"]["network"]["destinations"] == [{"cidr": "10.20.0.0/24", "ports": [443]}]


def test_a_base_model_that_all_read(platform: Platform) -> None:
    team = platform.team("team-a")
    with platform.operator("base-models"):
        platform.follow("base-models")
        (pod,) = team.wait_for_pods(Role.PREFLIGHT)
    volumes = {one["name"]: one.get("persistentVolumeClaim", {}).get("claimName") for one in pod["spec"]["volumes"]}
    (container,) = pod["spec"]["containers"]
    read_only = {volumes[one["name"]]: one.get("readOnly", False) for one in container["volumeMounts"] if volumes[one["name"]]}
    assert read_only["base-models"] is True
    assert read_only["tune-workspace"] is False


def test_caps(platform: Platform) -> None:
    platform.follow("caps")
    team = platform.team("research")
    bounded = {"run": {"activeDeadlineSeconds": 3600}}
    with platform.operator("caps"):
        team.apply("first", **bounded)
        team.apply("second", **bounded)
        for name in ("first", "second"):
            team.wait_for("Validated", name=name)
        team.apply("third", **bounded)
        team.wait_for("Ready", "False", "WaitingInLine", name="third")
        team.apply("large", **bounded, parallelism={"nodes": 2, "processesPerNode": 16}, training=OF_32)
        team.apply("endless")
        refusals = {name: team.wait_for("Validated", "False", name=name)["message"] for name in ("large", "endless")}
    assert "32" in refusals["large"]
    assert "16" in refusals["large"]
    assert "activeDeadlineSeconds" in refusals["endless"]


def test_the_operator_away(platform: Platform) -> None:
    platform.follow("operator-down")
    team = platform.team("research")
    team.apply("while-away")
    with pytest.raises(RefusedError, match=r"maxSteps|epochs"):
        team.apply("wrong", training={"globalBatchSize": 4})
    assert team.status("while-away") == {}
    with platform.operator("back"):
        team.wait_for("Ready", "False", name="while-away")


def test_storage_that_one_node_mounts(platform: Platform) -> None:
    page = PAGES / "storage.md"
    platform.follow("storage")
    team = Workload(platform.kube, "single")
    job = team.job("one-node")
    assert job["spec"]["workspace"]["volumeClaimTemplate"]["accessMode"] == "ReadWriteOnce"
    refusal = "several nodes share one workspace; set accessMode to ReadWriteMany"
    assert refusal in page.read_text()
    two_nodes = job["spec"] | {"parallelism": {"nodes": 2, "processesPerNode": 8}}
    with pytest.raises(RefusedError, match=refusal):
        team.apply("two-nodes", **two_nodes)


def test_values_and_objects_of_the_pages_are_taken_by_a_cluster(platform: Platform, tmp_path: Path) -> None:
    """Values by helm and, as profiles, by the API server; objects by the API server, in a namespace of their own."""
    if platform.kube.get("Namespace", "", "team-a") is None:
        platform.kube.create("Namespace", "", {"metadata": {"name": "team-a"}})
    # Of the Prometheus operator, which serves a ServiceMonitor.
    platform.cluster.kubectl("apply", "-f", "-", input="\n".join(map(json.dumps, definitions())))
    upgrade = ("upgrade", "finetune", str(ROOT / "charts/finetune-operator"), "--namespace", SYSTEM, "--set", "replicas=0")
    values, objects = 0, 0
    for page in sorted({*PAGES.glob("*.md"), *(ROOT / f"docs/{name}.md" for name in WITH_YAML), FIRST_JOB}):
        for block in blocks_of(page, "yaml"):
            # A digest that is left out in the page has to be one.
            text = as_written(block, {"sha256:...": f"sha256:{'0' * 64}"} if "sha256:..." in block.text else {})
            if "kind:" in text:
                platform.cluster.kubectl("apply", "-f", "-", input=text)
                objects += text.count("\nkind:")
                continue
            part = yaml.safe_load(text)
            # A part of a profile's own.
            given = part if part.keys() & CHART_VALUES else {"profiles": {"default": part}}
            file = tmp_path / "values.yaml"
            file.write_text(yaml.safe_dump(given))
            platform.cluster.helm(*upgrade, "--values", str(file))
            platform._play_deployment()
            for name, spec in given.get("profiles", {}).items():
                profile = platform.kube.get("FineTuneProfile", "", name)
                assert profile is not None, name
                assert _is_within(spec, profile["spec"]), (spec, profile["spec"])
            values += 1
    assert (values, objects) == (6, 4)
    platform.cluster.kubectl("delete", "finetuneprofile", "h100", "small", "--ignore-not-found")
    platform.cluster.helm(*upgrade)
    platform._play_deployment()


def _is_within(part: Any, whole: Any) -> bool:
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(name in whole and _is_within(one, whole[name]) for name, one in part.items())
    return bool(part == whole)


def test_backup_and_restore(platform: Platform) -> None:
    """A finished job stays finished, one that had started is not trained a second time, one that had not begins."""
    platform.cluster.kubectl("delete", "finetunejobs", "--all", "--all-namespaces")
    platform.cluster.kubectl("create", "namespace", "restored")
    team = platform.team("restored")
    bounded = {"run": {"activeDeadlineSeconds": 3600}}
    with platform.operator("before"):
        team.apply("done", **bounded)
        for role in (Role.PREFLIGHT, Role.TRAIN, Role.MERGE):
            team.succeed(role, name="done")
        team.wait_for("Finished", name="done")
        team.apply("started", **bounded)
        team.succeed(Role.PREFLIGHT, name="started")
        team.wait_for_pods(Role.TRAIN, name="started")
    team.apply("new", **bounded)
    before = team.status("done")
    platform.follow("backup", only=slice(1))
    platform.cluster.kubectl("delete", "finetunejobs,finetuneprofiles", "--all", "--all-namespaces")
    team.wait(lambda: not team.kube.list("Job", "restored"), "the children to be collected")
    platform.follow("backup", only=slice(1, None))
    assert team.status("done") == before
    with platform.operator("after"):
        team.wait_for("Stalled", "True", "PlanLost", name="started")
        team.wait_for_pods(Role.PREFLIGHT, name="new")
    assert team.status("done")["phase"] == "Succeeded"
    assert {job["metadata"]["labels"]["finetune.dev/job"] for job in team.kube.list("Job", "restored")} == {"new"}


def test_install_upgrade_uninstall_and_another_release(platform: Platform) -> None:
    job, definition = "while-away", "finetunejobs.finetune.dev"

    def uids() -> tuple[str, str]:
        found = platform.kube.get("FineTuneJob", "research", job), platform.kube.get("CustomResourceDefinition", "", definition)
        return tuple(one["metadata"]["uid"] for one in found if one is not None)

    platform.team("research").apply(job)
    platform.kube.create("Namespace", "", {"metadata": {"name": "team-b"}})
    platform.cluster.helm("uninstall", "finetune", "--namespace", SYSTEM)
    before = uids()
    platform.follow("install")
    assert uids() == before
    annotations = platform.kube.get("CustomResourceDefinition", "", definition)["metadata"]["annotations"]
    assert annotations["meta.helm.sh/release-name"] == "tuning"
    releases = platform.cluster.helm("list", "--all-namespaces", "--short").split()
    assert sorted(releases) == ["finetune", "tuning"]
    # A release that serves some namespaces says so of the job that it shows.
    notes = platform.cluster.helm("get", "notes", "finetune", "--namespace", "team-a-system")
    assert "metadata: {name: first, namespace: team-a}" in notes
    assert "kubectl wait --namespace team-a finetunejob/first " in notes
