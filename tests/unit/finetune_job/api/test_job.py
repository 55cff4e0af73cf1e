"""What a manifest may say, and what each mistake is answered with."""

import copy
import re
from typing import Any

import pytest
from pydantic import ValidationError

from finetune_job.api.base import ClaimPath, claim_path, size_bytes
from finetune_job.api.inputs import DataSpec
from finetune_job.api.job import parse_job
from tests.support.cases import table

MINIMAL: dict[str, Any] = {
    "apiVersion": "finetune.dev/v1alpha1",
    "kind": "FineTuneJob",
    "metadata": {"name": "run", "namespace": "team", "uid": "0123456789ab", "labels": {"kept": "by Kubernetes"}},
    "spec": {
        "model": {"source": "pvc://models/llama"},
        "data": {"source": "pvc://data/train.jsonl"},
        "training": {"epochs": 1},
        "output": {"destination": "pvc://out/run"},
        "workspace": {"claimName": "work"},
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """The minimal manifest with one field set."""
    document = copy.deepcopy(MINIMAL)
    *parents, last = path.split(".")
    node = document
    for name in parents:
        node = node.setdefault(name, {})
    node[last] = value
    return document


def test_the_minimal_manifest_is_accepted() -> None:
    job = parse_job(MINIMAL)
    assert job.metadata.name == "run"
    assert job.spec.method.type == "LoRA"
    assert job.spec.parallelism.fsdp.version == 2


@pytest.mark.parametrize(("path", "value", "words"), table(__file__, "test_a_mistake_names_its_field"))
def test_a_mistake_names_its_field(path: str, value: Any, words: str) -> None:
    with pytest.raises(ValidationError) as raised:
        parse_job(changed(path, value))
    (error,) = raised.value.errors()
    assert ".".join(map(str, error["loc"])) == path
    assert words in error["msg"]


def test_sources_and_sizes_are_read() -> None:
    assert claim_path("pvc://models/a/b/") == ClaimPath(claim="models", path="a/b")
    assert claim_path("pvc://models") == ClaimPath(claim="models", path="")
    assert (size_bytes("5GB"), size_bytes("512Mi"), size_bytes("7")) == (5 * 10**9, 512 * 2**20, 7)
    with pytest.raises(ValueError, match="not a size"):
        size_bytes("5 GB")


@pytest.mark.parametrize("path", ["spec.fetch", "spec.method", "spec.parallelism.fsdp", "spec.run", "spec.checkpoint"])
def test_a_field_without_content_is_unset(path: str) -> None:
    """As the API server has it: `fetch:` with every line below it commented out."""
    assert parse_job(changed(path, None)).spec == parse_job(MINIMAL).spec


def test_what_is_required_cannot_be_empty() -> None:
    with pytest.raises(ValidationError, match="source"):
        parse_job(changed("spec.model.source", None))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"reasoning-effort": "high"}, "'reasoning-effort' is not the name of a variable in Jinja"),
        ({"messages": []}, "messages has a value for each chat"),
        ({"effort": 0.5}, 'write "0.5" in quotes'),
        ({f"a{number}": 1 for number in range(65)}, "at most 64 items"),
    ],
)
def test_arguments_that_no_template_takes_are_refused(arguments: dict[str, object], reason: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(reason)):
        DataSpec.model_validate({"source": "pvc://data/train.jsonl", "templateArguments": arguments})
