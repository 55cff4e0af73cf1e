"""What sources and destinations may look like, and what they are taken apart into."""

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from finetune_job.api.base import (
    ApiModel,
    BucketPath,
    ClaimPath,
    Destination,
    HubPath,
    RegistryPath,
    Source,
    adapter_repository,
    parse_destination,
    parse_source,
)
from finetune_job.api.job import FineTuneJob
from finetune_job.api.profile import FineTuneProfile
from finetune_job.plan.run_plan import RunPlan


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("pvc://models/a/b/", ClaimPath(claim="models", path="a/b")),
        ("hf://org/model", HubPath(repository="org/model", is_dataset=False)),
        ("hf://datasets/org/set/train/a.jsonl", HubPath(repository="org/set", is_dataset=True, path="train/a.jsonl")),
        ("s3://bucket", BucketPath(bucket="bucket")),
        ("s3://bucket/a/b=1/", BucketPath(bucket="bucket", prefix="a/b=1")),
    ],
)
def test_a_source_is_taken_apart(source, expected):
    assert TypeAdapter(Source).validate_python(source) == source
    assert parse_source(source) == expected


@pytest.mark.parametrize(
    "source",
    ["hf://datasets/squad", "hf://datasets/squad/", "hf://model", "hf://org/../x", "s3://bucket/a/../b", "s3://b", "file:///x"],
)
def test_what_is_no_source_is_refused(source):
    with pytest.raises(ValidationError):
        TypeAdapter(Source).validate_python(source)


@pytest.mark.parametrize(
    ("destination", "expected"),
    [
        ("pvc://results/a/", ClaimPath(claim="results", path="a")),
        ("hf://org/model", HubPath(repository="org/model", is_dataset=False)),
        ("s3://bucket/a/b", BucketPath(bucket="bucket", prefix="a/b")),
        ("oci://host/a", RegistryPath(registry="host", repository="a", tag="latest")),
        ("oci://host.test:5000/a/b-c__d:v1.2", RegistryPath(registry="host.test:5000", repository="a/b-c__d", tag="v1.2")),
        ("oci://10.0.0.1:5000/a", RegistryPath(registry="10.0.0.1:5000", repository="a", tag="latest")),
    ],
)
def test_a_destination_is_taken_apart(destination, expected):
    assert TypeAdapter(Destination).validate_python(destination) == destination
    assert parse_destination(destination) == expected


@pytest.mark.parametrize(
    "destination",
    [
        *("hf://datasets/set", "hf://org/model/path", "hf://datasets/org/set", "hf://org/.."),
        *("oci://host", "oci://host/Upper", "oci://host/a@sha256:0", "oci://host:port/a", "oci://host/a:", "oci://host//a"),
        *("s3://b", "file:///x", "pvc://results/../x", "https://host/a"),
    ],
)
def test_what_is_no_destination_is_refused(destination):
    with pytest.raises(ValidationError):
        TypeAdapter(Destination).validate_python(destination)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("tuned", "tuned-adapter"), ("a" * 96, "a" * 88 + "-adapter"), ("a" * 87 + "-bcdefghi", "a" * 87 + "-adapter")],
    ids=["short", "too long", "cut behind a dash"],
)
def test_the_adapter_s_repository_has_a_name_that_the_hub_takes(name, expected):
    place = HubPath(repository=f"org/{name}", is_dataset=False)
    assert adapter_repository(place) == HubPath(repository=f"org/{expected}", is_dataset=False)


def test_a_default_that_is_a_model_is_the_one_that_an_empty_object_gives():
    """Defaults are not validated when their class is read: that would build every model at every start."""
    found = 0
    for model in (FineTuneJob, FineTuneProfile, RunPlan, *ApiModel.__subclasses__()):
        for name, field in model.model_fields.items():
            if isinstance(field.default, BaseModel):
                found += 1
                empty = type(field.default).model_validate({})
                assert (model, name, field.default) == (model, name, empty)
                assert field.default.model_dump() == empty.model_dump()
    assert found > 20
