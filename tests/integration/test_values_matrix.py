"""All values of the chart, any two of them together: the schema takes them, helm renders them, the API server would take the
objects. And all of them wrong: each is refused by its name.
"""

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
from tests.support.cases import table
from tests.support.prometheus import rendered
from tools.cluster.errors import ClusterError, wait_until

pytestmark = pytest.mark.integration
SAMPLES: Mapping[str, list[Any]] = table(__file__, "SAMPLES")
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


@pytest.mark.nightly
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


def test_every_value_of_a_wrong_type_and_every_unknown_name_is_refused_by_name(installed: Installed, tmp_path: Path) -> None:
    known = dict(leaves(schema()))
    wrong = {
        place: 5 if "enum" not in said and said.get("type", "object") in ("string", "object") else {"surprise": []}
        for place, said in known.items()
    }
    with pytest.raises(ClusterError) as refused:
        template(installed, nested(wrong), tmp_path / "values.json")
    named = {path.replace("/", ".") for path in re.findall(r"at '/([^']+)'", str(refused.value))}
    assert set(known) - named == set()
    unknown = {f"{place}.surprise".lstrip("."): 1 for place in closed(schema())}
    with pytest.raises(ClusterError) as refused:
        template(installed, nested(unknown), tmp_path / "values.json")
    assert str(refused.value).count("'surprise' not allowed") == len(unknown)
