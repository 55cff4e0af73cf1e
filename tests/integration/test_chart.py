"""The chart: what it renders, what it refuses, that it installs, upgrades and stays within its rights."""

import asyncio
import itertools
import json
import shlex
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import yaml

from finetune_job.failures import FailureClass
from finetune_job.names import Role
from finetune_operator.check_release import MetricsAddress, read_metrics
from tests.integration.conftest import CHART, RELEASE, SYSTEM, Installed, OperatorFactory
from tests.integration.operator_process import ForkedOperator
from tests.integration.workload import SPEC, Workload
from tests.support.cases import table
from tests.support.forked_program import run_forked
from tests.support.installed_chart import CLUSTER_NAME, WAYS_OUT, as_account, install
from tools.cluster.errors import ClusterError, wait_until

pytestmark = pytest.mark.integration
Document = dict[str, Any]
NOW = "2026-01-01T00:00:00Z"
API_VERSION = "finetune.dev/v1alpha1"
PUBLISH = {
    "allowedDestinations": ["hf://", "s3://", "oci://"],
    "plainHttpRegistries": ["registry.test:5000"],
    "s3Endpoint": "https://store.test",
}


def rendered(installed: Installed, *arguments: str, release: str = RELEASE, namespace: str = SYSTEM) -> list[Document]:
    text = installed.cluster.helm("template", release, CHART, "--namespace", namespace, *arguments)
    return [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]


def of_kind(documents: list[Document], kind: str) -> list[Document]:
    return [document for document in documents if document["kind"] == kind]


def rules_of(documents: list[Document]) -> set[tuple[str, str, str]]:
    """Every (group, resource, verb) that a set of roles grants."""
    return {
        (group, resource, verb)
        for document in documents
        for rule in document["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_lint(installed: Installed) -> None:
    assert "0 chart(s) failed" in installed.cluster.helm("lint", "--strict", CHART)


@pytest.mark.parametrize("setting", table(__file__, "test_wrong_values_are_refused"))
def test_wrong_values_are_refused(installed: Installed, setting: str) -> None:
    named = setting.split("=", maxsplit=1)[0].rpartition(".")[2]
    with pytest.raises(ClusterError, match=named):
        rendered(installed, "--set", setting)


def test_what_takes_more_rights_gives_them_on_request(installed: Installed) -> None:
    queues = {("kueue.x-k8s.io", kind, "get") for kind in ("localqueues", "clusterqueues")}
    asked = {
        "kueue.patchJobs": {("batch", "jobs", "patch")},
        "kueue.readQueues": queues,
        "rbac.readNodes": {("", "nodes", "get")},
    }
    for kind, names, *place in (("ClusterRole", list(asked)), ("Role", list(asked)[:2], "--set", "namespaces={team-a}")):
        more = set().union(*(asked[name] for name in names))
        assert not more & rules_of(of_kind(rendered(installed, *place), kind))
        for name in names:
            assert more & rules_of(of_kind(rendered(installed, "--set", f"{name}=true", *place), kind)) == asked[name]


def test_definitions_are_the_generated_ones_and_survive_uninstalling(installed: Installed) -> None:
    crds = of_kind(rendered(installed), "CustomResourceDefinition")
    generated = [yaml.load(path.read_text(), yaml.CSafeLoader) for path in sorted((CHART.parents[1] / "crds").glob("*.yaml"))]
    assert crds == generated
    assert all(crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep" for crd in crds)
    given_up = of_kind(rendered(installed, "--set", "crds.keep=false"), "CustomResourceDefinition")
    assert ["helm.sh/resource-policy" in (crd["metadata"].get("annotations") or {}) for crd in given_up] == [False, False]
    assert not of_kind(rendered(installed, "--set", "crds.enabled=false"), "CustomResourceDefinition")


@pytest.mark.parametrize("aggregate", [True, False])
def test_the_built_in_roles_take_up_ours_if_they_shall(installed: Installed, *, aggregate: bool) -> None:
    documents = rendered(installed, "--set", f"userRoles.aggregate={str(aggregate).lower()}")
    taken_up = {
        (role["metadata"]["name"].rpartition("-")[2], label.partition("aggregate-to-")[2])
        for role in of_kind(documents, "ClusterRole")
        for label in role["metadata"]["labels"]
        if "aggregate-to" in label
    }
    assert taken_up == ({("user", "edit"), ("user", "admin"), ("viewer", "view")} if aggregate else set())


def test_watching_some_namespaces_gives_rights_in_these_only(installed: Installed) -> None:
    documents = rendered(installed, "--set", "namespaces={a,b}")
    (cluster_role,) = [role for role in of_kind(documents, "ClusterRole") if role["metadata"]["name"] == CLUSTER_NAME]
    assert {resource for _, resource, _ in rules_of([cluster_role])} == {
        "finetuneprofiles",
        "finetuneprofiles/status",
        "clusterroles",
    }
    roles = [role for role in of_kind(documents, "Role") if role["metadata"]["name"] == CLUSTER_NAME]
    assert {role["metadata"]["namespace"] for role in roles} == {"a", "b"}
    (deployment,) = of_kind(documents, "Deployment")
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert [item for item in arguments if item.startswith("--namespace=")] == ["--namespace=a", "--namespace=b"]


def test_an_install_without_rights_in_the_cluster_makes_nothing_outside_its_namespace(installed: Installed) -> None:
    """Somebody else has given the operator its rights, and installed the definitions, profiles and policies."""
    others = "rbac.create=false,userRoles.create=false,crds.enabled=false,admission.create=false,admission.operator.create=false"
    documents = rendered(installed, "--set", f"{others},serviceAccount.create=false,serviceAccount.name=given")
    assert sorted(document["kind"] for document in documents) == ["Deployment", "Service"]
    assert {document["metadata"]["namespace"] for document in documents} == {SYSTEM}
    (deployment,) = of_kind(documents, "Deployment")
    assert deployment["spec"]["template"]["spec"]["serviceAccountName"] == "given"


def test_images_by_digest_and_from_the_registry_of_all_charts_and_the_user_id(installed: Installed) -> None:
    digest = "sha256:" + "0" * 64
    settings = f"image.digest={digest},runAsUser=1000650000,global.imageRegistry=mirror.example/hub"
    (deployment,) = of_kind(rendered(installed, "--set", settings), "Deployment")
    template = deployment["spec"]["template"]
    assert template["spec"]["securityContext"]["runAsUser"] == 1000650000
    images = {one["image"] for kind in ("containers", "initContainers") for one in template["spec"][kind]}
    assert images == {f"mirror.example/hub/finetune-operator@{digest}"}
    (profile,) = json.loads(template["metadata"]["annotations"]["finetune.dev/profiles"])
    assert profile["spec"]["trainerImage"].rpartition(":")[0] == "mirror.example/hub/finetune-trainer"


def test_deployment_passes_pod_security_restricted(installed: Installed, workload: Workload) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    workload.kube.patch("Namespace", "", workload.namespace, {"metadata": {"labels": labels}})
    (deployment,) = of_kind(rendered(installed), "Deployment")
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "probe"}, "spec": deployment["spec"]["template"]["spec"]}
    pod["spec"]["serviceAccountName"] = "default"
    workload.kube.create("Pod", workload.namespace, pod)


@pytest.fixture
def upgrade(installed: Installed) -> Iterator[Callable[..., CompletedProcess[str]]]:
    """`helm upgrade` with other values, and the profiles of the new release; afterwards all is as it was installed."""

    def with_values(*arguments: str) -> CompletedProcess[str]:
        installed.cluster.helm(
            "upgrade",
            RELEASE,
            CHART,
            "--namespace",
            SYSTEM,
            "--reset-values",
            "--set",
            # The definitions stay, and to take them in again is what costs most.
            ",".join(("replicas=0", "crds.enabled=false", *WAYS_OUT)),
            *arguments,
        )
        return installed.chart.bring_profiles()

    yield with_values
    installed.kube.delete("FineTuneProfile", "", "default")
    assert with_values().returncode == 0


def profile(installed: Installed, name: str = "default") -> Document:
    found = installed.kube.get("FineTuneProfile", "", name)
    assert found is not None
    return found


def test_an_upgrade_changes_the_profile_and_keeps_the_object(installed: Installed, upgrade: Any) -> None:
    before = profile(installed)
    assert before["spec"]["trainerImage"] == "finetune-trainer:0.1.0"
    publish = f"profiles.default.publish={json.dumps(PUBLISH)}"
    assert upgrade("--set", "profiles.default.serviceAccountName=tuner", "--set-json", publish).returncode == 0
    changed = profile(installed)
    assert changed["metadata"]["uid"] == before["metadata"]["uid"]
    assert changed["spec"]["serviceAccountName"] == "tuner"
    assert changed["spec"]["publish"] == PUBLISH
    assert upgrade().returncode == 0
    back = profile(installed)
    assert back["metadata"]["uid"] == before["metadata"]["uid"]
    assert back["spec"] == before["spec"]


def test_what_a_person_changed_in_a_profile_is_kept_or_named(installed: Installed, upgrade: Any) -> None:
    installed.kube.patch("FineTuneProfile", "", "default", {"spec": {"serviceAccountName": "by-hand", "maxActiveJobs": 3}})
    # The same values again, as at a restart of the pod: nothing is written.
    version = profile(installed)["metadata"]["resourceVersion"]
    assert upgrade().returncode == 0
    assert profile(installed)["metadata"]["resourceVersion"] == version
    # Another field of the values changes: both stay.
    assert upgrade("--set", "profiles.default.runAsUser=1234").returncode == 0
    spec = profile(installed)["spec"]
    assert (spec["serviceAccountName"], spec["maxActiveJobs"], spec["runAsUser"]) == ("by-hand", 3, 1234)
    # The same field: the upgrade is refused, and says which field and what to do.
    refused = upgrade("--set", "profiles.default.serviceAccountName=tuner")
    assert refused.returncode == 1
    for word in (".spec.serviceAccountName", "profile default stays as it is", "profiles.default of the chart's values"):
        assert word in refused.stdout, refused.stdout
    assert profile(installed)["spec"] == spec


def test_a_profile_that_the_api_server_refuses_leaves_the_one_that_is_there(installed: Installed, upgrade: Any) -> None:
    before = profile(installed)
    refused = upgrade("--set-string", "profiles.default.pods.train.extraResources.cpu=1")
    assert refused.returncode == 1
    assert "profile default: spec.pods.train.extraResources is" in refused.stdout
    assert profile(installed) == before


def test_a_profile_that_leaves_the_values_goes_and_another_comes(installed: Installed, upgrade: Any) -> None:
    done = upgrade("--set", "profiles.large.maxActiveJobs=2")
    assert done.returncode == 0, done.stdout
    assert profile(installed, "large")["spec"]["trainerImage"] == "finetune-trainer:0.1.0"
    assert upgrade().returncode == 0
    wait_until(lambda: installed.kube.get("FineTuneProfile", "", "large") is None, "the profile to go with its release", 60)
    assert profile(installed)


def test_the_profile_of_a_chart_that_made_it_by_a_hook_is_taken_over(installed: Installed, upgrade: Any) -> None:
    installed.kube.delete("FineTuneProfile", "", "default")
    labels = {"app.kubernetes.io/instance": RELEASE, "app.kubernetes.io/managed-by": "Helm"}
    of_a_hook = {"metadata": {"name": "default", "labels": labels}, "spec": {"trainerImage": "old"}}
    made = installed.kube.create("FineTuneProfile", "", {"apiVersion": API_VERSION, "kind": "FineTuneProfile", **of_a_hook})
    assert upgrade().returncode == 0
    assert profile(installed)["metadata"]["uid"] == made["metadata"]["uid"]
    assert profile(installed)["spec"]["trainerImage"] == "finetune-trainer:0.1.0"


@pytest.mark.nightly
def test_two_releases_of_one_name_serve_two_namespaces(installed: Installed, tmp_path: Path) -> None:
    system = "finetune-system-2"
    own = ("crds.enabled=false", "namespaces={team-x}", "profiles.default=null", "profiles.second.maxActiveJobs=1")
    installed.kube.create("Namespace", "", {"metadata": {"name": "team-x"}})
    try:
        second = install(installed.cluster, tmp_path, *own, namespace=system)
        assert second.bring_profiles().returncode == 0
        assert profile(installed, "second")["spec"]["maxActiveJobs"] == 1
    finally:
        installed.cluster.helm("uninstall", RELEASE, "--namespace", system)
        installed.kube.delete("Namespace", "", "team-x")
    wait_until(lambda: installed.kube.get("FineTuneProfile", "", "second") is None, "the profile to go with its release", 60)
    assert profile(installed)


def refusal(installed: Installed, *values: str, namespace: str = "elsewhere") -> str:
    """Why a release is not installed; nothing if it would be. The definitions are the first release's."""
    try:
        settings = ("--set", "crds.enabled=false", *(part for value in values for part in ("--set", value)))
        rendered(installed, "--dry-run=server", *settings, namespace=namespace)
    except ClusterError as error:
        return str(error)
    return ""


def test_a_release_is_refused_the_namespaces_of_another_one_that_runs(installed: Installed, workload: Workload) -> None:
    """The release that the tests have installed is scaled to zero."""
    assert refusal(installed) == ""
    labels = {"app.kubernetes.io/instance": "theirs", "helm.sh/chart": "finetune-operator-0.0.1"}
    pod = {"containers": [{"name": "operator", "image": "x", "args": ["--log-level=info", "--namespace=a", "--namespace=b"]}]}
    template = {"metadata": {"labels": labels | {"app": "theirs"}}, "spec": pod}
    spec = {"replicas": 1, "selector": {"matchLabels": {"app": "theirs"}}, "template": template}
    theirs = {"metadata": {"name": "theirs", "labels": labels}, "spec": spec}
    installed.kube.create("Deployment", workload.namespace, theirs)
    said = f"release theirs in namespace {workload.namespace} serves {{}} already, and two releases must not serve the same"
    assert said.format("a, b") in refusal(installed)
    assert said.format("b") in refusal(installed, "namespaces={b,c}")
    assert refusal(installed, "namespaces={c}") == ""
    assert refusal(installed, "replicas=0") == ""
    assert refusal(installed, "rbac.create=false") == "", "nobody without rights in the cluster can look"
    installed.kube.patch("Deployment", workload.namespace, "theirs", {"spec": {"replicas": 0}})
    assert refusal(installed) == ""
    everywhere = {"spec": {"replicas": 1, "template": {"spec": {"containers": [{"name": "operator", "image": "x"}]}}}}
    installed.kube.patch("Deployment", workload.namespace, "theirs", everywhere)
    assert said.format("all namespaces") in refusal(installed)
    assert said.format("c") in refusal(installed, "namespaces={c}")
    installed.kube.delete("Deployment", workload.namespace, "theirs")


@pytest.mark.nightly
def test_another_release_takes_over_the_definitions_and_leaves_them(installed: Installed, tmp_path: Path) -> None:
    """What an uninstalled release leaves behind, a release of another name takes over, and with it every job."""
    name = "finetunejobs.finetune.dev"
    before = installed.kube.get("CustomResourceDefinition", "", name)
    assert before is not None
    own = ("namespaces={team-y}", "profiles.default=null", "fullnameOverride=other")
    installed.kube.create("Namespace", "", {"metadata": {"name": "team-y"}})
    try:
        with pytest.raises(ClusterError, match="invalid ownership metadata"):
            install(installed.cluster, tmp_path, *own, release="other", namespace="elsewhere")
        install(installed.cluster, tmp_path, *own, release="other", namespace="elsewhere", arguments=("--take-ownership",))
        taken = installed.kube.get("CustomResourceDefinition", "", name)
        assert taken is not None
        assert taken["metadata"]["uid"] == before["metadata"]["uid"]
        assert taken["metadata"]["annotations"]["meta.helm.sh/release-name"] == "other"
        installed.cluster.helm("uninstall", "other", "--namespace", "elsewhere")
        kept = installed.kube.get("CustomResourceDefinition", "", name)
        assert kept is not None
        assert kept["metadata"]["uid"] == before["metadata"]["uid"]
    finally:
        installed.kube.delete("Namespace", "", "team-y")
        installed.cluster.helm(
            *("upgrade", RELEASE, CHART, "--namespace", SYSTEM, "--reset-values", "--take-ownership"),
            *("--set", ",".join(("replicas=0", *WAYS_OUT))),
        )


def test_rights_in_one_namespace_suffice(installed: Installed, workload: Workload, tmp_path: Path) -> None:
    """The Roles that the chart makes for a namespace, and nothing else, carry a job."""
    release, system = "finetune-operator-one", f"{workload.namespace}-system"
    workload.kube.create("Namespace", "", {"metadata": {"name": system}})
    documents = rendered(
        *(installed, "--set", f"namespaces={{{workload.namespace}}},crds.enabled=false,profiles.default=null"),
        *("--set", "userRoles.create=false"),
        release=release,
        namespace=system,
    )
    kinds = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
    access = [document for document in documents if document["kind"] in kinds]
    installed.cluster.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(access))
    try:
        wait_until(lambda: workload.kube.get("ServiceAccount", system, release), "the ServiceAccount", 60)
        kubeconfig = as_account(installed.cluster, release, system, tmp_path)
        (deployment,) = of_kind(documents, "Deployment")
        own = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
        arguments = [argument for argument in own if not argument.startswith("--listen-port")]
        workload.apply()
        operator = ForkedOperator(
            kubeconfig, tmp_path / "operator.log", *arguments, f"--lease-namespace={system}", "--identity=one"
        )
        with operator:
            workload.succeed(Role.PREFLIGHT)
            workload.wait_for_pods(Role.TRAIN)
    finally:
        workload.kube.delete("Namespace", "", system)


def test_helm_test_tries_jobs_and_reads_metrics(
    installed: Installed, workload: Workload, operator: OperatorFactory, tmp_path: Path
) -> None:
    port = operator().wait_for_line("listening")["port"]
    place = ("--set", f"namespaces={{{workload.namespace}}},metrics.port={port}", "--show-only", "templates/tests/release.yaml")
    documents = rendered(installed, *place)
    assert all(document["metadata"]["annotations"]["helm.sh/hook"] == "test" for document in documents)
    (pod,) = of_kind(documents, "Pod")
    installed.cluster.kubectl("apply", "-f", "-", input=yaml.safe_dump_all([each for each in documents if each is not pod]))
    # The pod itself: it would be accepted where Pod Security is restricted.
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    workload.kube.patch("Namespace", "", workload.namespace, {"metadata": {"labels": labels}})
    shown = {**pod["spec"], "serviceAccountName": "default"}
    workload.kube.create("Pod", workload.namespace, {"metadata": {"name": "test"}, "spec": shown})

    kubeconfig = as_account(installed.cluster, pod["spec"]["serviceAccountName"], SYSTEM, tmp_path)
    (container,) = pod["spec"]["containers"]
    program = container["command"][container["command"].index("-m") + 1]
    arguments = [argument.replace(f"{RELEASE}.{SYSTEM}.svc:", "127.0.0.1:") for argument in container["args"]]

    def run(access: Path, arguments: list[str]) -> tuple[int, list[str]]:
        ended = run_forked(program, *arguments, KUBECONFIG=str(access))
        return ended.returncode, ended.stdout.splitlines()

    code, lines = run(kubeconfig, arguments)
    assert (code, [line.partition(":")[0] for line in lines]) == (0, ["passed"] * 4)
    assert workload.kube.list("FineTuneJob", workload.namespace) == []
    # Whom the policy does not ask, it does not refuse; and no metrics are no pass.
    code, lines = run(
        installed.cluster.kubeconfig, [f"--namespace={workload.namespace}", "--admission", "--metrics=http://127.0.0.1:9/"]
    )
    assert (code, [line.partition(":")[0] for line in lines]) == (1, ["passed", "passed", "failed", "failed"])
    assert lines[2].endswith("the API server accepts it")
    # Without rights in the namespace no job is accepted, and the server's words are passed on.
    code, lines = run(kubeconfig, ["--namespace=default"])
    assert (code, "cannot create resource" in lines[0]) == (1, True)
    kinds = [each for each in documents if each is not pod]
    installed.cluster.kubectl("delete", "-f", "-", input=yaml.safe_dump_all(kinds))


def test_helm_test_runs_the_job_of_the_values(
    installed: Installed, workload: Workload, operator: OperatorFactory, tmp_path: Path
) -> None:
    """With the rights of its account, which end at what the job names."""
    operator()
    settings = (f"namespaces={{{workload.namespace}}}", "metrics.service.create=false", "test.timeoutSeconds=100")
    given = ("--set", ",".join(settings), "--set-json", f"test.job={json.dumps(SPEC)}")
    documents = rendered(installed, *given, "--show-only", "templates/tests/release.yaml")
    (pod,) = of_kind(documents, "Pod")
    (role,) = of_kind(documents, "Role")
    assert {name for rule in role["rules"] for name in rule.get("resourceNames", ())} == {
        *("finetune-test", "models", "data", "results", "workspace", "default")
    }
    rights = yaml.safe_dump_all([each for each in documents if each is not pod])
    installed.cluster.kubectl("apply", "-f", "-", input=rights)
    kubeconfig = as_account(installed.cluster, pod["spec"]["serviceAccountName"], SYSTEM, tmp_path)
    (container,) = pod["spec"]["containers"]
    program = container["command"][container["command"].index("-m") + 1]

    def run() -> tuple[int, str]:
        ended = run_forked(program, *container["args"], KUBECONFIG=str(kubeconfig))
        return ended.returncode, ended.stdout.splitlines()[-1]

    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(run)
        for role_of_pod in (Role.PREFLIGHT, Role.TRAIN, Role.MERGE):
            workload.succeed(role_of_pod, name="finetune-test")
        assert running.result() == (0, "passed: the FineTuneJob of the values succeeds")
        workload.wait(lambda: not workload.kube.list("FineTuneJob", workload.namespace), "the job to be deleted")
        running = threads.submit(run)
        (failing,) = workload.wait_for_pods(Role.PREFLIGHT, name="finetune-test")
        workload.fail(failing, FailureClass.USER_DATA, "no records")
        code, said = running.result()
    # Without waiting for the end of its time.
    assert (code, said.startswith("failed: the FineTuneJob of the values succeeds: it is Stalled; inspect it with")) == (
        1,
        True,
    ), said
    code, said = run()
    assert (code, "finetune-test remains from an earlier test" in said) == (1, True), said
    installed.cluster.kubectl("delete", "-f", "-", input=rights)


def test_profiles_trust_the_authorities_of_the_chart_or_their_own(installed: Installed) -> None:
    def bundles(*arguments: str) -> dict[str, Any]:
        (deployment,) = of_kind(rendered(installed, *arguments), "Deployment")
        profiles = json.loads(deployment["spec"]["template"]["metadata"]["annotations"]["finetune.dev/profiles"])
        return {profile["name"]: profile["spec"].get("caBundle") for profile in profiles}

    own = ("--set", "profiles.mirror.caBundle.configMap=mirror-ca")
    assert bundles(*own) == {"default": None, "mirror": {"configMap": "mirror-ca"}}
    company = {"configMap": "company-ca", "key": "bundle.pem"}
    given = ("--set", "caBundle.configMap=company-ca,caBundle.key=bundle.pem")
    assert bundles(*own, *given) == {"default": company, "mirror": {"configMap": "mirror-ca"}}


def test_metrics_are_read_by_tokens_that_may(installed: Installed, workload: Workload, tmp_path: Path) -> None:
    """With the objects that the chart makes for it, and the programs in place of the pods."""
    settings = ("--set", f"namespaces={{{workload.namespace}}},metrics.authentication=true,metrics.tls.secretName=metrics-tls")
    documents = rendered(installed, *settings)
    (deployment,) = of_kind(documents, "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert (container["livenessProbe"]["httpGet"]["scheme"], container["readinessProbe"]["httpGet"]["scheme"]) == ("HTTPS",) * 2
    of_metrics = [
        each
        for each in documents
        if each["metadata"]["name"].endswith(("-auth-delegator", "-metrics-reader"))
        or (each["kind"] in ("ServiceAccount", "ClusterRoleBinding") and each["metadata"]["name"].endswith("-test"))
    ]
    assert len(of_metrics) == 4
    installed.cluster.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(of_metrics))
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=metrics"
    files = ("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", tmp_path / "tls.key", "-out", tmp_path / "tls.crt")
    subprocess.run([*make.split(), *files], check=True, capture_output=True)
    for name in (f"{RELEASE}-test", "default"):
        token = installed.cluster.kubectl("create", "token", name, "--namespace", SYSTEM).strip()
        (tmp_path / name).write_text(token)
    flags = [one for one in container["args"] if one.startswith(("--metrics-auth", "--tls", "--workers", "--requests"))]
    assert [flag.partition("=")[0] for flag in flags] == [
        "--workers",
        "--requests-in-flight",
        "--tls",
        "--metrics-authentication",
    ]
    arguments = [flag.replace("/etc/metrics-tls", str(tmp_path)) for flag in flags]
    place = (f"--namespace={workload.namespace}", f"--lease-namespace={SYSTEM}", f"--lease-name={RELEASE}-metrics")
    operator = ForkedOperator(installed.operator_kubeconfig, tmp_path / "operator.log", *place, *arguments)

    def read(token: Path | None) -> str:
        return asyncio.run(read_metrics(MetricsAddress(f"https://127.0.0.1:{port}/metrics", tmp_path / "tls.crt", token)))

    try:
        with operator:
            port = operator.wait_for_line("listening")["port"]
            wait_until(lambda: read(tmp_path / f"{RELEASE}-test") == "", "the rights to be known", 60)
            assert read(tmp_path / "default").endswith("answers with status 403")
            assert read(None).endswith("answers with status 401")
    finally:
        installed.cluster.kubectl("delete", "-f", "-", input=yaml.safe_dump_all(of_metrics))
        installed.kube.delete("Lease", SYSTEM, f"{RELEASE}-metrics")


def test_what_the_chart_shows_as_examples_is_accepted(installed: Installed, workload: Workload) -> None:
    annotations = yaml.load((CHART / "Chart.yaml").read_text(), yaml.CSafeLoader)["annotations"]
    examples = yaml.load(annotations["artifacthub.io/crdsExamples"], yaml.CSafeLoader)
    assert [example["kind"] for example in examples] == ["FineTuneJob", "FineTuneProfile"]
    named = [definition["name"] for definition in yaml.load(annotations["artifacthub.io/crds"], yaml.CSafeLoader)]
    assert named == ["finetunejobs.finetune.dev", "finetuneprofiles.finetune.dev"]
    assert {change["kind"] for change in yaml.load(annotations["artifacthub.io/changes"], yaml.CSafeLoader)} <= {
        "added",
        "changed",
        "security",
    }
    command = ("create", "--dry-run=server", "--validate=strict", "--namespace", workload.namespace, "-f", "-")
    installed.cluster.kubectl(*command, input=json.dumps({"apiVersion": "v1", "kind": "List", "items": examples}))


def test_the_commands_of_the_notes_run(installed: Installed) -> None:
    notes = installed.cluster.helm("get", "notes", RELEASE, "--namespace", SYSTEM)
    lines = iter(line.removeprefix("  ") for line in notes.splitlines() if line.startswith("  "))
    commands = []
    for line in lines:
        command, _, here = line.partition(" <<")
        commands.append(
            (shlex.split(command), "\n".join(itertools.takewhile(lambda line, end=here: line != end, lines)) if here else None)
        )
    assert [command[:2] for command, _ in commands] == [
        ["kubectl", "-n"],
        ["helm", "test"],
        ["kubectl", "explain"],
        ["kubectl", "get"],
        ["kubectl", "apply"],
        ["kubectl", "wait"],
    ]
    finished = {"type": "Finished", "status": "True", "reason": "Succeeded", "message": "", "lastTransitionTime": NOW}
    try:
        for (program, *arguments), text in commands:
            # Nothing runs here: the pod of `helm test` is tried by another test, and the job is ended by hand.
            if program == "helm":
                continue
            if arguments[0] == "wait":
                installed.kube.patch("FineTuneJob", "default", "first", {"status": {"conditions": [finished]}}, "status")
            said = installed.cluster.kubectl(*arguments, input=text)
        assert "condition met" in said
    finally:
        installed.kube.delete("FineTuneJob", "default", "first")
