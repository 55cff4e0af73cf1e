"""The CRDs: what is committed is what the models say, and what cannot be translated is refused."""

from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field, StringConstraints

from finetune_job import crd
from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.profile import Resources
from finetune_job.rules.cel import CONDITIONS
from finetune_job.rules.cel.condition import CelCondition

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("directory", ["crds", "charts/finetune-operator/files/crds"])
def test_the_committed_files_are_current(directory: str) -> None:
    committed = {path.name: path.read_text() for path in (ROOT / directory).glob("*.yaml")}
    assert committed == crd.files(), "run `make generate`"


def _nodes(node: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    found = [(path, node)]
    for name, child in node.get("properties", {}).items():
        found += _nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in node:
            found += _nodes(node[key], f"{path}[]")
    return found


def test_every_field_of_the_spec_is_documented_and_bounded() -> None:
    for path, node in _nodes(crd.structural_schema(FineTuneJobSpec)):
        assert "type" in node, path
        if not path.endswith("[]"):
            assert node.get("description"), path
        if node["type"] == "string":
            assert "enum" in node or "maxLength" in node, path
        if path.rpartition(".")[2] in ("source", "destination", "learningRate", "loraDropout"):
            assert "pattern" in node, path
        if node["type"] == "array":
            assert "maxItems" in node, path
        if node["type"] == "integer":
            assert "minimum" in node, path
        assert node["type"] != "number", f"{path}: floats do not belong in a spec"


def test_every_part_of_the_spec_is_frozen_and_of_run_the_queue_and_the_priority() -> None:
    rules = crd.job_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["x-kubernetes-validations"]
    frozen = {rule["fieldPath"] for rule in rules if "startTime" in rule["rule"]}
    parts = {f".spec.{info.alias or name}" for name, info in FineTuneJobSpec.model_fields.items() if name != "run"}
    assert frozen == {*parts, ".spec.run.queueName", ".spec.run.priorityClassName"}


def test_every_condition_names_the_rule_that_refuses_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = crd.job_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    found = [one["message"] for _, node in _nodes(spec) for one in node.get("x-kubernetes-validations", ())]
    of_rules = [message for message in found if not message.startswith(crd.KEY_LENGTH)]
    assert sorted(of_rules) == sorted(condition.message for condition in CONDITIONS)
    for other in ("no-such-rule", "no-effect-momentum"):
        monkeypatch.setattr(crd, "CONDITIONS", [CelCondition(other, "training", "true", "")])
        with pytest.raises(ValueError, match=other):
            crd.job_crd()


def test_roles_have_resources_of_their_own_whole_and_in_part() -> None:
    resources = crd.profile_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"][
        "resources"
    ]
    train = resources["properties"]["train"]
    assert train["default"] == {"cpu": "8", "memory": "64Gi", "sharedMemory": "8Gi"}
    assert {name: field["default"] for name, field in train["properties"].items()} == train["default"]
    assert resources["default"] == Resources().model_dump(mode="json", by_alias=True)


def test_status_has_no_defaults() -> None:
    status = crd.job_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
    assert [path for path, node in _nodes(status) if "default" in node] == []


def test_free_form_objects_are_arguments_of_a_template_and_settings_of_a_method() -> None:
    free = [
        path for path, node in _nodes(crd.structural_schema(FineTuneJobSpec)) if "x-kubernetes-preserve-unknown-fields" in node
    ]
    assert free == [".data.templateArguments", ".method.settings"]


def test_a_free_form_object_without_a_largest_size_is_refused() -> None:
    class Free(BaseModel):
        value: dict[str, Any]

    with pytest.raises(crd.UnknownKeywordError, match="maximum number of fields"):
        crd.structural_schema(Free)


def test_what_has_no_translation_is_refused() -> None:
    class Union(BaseModel):
        value: int | str

    class Multiple(BaseModel):
        value: Annotated[int, Field(multiple_of=8)]

    class Lower(BaseModel):
        value: dict[Annotated[str, StringConstraints(min_length=3)], int]

    with pytest.raises(crd.UnknownKeywordError, match="union"):
        crd.structural_schema(Union)
    with pytest.raises(crd.UnknownKeywordError, match="multipleOf"):
        crd.structural_schema(Multiple)
    with pytest.raises(crd.UnknownKeywordError, match="maximum length"):
        crd.structural_schema(Lower)
