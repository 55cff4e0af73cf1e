"""What a profile lets through, and what it takes."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from finetune_job.api.profile import FineTuneProfileSpec, is_allowed


@pytest.mark.parametrize(
    ("address", "beginning", "allowed"),
    [
        ("hf://our-org/model", "hf://our-org", True),
        ("hf://our-org/model", "hf://our-org/", True),
        ("hf://our-org/model", "hf://our-org/model", True),
        ("hf://our-organisation/model", "hf://our-org", False),
        ("s3://our-org/model", "hf://our-org", False),
        ("hf://our-org/model", "our-org", False),
        ("s3://bucket/team/a", "s3://bucket/team", True),
        ("s3://bucket", "s3://bucket/team", False),
        ("oci://host/team/model:v1", "oci://host/team/model", True),
        ("oci://host/team/model:v1", "oci://host/team/model:v1", True),
        ("oci://host/team/model:v1", "oci://host/team/model:v2", False),
        ("oci://host/team/model", "oci://host/team/model:latest", True),
    ],
)
def test_whole_segments_of_an_address_are_compared(address: str, beginning: str, allowed: bool) -> None:
    assert is_allowed(address, ["hf://someone-else", beginning]) is allowed


def test_no_beginning_allows_nothing() -> None:
    assert not is_allowed("hf://our-org/model", [])


def test_accelerators_are_not_asked_for_twice() -> None:
    gpus = {"trainer_image": "trainer", "gpu": {"resourceName": "nvidia.com/gpu"}}
    taken = {"train": {"extraResources": {"nvidia.com/gpu": "8"}}}
    with pytest.raises(ValidationError, match=r"is set by gpu\.resourceName; remove it here"):
        FineTuneProfileSpec.model_validate(gpus | {"pods": taken})
    other = {"train": {"extraResources": {"rdma/hca": "1"}}}
    assert FineTuneProfileSpec.model_validate(gpus | {"pods": other}).pods.train.extra_resources == {"rdma/hca": "1"}


def test_a_profile_has_a_greatest_size() -> None:
    with pytest.raises(ValidationError, match="no more than 131072"):
        FineTuneProfileSpec.model_validate({"trainer_image": "x" * 140_000})
