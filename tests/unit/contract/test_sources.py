"""What a source may look like, and what it is taken apart into."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from finetune_job.api.base import BucketPath, ClaimPath, HubPath, Source, parse_source


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
