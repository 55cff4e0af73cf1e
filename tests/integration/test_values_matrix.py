"""All values of the chart, any two of them together: the schema takes them, helm renders them, the API server would take the
objects. And all of them wrong: each is refused by its name.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.conftest import CHART, Installed
from tests.integration.kube import Document, Kube, RefusedError
from tests.integration.monitoring_definitions import GROUP, SPECS, definitions
from tests.integration.pairwise import pairwise
from tests.support.prometheus import rendered
from tools.cluster.errors import ClusterError, wait_until

pytestmark = pytest.mark.integration
DIGEST = "sha256:" + "0" * 64
TOLERATION = {"key": "team.example/gpu", "operator": "Exists", "effect": "NoSchedule"}
SPREAD = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
PEER = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
LABELS = {"team.example/owner": "ml"}
NODES = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "disk", "operator": "Exists"}]}]}
SAMPLES: Mapping[str, list[Any]] = {
    "global.imageRegistry": ["", "mirror.example:5000/hub"],
    "global.imagePullSecrets": [[], [{"name": "mirror"}]],
    "nameOverride": ["", "tuning"],
    "fullnameOverride": ["", "n" * 52],
    "commonLabels": [{}, LABELS],
    "commonAnnotations": [{}, {"team.example/note": 'two words: "quoted"'}],
    "image.registry": ["", "registry.example"],
    "image.repository": ["finetune-operator", "team/finetune-operator"],
    "image.tag": ["", "1.2.3"],
    "image.digest": ["", DIGEST],
    "imagePullSecrets": [[], [{"name": "login"}]],
    "trainerImage.registry": ["", "registry.example:5000"],
    "trainerImage.repository": ["finetune-trainer", "team/finetune-trainer"],
    "trainerImage.tag": ["", "1.2.3"],
    "trainerImage.digest": ["", DIGEST],
    "namespaces": [[], ["matrix-a", "matrix-b"]],
    "resources.requests": [{"cpu": "100m", "memory": "256Mi"}, {"cpu": 1}],
    "resources.limits": [{"memory": "512Mi"}, {}],
    "runAsUser": [None, 1000650000],
    "nodeSelector": [{}, {"kubernetes.io/os": "linux"}],
    "tolerations": [[], [TOLERATION]],
    "affinity": [{}, {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": NODES}}],
    "topologySpreadConstraints": [[], [SPREAD]],
    "runtimeClassName": ["", "gvisor"],
    "strategy.maxSurge": [1, "50%"],
    "strategy.maxUnavailable": [0, 1],
    "probes.liveness": [{"periodSeconds": 20, "timeoutSeconds": 5}, {"initialDelaySeconds": 30}],
    "probes.readiness": [{"periodSeconds": 5, "timeoutSeconds": 5}, {"failureThreshold": 9}],
    "priorityClassName": ["", "system-cluster-critical"],
    "podLabels": [{}, LABELS],
    "podAnnotations": [{}, {"prometheus.io/scrape": "true"}],
    "extraArgs": [[], ["--log-level=debug"]],
    "extraEnv": [[], [{"name": "TZ", "value": "UTC"}]],
    "extraVolumes": [[], [{"name": "more", "emptyDir": {}}]],
    "extraVolumeMounts": [[], [{"name": "tmp", "mountPath": "/more"}]],
    "proxy.httpProxy": ["", "http://proxy.example:3128"],
    "proxy.httpsProxy": ["", "http://proxy.example:3128"],
    "proxy.noProxy": ["", "10.0.0.0/8,.svc"],
    "caBundle.configMap": ["", "company-ca"],
    "caBundle.key": ["ca.crt", "bundle.pem"],
    "metrics.tls.secretName": ["", "metrics-tls"],
    "serviceAccount.name": ["", "tuner"],
    "serviceAccount.annotations": [{}, {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/x"}],
    "profiles": [
        {"default": {"fsGroup": 65532}},
        {"default": None},
        {"default": {"gpu": {"memory": "80Gi"}}, "small": {"maxActiveJobs": 2, "trainerImage": "registry.example/other:1"}},
    ],
    "userRoles.profileReaders": [[], ["system:authenticated"]],
    "admission.trustedUsers": [[], ["system:serviceaccount:argocd:argocd-application-controller"]],
    "admission.trustedGroups": [[], ['it\'s "quoted"']],
    "admission.trustedNamespaceLabel": ["", "team.example/gitops"],
    "admission.operator.images": [[], ["registry.example/team", ""]],
    "metrics.service.annotations": [{}, {"team.example/scrape": "true"}],
    "metrics.serviceMonitor.labels": [{}, {"release": "kube-prometheus-stack"}],
    "metrics.serviceMonitor.interval": ["30s", "1m"],
    "metrics.podMonitor.labels": [{}, {"release": "kube-prometheus-stack"}],
    "metrics.podMonitor.interval": ["30s", "500ms"],
    "metrics.prometheusRule.labels": [{}, {"release": "kube-prometheus-stack"}],
    "metrics.prometheusRule.alerts": [
        {},
        {"FineTuneGPUIdle": {"for": "1h", "severity": "critical"}, "FineTuneXidError": {"enabled": False}},
    ],
    "metrics.prometheusRule.runbooks": ["docs/how-to/runbooks.md", "https://runbooks.example/finetune"],
    "metrics.dashboards.labels": [{"grafana_dashboard": "1"}, {}],
    "networkPolicy.apiServerCIDRs": [["0.0.0.0/0"], ["10.0.0.1/32", "fd00::/8"]],
    "networkPolicy.apiServerPorts": [[443, 6443], [443]],
    "networkPolicy.metricsFrom": [[], [PEER]],
    "networkPolicy.dnsTo": [[], [PEER]],
    "test.job": [{}, {"model": {"source": "pvc://models/a"}, "workspace": {"claimName": "work"}, "profile": "h100"}],
    "extraObjects": [
        [],
        [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "more"}},
            "{apiVersion: v1, kind: ConfigMap, metadata: {name: {{ .Release.Name }}-more}}",
        ],
    ],
}
"""Of values that are no flags, choices or numbers: the default and others."""
FREE_KEYS = ("matchLabels", "labels", "annotations")
"""Of the Prometheus operator's kinds: maps whose keys the user chooses."""


def leaves(node: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every value that the schema knows, as `part.part`, with what it says of it."""
    if "properties" not in node:
        yield place, node
        return
    for name, child in node["properties"].items():
        yield from leaves(child, f"{place}.{name}".lstrip("."))


def closed(node: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """Every object of the values that holds named ones only."""
    if "properties" in node:
        yield place
        for name, child in node["properties"].items():
            yield from closed(child, f"{place}.{name}".lstrip("."))


def choices(place: str, said: Mapping[str, Any]) -> list[Any]:
    if said.get("type") == "boolean":
        return [True, False]
    if "enum" in said:
        return list(said["enum"])
    if said.get("type") == "integer":
        return [said["minimum"], said["maximum"]]
    assert place in SAMPLES, f"{place} of values.yaml is new: give SAMPLES its default and another value"
    return list(SAMPLES[place])


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for place, value in flat.items():
        *parts, name = place.split(".")
        node = found
        for part in parts:
            node = node.setdefault(part, {})
        node[name] = value
    return found


def rows() -> list[dict[str, Any]]:
    """Values by their places; any two values are together in one of them."""
    found = pairwise({place: choices(place, said) for place, said in leaves(schema())})
    assert 10 < len(found) < 60
    for row in found:
        if row["metrics.serviceMonitor.create"]:
            # The chart refuses a ServiceMonitor without its Service.
            row["metrics.service.create"] = True
        if row["metrics.authentication"]:
            # The chart refuses tokens in clear text.
            row["metrics.tls.secretName"] = "metrics-tls"
        # The definitions take half a second each time and depend on two flags.
        row["crds.enabled"] = False
    return found


def schema() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
    return loaded


def template(installed: Installed, values: Mapping[str, Any], file: Path) -> list[dict[str, Any]]:
    file.write_text(json.dumps(values))
    text = installed.cluster.helm("template", "matrix", CHART, "--namespace", "matrix-system", "--values", file)
    return [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]


@pytest.fixture(scope="module")
def monitoring(installed: Installed) -> Iterator[Kube]:
    """The API server, with the kinds of the Prometheus operator."""
    kube = installed.kube
    names = [kube.create("CustomResourceDefinition", "", each)["metadata"]["name"] for each in definitions()]
    wait_until(lambda: all(is_served(kube, name) for name in names), "the kinds of the Prometheus operator", 60)
    yield kube
    for name in names:
        kube.delete("CustomResourceDefinition", "", name)


def is_served(kube: Kube, name: str) -> bool:
    try:
        kube.request("GET", f"/apis/{GROUP}/v1/{name.partition('.')[0]}")
    except RefusedError:
        return False
    return True


def test_any_two_values_together_make_objects_that_the_api_server_takes(
    installed: Installed, monitoring: Kube, tmp_path: Path
) -> None:
    found = {}
    for row in rows():
        for document in template(installed, nested(row), tmp_path / "values.json"):
            found[json.dumps(document, sort_keys=True)] = document
    documents = list(found.values())
    kinds = {document["kind"] for document in documents}
    assert SPECS.keys() <= kinds
    assert {"Deployment", "PodDisruptionBudget", "NetworkPolicy", "ValidatingAdmissionPolicy", "Role", "ConfigMap"} <= kinds
    namespaces = ("matrix-a", "matrix-b", "matrix-system")
    for name in namespaces:
        installed.kube.create("Namespace", "", {"metadata": {"name": name}})
    for document in documents:
        if document["kind"] == "Pod":
            # Its own ServiceAccount is not there in a dry run.
            document["spec"]["serviceAccountName"] = "default"
        if document["kind"] in ("Pod", "ConfigMap"):
            document["metadata"]["namespace"] = "matrix-system"
    try:
        wait_until(lambda: installed.kube.get("ServiceAccount", "matrix-system", "default"), "the default ServiceAccount", 60)
        listed = {"apiVersion": "v1", "kind": "List", "items": documents}
        command = ("create", "--dry-run=server", "--validate=strict", "--output", "name", "-f", "-")
        made = installed.cluster.kubectl(*command, input=json.dumps(listed)).splitlines()
    finally:
        for name in namespaces:
            installed.kube.delete("Namespace", "", name)
    assert len(made) == len(documents)


def fields_of(node: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Paths of all named fields; of a list, those of its first entry of each form."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield (*path, key)
            if key not in FREE_KEYS:
                yield from fields_of(value, (*path, key))
    elif isinstance(node, list):
        forms = {tuple(sorted(each)): number for number, each in reversed(list(enumerate(node))) if isinstance(each, dict)}
        for number in forms.values():
            yield from fields_of(node[number], (*path, number))


def with_field(document: Document, path: tuple[str | int, ...], name: str, value: Any) -> Document:
    """A copy whose field at `path` has this name and value."""
    copied: Document = copy.deepcopy(document)
    node: Any = copied["spec"]
    for part in path[:-1]:
        node = node[part]
    del node[path[-1]]
    node[name] = value
    return copied


def test_a_wrong_field_or_type_in_a_monitor_or_rule_is_refused(monitoring: Kube) -> None:
    settings = [f"metrics.{name}.create=true" for name in ("service", "serviceMonitor", "podMonitor", "prometheusRule")]
    secured = ("metrics.authentication=true", "metrics.tls.secretName=metrics-tls")
    documents = [each for each in rendered(*settings, *secured) if each["kind"] in SPECS]
    assert {each["kind"] for each in documents} == SPECS.keys()
    tried = 0
    for document in documents:
        path = f"/apis/{GROUP}/v1/namespaces/default/{document['kind'].lower()}s?dryRun=All&fieldValidation=Strict"
        document["metadata"]["namespace"] = "default"
        monitoring.request("POST", path, document)
        for place in fields_of(document["spec"]):
            name = str(place[-1])
            for wrong in (with_field(document, place, f"{name}x", "x"), with_field(document, place, name, {"x": {"x": 1}})):
                tried += 1
                with pytest.raises(RefusedError, match=name):
                    monitoring.request("POST", path, wrong)
    assert tried > 60


def test_the_definitions_are_rendered_with_and_without_keeping_them(installed: Installed, tmp_path: Path) -> None:
    for keep in (True, False):
        documents = template(installed, {"crds": {"keep": keep}}, tmp_path / "values.json")
        kept = [
            "helm.sh/resource-policy" in (each["metadata"].get("annotations") or {})
            for each in documents
            if each["kind"].startswith("CustomRes")
        ]
        assert kept == [keep, keep]


def is_text_or_free(said: Mapping[str, Any]) -> bool:
    return "enum" not in said and said.get("type", "object") in ("string", "object")


def test_every_value_of_a_wrong_type_and_every_unknown_name_is_refused_by_name(installed: Installed, tmp_path: Path) -> None:
    known = dict(leaves(schema()))
    wrong = {place: 5 if is_text_or_free(said) else {"surprise": []} for place, said in known.items()}
    with pytest.raises(ClusterError) as refused:
        template(installed, nested(wrong), tmp_path / "values.json")
    named = {path.replace("/", ".") for path in re.findall(r"at '/([^']+)'", str(refused.value))}
    assert set(known) - named == set()
    unknown = {f"{place}.surprise".lstrip("."): 1 for place in closed(schema())}
    with pytest.raises(ClusterError) as refused:
        template(installed, nested(unknown), tmp_path / "values.json")
    assert str(refused.value).count("'surprise' not allowed") == len(unknown)
