"""The schema of the chart's values: its generated part, and that it knows every value there is; and the chart's README."""

import json
import re
from typing import Any

import jsonschema
import pytest
import yaml

from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.names import OBSERVE_PORT
from tests.unit.finetune_job.rules.manifests import judged, manifest
from tools import chart_readme, dashboards, values_schema

CHART = values_schema.FILE.parent


def values() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return loaded


def schema() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(values_schema.FILE.read_text())
    return loaded


def test_the_profile_follows_the_api_model() -> None:
    current = values_schema.FILE.read_text()
    assert values_schema.text(current) == current, "run `make generate`"


def test_the_readme_has_every_value_with_its_default_and_comment() -> None:
    written = chart_readme.FILE.read_text()
    assert written == chart_readme.text(), "run `make generate`"
    assert "| admission.operator.requireDigest | `false` | Allow only images that are named by digest. |" in written
    assert "| networkPolicy.apiServerPorts | `[443, 6443]` |  |" in written


def test_every_value_has_its_place_in_the_schema_and_the_other_way_round() -> None:
    def known(node: dict[str, Any], place: str = "") -> set[str]:
        properties = node.get("properties")
        return set().union(*(known(child, f"{place}.{name}") for name, child in properties.items())) if properties else {place}

    def written(node: Any, of: dict[str, Any], place: str = "") -> set[str]:
        if "properties" not in of:
            return {place}
        return set().union(*(written(child, of["properties"].get(name, {}), f"{place}.{name}") for name, child in node.items()))

    assert written(values(), schema()) == known(schema())


def test_the_defaults_pass() -> None:
    jsonschema.validate(values(), schema())


@pytest.mark.parametrize(("nodes", "ranks", "refused"), [(16, 4, False), (17, 1, True), (5, 13, True), (64, 16, True)])
def test_the_default_profile_bounds_what_one_job_takes(nodes: int, ranks: int, refused: bool) -> None:
    gpu = {"resourceName": "nvidia.com/gpu", "memory": "80Gi"}
    profile = FineTuneProfileSpec.model_validate({**values()["profiles"]["default"], "trainerImage": "trainer", "gpu": gpu})
    wanted = {"parallelism.nodes": nodes, "parallelism.processesPerNode": ranks, "training.globalBatchSize": nodes * ranks}
    found = judged(manifest(wanted), profile)
    assert ("profile-limit-exceeded" in {finding.rule for finding in found}) is refused


@pytest.mark.parametrize(
    ("profile", "place"),
    [
        ({"trainerImge": "x"}, []),
        ({"gpu": {"memory": "lots"}}, ["gpu", "memory"]),
        ({"resources": {"train": {"cpus": "8"}}}, ["resources", "train"]),
        ({"maxActiveJobs": "3"}, ["maxActiveJobs"]),
        ({"publish": {"allowedDestinations": [""]}}, ["publish", "allowedDestinations", 0]),
        ({"pods": {"train": {"tolerations": [{"effect": "Never"}]}}}, ["pods", "train", "tolerations", 0, "effect"]),
    ],
)
def test_a_wrong_field_of_a_profile_is_found_at_its_place(profile: dict[str, Any], place: list[str | int]) -> None:
    wrong = values() | {"profiles": {"default": profile}}
    (error,) = jsonschema.Draft7Validator(schema()).iter_errors(wrong)
    assert list(error.absolute_path) == ["profiles", "default", *place]


def test_free_forms_of_kubernetes_stay_open() -> None:
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}}
    jsonschema.validate(values() | {"profiles": {"default": {"pods": {"train": {"affinity": affinity}}}}}, schema())


def test_the_operator_may_reach_the_port_of_rank_0() -> None:
    policy = (CHART / "templates" / "networkpolicy.yaml").read_text()
    assert f"- ports: [{{protocol: TCP, port: {OBSERVE_PORT}}}]" in policy


def test_the_dashboards_are_the_generated_ones_and_name_no_installation() -> None:
    for board in dashboards.DASHBOARDS:
        text = (dashboards.DIRECTORY / f"{board}.json").read_text()
        assert text == dashboards.text(board), "run `make generate`"
        assert set(re.findall(r'"uid": "([^"]*)"', text)) == {"${datasource}"}
        assert json.loads(text)["templating"]["list"][0] == {
            "name": "datasource",
            "type": "datasource",
            "query": "prometheus",
            "label": "Data source",
        }
    assert {path.stem for path in dashboards.DIRECTORY.iterdir()} == {"fleet", "run", "team"} == set(dashboards.DASHBOARDS)


def test_the_profile_for_gpus_that_values_yaml_shows_is_one() -> None:
    shown = re.findall(r"^    # ((?:gpu|pods): \{.*)$", (CHART / "values.yaml").read_text(), re.MULTILINE)
    profile = yaml.safe_load("\n".join(shown))
    assert set(profile) == {"gpu", "pods"}
    assert profile["pods"]["train"]["tolerations"][0]["key"] == profile["gpu"]["resourceName"]
    jsonschema.validate({"profiles": {"default": profile}}, schema())
