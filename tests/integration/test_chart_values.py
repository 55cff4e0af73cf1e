"""What each value of the chart does to its objects: many of them at once, as `helm template` renders them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.cases import table
from tests.support.installed_chart import CHART
from tools.cluster.binaries import ensure_binaries
from tools.cluster.errors import ClusterError
from tools.cluster.processes import run_command

pytestmark = pytest.mark.integration
Document = dict[str, Any]
DIGEST = "sha256:" + "1" * 64
TOLERATION = {"key": "team.example/system", "operator": "Exists", "effect": "NoSchedule"}
SPREAD = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
AFFINITY = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}}
MONITORING = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
RESOLVER = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "dns"}}}
VALUES: Mapping[str, Any] = table(__file__, "VALUES")
NAME = "tuning-adapt"


def rendered(values: Mapping[str, Any], directory: Path) -> list[Document]:
    file = directory / "values.json"
    file.write_text(json.dumps(values))
    text = run_command(ensure_binaries().helm, "template", "tuning", CHART, "--namespace", "system", "--values", file)
    return [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]


def the(documents: list[Document], kind: str, name: str = NAME) -> Document:
    (found,) = [one for one in documents if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> list[Document]:
    return rendered(VALUES, tmp_path_factory.mktemp("values"))


def test_labels_and_annotations_are_on_every_object(documents: list[Document]) -> None:
    own = [one for one in documents if "as-" not in one["metadata"]["name"]]
    assert len(own) > 20
    without = [
        (one["kind"], one["metadata"]["name"])
        for one in own
        if one["metadata"].get("labels", {}).get("team.example/owner") != "ml"
        or one["metadata"].get("annotations", {}).get("team.example/note") != "kept"
    ]
    assert without == []
    assert {name for name in ("as-a-mapping", "tuning-as-text") if the(documents, "ConfigMap", name)}


def test_the_deployment_is_what_the_values_say(documents: list[Document]) -> None:
    spec = the(documents, "Deployment")["spec"]
    assert (spec["replicas"], spec["revisionHistoryLimit"]) == (3, 7)
    assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "50%", "maxUnavailable": 1}}
    metadata, pod = spec["template"]["metadata"], spec["template"]["spec"]
    assert metadata["labels"].items() >= {"team.example/pod": "operator", "team.example/owner": "ml"}.items()
    assert metadata["annotations"].items() >= {"team.example/scrape": "true", "team.example/note": "kept"}.items()
    assert pod["imagePullSecrets"] == [{"name": "mirror"}, {"name": "login"}]
    assert (pod["serviceAccountName"], pod["priorityClassName"], pod["runtimeClassName"]) == (
        *("tuner", "system-cluster-critical", "gvisor"),
    )
    assert (pod["nodeSelector"], pod["tolerations"], pod["affinity"]) == ({"disk": "fast"}, [TOLERATION], AFFINITY)
    selector = {"app.kubernetes.io/name": "adapt", "app.kubernetes.io/instance": "tuning"}
    assert pod["topologySpreadConstraints"] == [SPREAD | {"labelSelector": {"matchLabels": selector}}]
    assert {"name": "more", "emptyDir": {}} in pod["volumes"]
    (operator,), (profiles,) = pod["containers"], pod["initContainers"]
    for container in (operator, profiles):
        assert (container["image"], container["imagePullPolicy"]) == ("registry.example/ml/operator:9.9", "Always")
        assert container["resources"] == VALUES["resources"]
        assert {"name": "more", "mountPath": "/more"} in container["volumeMounts"]
        environment = {one["name"]: one.get("value") for one in container["env"]}
        assert environment.items() >= {"TZ": "UTC", "HTTP_PROXY": "http://proxy:1", "HTTPS_PROXY": "http://proxy:2"}.items()
        assert environment["NO_PROXY"] == ".svc"
    assert operator["args"] == [
        "--lease-name=tuning-adapt",
        "--listen-port=9999",
        "--log-level=debug",
        "--workers=3",
        "--requests-in-flight=5",
        "--progress-seconds=7",
        "--progress-writes-per-second=9",
        "--log-level=warning",
    ]
    assert operator["ports"] == [{"name": "metrics", "containerPort": 9999}]
    assert (operator["livenessProbe"]["periodSeconds"], operator["readinessProbe"]["periodSeconds"]) == (21, 6)
    (profile,) = json.loads(metadata["annotations"]["finetune.dev/profiles"])
    assert profile["spec"]["trainerImage"] == f"registry.example/ml/trainer@{DIGEST}"


def test_what_is_around_the_deployment_is_what_the_values_say(documents: list[Document]) -> None:
    account = the(documents, "ServiceAccount", "tuner")
    assert account["metadata"]["annotations"]["eks.amazonaws.com/role-arn"] == "arn:aws:iam::1:role/x"
    assert the(documents, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    service = the(documents, "Service")
    assert service["spec"]["ports"] == [{"name": "metrics", "port": 9999, "targetPort": "metrics"}]
    assert service["metadata"]["annotations"]["team.example/service"] == "metrics"
    monitors = {"ServiceMonitor": (NAME, "endpoints", "7s"), "PodMonitor": (f"{NAME}-rank-0", "podMetricsEndpoints", "8s")}
    for kind, (name, endpoints, interval) in monitors.items():
        monitor = the(documents, kind, name)
        assert monitor["metadata"]["labels"]["release"] == "stack"
        assert [one["interval"] for one in monitor["spec"][endpoints]] == [interval]
    assert the(documents, "PrometheusRule")["metadata"]["labels"]["release"] == "stack"
    policy = the(documents, "NetworkPolicy")["spec"]
    (reader, _), (api_server, dns, _) = policy["ingress"][0]["from"], policy["egress"]
    assert reader == MONITORING
    assert api_server == {"ports": [{"protocol": "TCP", "port": 6443}], "to": [{"ipBlock": {"cidr": "192.0.2.1/32"}}]}
    assert dns["to"] == [RESOLVER]


def test_one_replica_has_no_budget_and_is_spread_nowhere(tmp_path: Path) -> None:
    """A budget of one pod would block the draining of its node."""
    values = {**VALUES, "replicas": 1, "strategy": {"type": "Recreate"}}
    documents = rendered(values, tmp_path)
    assert "PodDisruptionBudget" not in {one["kind"] for one in documents}
    spec = the(documents, "Deployment")["spec"]
    assert "topologySpreadConstraints" not in spec["template"]["spec"]
    assert spec["strategy"] == {"type": "Recreate"}


MANY = {f"profile-{number}": {"trainerImage": "x" * 500} for number in range(400)}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"metrics": {"serviceMonitor": {"create": True}, "service": {"create": False}}}, "set metrics.service.create to true"),
        ({"metrics": {"authentication": True}}, "metrics.tls.secretName is empty: tokens would travel in clear text"),
        ({"profiles": MANY}, "at most 200000 fit into the operator's pod"),
    ],
)
def test_values_that_do_not_go_together_are_refused_with_what_to_do(values: Document, said: str, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=said):
        rendered(values, tmp_path)
