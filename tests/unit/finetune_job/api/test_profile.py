"""What a profile lets through, and what it takes."""

import pytest
from pydantic import ValidationError

from finetune_job.api.profile import FineTuneProfileSpec, is_allowed
from tests.support.cases import table


@pytest.mark.parametrize(("address", "beginning", "allowed"), table(__file__, "test_whole_segments_of_an_address_are_compared"))
def test_whole_segments_of_an_address_are_compared(address: str, beginning: str, allowed: bool) -> None:
    assert is_allowed(address, ["hf://someone-else", beginning]) is allowed


@pytest.mark.parametrize(
    ("allowed", "namespaces"),
    [
        (None, ["team", "team-a", "tea", "a-team", ""]),
        ([], []),
        (["*"], ["team", "team-a", "tea", "a-team", ""]),
        (["team"], ["team"]),
        (["team*"], ["team", "team-a"]),
        (["team-*"], ["team-a"]),
    ],
)
def test_a_star_stands_for_the_rest_of_a_namespace(allowed: list[str] | None, namespaces: list[str]) -> None:
    profile = FineTuneProfileSpec(trainer_image="trainer", allowed_namespaces=allowed)
    assert [each for each in ("team", "team-a", "tea", "a-team", "") if profile.allows_namespace(each)] == namespaces


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
