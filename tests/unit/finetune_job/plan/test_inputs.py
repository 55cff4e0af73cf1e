"""The sources of a job: how fields name them, where they are, and what is fetched first."""

from typing import Any

import pytest

from finetune_job.api.base import ClaimPath
from finetune_job.api.inputs import ModelSpec
from finetune_job.api.job import FineTuneJobSpec, parse_job
from finetune_job.api.profile import FetchSettings, FineTuneProfileSpec
from finetune_job.plan.choices import Choices
from finetune_job.plan.inputs import base_model_name, input_locations, named_sources, training_sets
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import JobIdentity
from tests.unit.finetune_job.api.test_job import changed

COMMIT = "0" * 40
SEVERAL: dict[str, Any] = {
    "datasets": [
        {"source": "hf://datasets/org/chats/train", "revision": COMMIT},
        {"source": "pvc://data/more.jsonl", "weight": "0.5"},
    ],
    "validation": {"source": "s3://bucket/held-out"},
}


def spec(data: dict[str, Any]) -> FineTuneJobSpec:
    return parse_job(changed("spec.data", data)).spec


def test_every_source_is_named_by_its_field() -> None:
    assert [(named.field, named.source, named.revision, named.is_model) for named in named_sources(spec(SEVERAL))] == [
        ("model.source", "pvc://models/llama", None, True),
        ("data.datasets[0].source", "hf://datasets/org/chats/train", COMMIT, False),
        ("data.datasets[1].source", "pvc://data/more.jsonl", None, False),
        ("data.validation.source", "s3://bucket/held-out", None, False),
    ]


def test_a_single_source_is_a_data_set_of_its_own() -> None:
    ((path, dataset),) = training_sets(spec({"source": "pvc://data/train.jsonl"}).data)
    assert (path, dataset.source, dataset.weight) == ("data", "pvc://data/train.jsonl", "1")
    assert training_sets(spec({}).data) == []


def test_what_is_outside_the_cluster_is_fetched_to_the_workspace() -> None:
    profile = FineTuneProfileSpec(trainer_image="trainer", fetch=FetchSettings(s3_region="eu-1"))
    plan = resolve(JobIdentity(namespace="team", name="run", uid="0123456789ab"), spec(SEVERAL), profile)
    assert plan.fetch is not None
    sources = "run-01234567/sources"
    assert [(item.source, item.revision, item.target) for item in plan.fetch.items] == [
        ("hf://datasets/org/chats/train", COMMIT, ClaimPath(claim="work", path=f"{sources}/data-0")),
        ("s3://bucket/held-out", None, ClaimPath(claim="work", path=f"{sources}/validation")),
    ]
    assert (plan.fetch.s3_region, plan.fetch.hub_token) == ("eu-1", None)
    assert input_locations(plan) == [
        ("spec.model.source", ClaimPath(claim="models", path="llama")),
        ("spec.data.datasets[0].source", ClaimPath(claim="work", path=f"{sources}/data-0")),
        ("spec.data.datasets[1].source", ClaimPath(claim="data", path="more.jsonl")),
        ("spec.data.validation.source", ClaimPath(claim="work", path=f"{sources}/validation")),
    ]


def test_nothing_is_fetched_for_claims() -> None:
    plan = resolve(JobIdentity(namespace="team", name="run", uid=""), spec({"source": "pvc://data/a"}), None)
    assert plan.fetch is None


@pytest.mark.parametrize(
    ("model", "trains_adapter", "name", "is_told"),
    [
        (ModelSpec(source="hf://org/base"), True, "org/base", False),
        (ModelSpec(source="s3://bucket/base", hub_name="org/base"), True, "org/base", False),
        (ModelSpec(source="pvc://models/base"), False, "pvc://models/base", False),
        (ModelSpec(source="pvc://models/base"), True, "pvc://models/base", True),
    ],
)
def test_a_base_has_the_name_of_its_repository(model: ModelSpec, trains_adapter: bool, name: str, is_told: bool) -> None:
    """A name under which no adapter finds its base is told with the values that were left open."""
    choices = Choices()
    assert base_model_name(model, choices, trains_adapter=trains_adapter) == name
    told = [(choice.field, choice.value, "AutoPeftModel cannot load it" in choice.reason) for choice in choices.made]
    assert told == ([("spec.model.hubName", "pvc://models/base", True)] if is_told else [])
