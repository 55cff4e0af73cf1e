"""Everything that a tenant or an administrator can write has a greatest size, in every schema, and the whole has one, too."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from finetune_job import crd

Schema = dict[str, Any]
UNBOUNDED_FORM = re.compile(r"[*+]|\{\d+,\}")
"""What repeats without an end in a pattern."""
OF_KUBERNETES = ("FineTuneJob.apiVersion", "FineTuneJob.kind", "FineTuneJob.metadata", "FineTuneProfile.apiVersion",
                 "FineTuneProfile.kind", "FineTuneProfile.metadata")  # fmt: skip
"""Checked by the API server for every object; a definition may not say more of them."""
MEASURED_BY_THE_MODELS = re.compile(
    r"FineTuneJob\.spec\.(method\.settings|data\.templateArguments)|FineTuneProfile\.spec\.pods\.\w+\.affinity\.\w+"
)
"""No schema can bound what is below a free-form object: `finetune_job.api.size` measures the whole spec before it is read."""


def unbounded(node: Schema, path: str) -> Iterator[str]:
    """Paths under which a value of any size is allowed, with what is missing."""
    if path in OF_KUBERNETES or "enum" in node:
        return
    match node.get("type"):
        case "string":
            if "maxLength" not in node and ("pattern" not in node or UNBOUNDED_FORM.search(node["pattern"])):
                yield f"{path}: a text without maxLength"
        case "array":
            if "maxItems" not in node:
                yield f"{path}: a list without maxItems"
            yield from unbounded(node["items"], f"{path}[]")
        case "object":
            yield from _unbounded_object(node, path)
        case "integer" | "boolean":
            return
        case other:
            yield f"{path}: a value of type {other}, of any size"


def _unbounded_object(node: Schema, path: str) -> Iterator[str]:
    for name, child in node.get("properties", {}).items():
        yield from unbounded(child, f"{path}.{name}")
    if node.get("x-kubernetes-preserve-unknown-fields") and not MEASURED_BY_THE_MODELS.fullmatch(path):
        yield f"{path}: free-form"
    if "additionalProperties" in node:
        if "maxProperties" not in node:
            yield f"{path}: a map without maxProperties"
        rules = [rule["rule"] for rule in node.get("x-kubernetes-validations", ())]
        if not any(re.match(r"self\.all\(key, key\.size\(\) <= \d+[ )]", rule) for rule in rules):
            yield f"{path}: a map with keys of any length"
        yield from unbounded(node["additionalProperties"], f"{path}{{}}")
    elif "properties" not in node and "x-kubernetes-preserve-unknown-fields" not in node:
        yield f"{path}: an object of which nothing is known"


@pytest.mark.parametrize("definition", [crd.job_crd(), crd.profile_crd()], ids=["job", "profile"])
def test_every_part_of_a_definition_has_a_greatest_size(definition: Schema) -> None:
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert list(unbounded(schema, definition["spec"]["names"]["kind"])) == []


@pytest.mark.parametrize(
    "node",
    [
        {"type": "string"},
        {"type": "string", "pattern": "^[a-z]+$"},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "maxItems": 3, "items": {"type": "string"}},
        {"type": "object", "properties": {"a": {"type": "string"}}},
        {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 3},
        {"type": "object", "x-kubernetes-preserve-unknown-fields": True, "maxProperties": 3},
        {"type": "object"},
        {"x-kubernetes-preserve-unknown-fields": True},
        {"x-kubernetes-int-or-string": True},
    ],
)
def test_what_has_no_greatest_size_is_seen(node: Schema) -> None:
    assert len(list(unbounded(node, "of"))) == 1
