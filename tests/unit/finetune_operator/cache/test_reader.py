"""What is held is parsed once for each version, and never taken for another version."""

from typing import Any

import pytest

from finetune_operator.cache import reader as module
from finetune_operator.cache.projection import project
from finetune_operator.cache.reader import Reader
from finetune_operator.client.kinds import JOBS, PROFILES
from tests.unit.finetune_operator import objects

STATUS = {"phase": "Pending", "conditions": []}


def profile(version: int, **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {**objects.metadata("default", "profile-uid", version)},
        "spec": {"trainerImage": "registry.example/a", **spec},
    }


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was parsed."""
    names: list[str] = []
    for name in ("parse_job", "read_status"):
        original = getattr(module, name)

        def counted(content: Any, name: str = name, original: Any = original) -> Any:
            names.append(name)
            return original(content)

        monkeypatch.setattr(module, name, counted)
    return names


@pytest.mark.parametrize(
    ("metadata", "deleting", "orphaning"),
    [
        ({}, False, False),
        ({"finalizers": ["orphan"]}, False, False),
        ({"deletionTimestamp": objects.CREATED}, True, False),
        ({"deletionTimestamp": objects.CREATED, "finalizers": ["example.com/orphan", "foregroundDeletion"]}, True, False),
        ({"deletionTimestamp": objects.CREATED, "finalizers": ["example.com/hold", "orphan"]}, True, True),
        ({"deletionTimestamp": objects.CREATED, "finalizers": "orphan"}, True, False),
        ({"deletionTimestamp": objects.CREATED, "finalizers": None}, True, False),
    ],
)
def test_deletion_says_whether_children_are_to_stay(metadata: dict[str, Any], deleting: bool, orphaning: bool) -> None:
    document = objects.finetune_job()
    document["metadata"] |= metadata
    view = Reader().job(project(JOBS, document)).view
    assert (view.deleting, view.orphaning) == (deleting, orphaning)


def test_same_version_is_parsed_once(parsed: list[str]) -> None:
    reader, held = Reader(), project(JOBS, objects.finetune_job(status=STATUS))
    first = reader.job(held)
    assert reader.job(held) is first
    assert parsed == ["parse_job", "read_status"]
    assert first.raw_status == STATUS
    assert first.view.resource_version == "1"


def test_new_status_leaves_the_manifest_parsed(parsed: list[str]) -> None:
    reader = Reader()
    before = reader.job(project(JOBS, objects.finetune_job(version=1)))
    after = reader.job(project(JOBS, objects.finetune_job(version=2, status={"phase": "Training"})))
    assert after.view.spec is before.view.spec
    assert (before.view.status.phase, after.view.status.phase) == ("", "Training")
    assert after.view.resource_version == "2"
    assert parsed == ["parse_job", "read_status", "read_status"]


def test_changed_manifest_is_parsed_again_whatever_its_generation_says() -> None:
    reader = Reader()
    specs = [reader.job(project(JOBS, objects.finetune_job(version=1, profile="a"))).view.spec]
    specs.append(reader.job(project(JOBS, objects.finetune_job(version=2, profile="b"))).view.spec)
    specs.append(reader.job(project(JOBS, objects.finetune_job(version=3, profile="a"))).view.spec)
    assert [spec.profile if spec is not None else None for spec in specs] == ["a", "b", "a"]


def test_manifest_that_does_not_parse_has_its_reason_and_may_be_corrected() -> None:
    reader = Reader()
    bad = reader.job(project(JOBS, objects.finetune_job(version=1, training={"maxSteps": "many"})))
    assert bad.view.spec is None
    assert "spec.training.maxSteps" in bad.view.spec_error
    assert reader.job(project(JOBS, objects.finetune_job(version=2))).view.spec is not None


def test_job_of_the_same_name_is_another_job() -> None:
    reader = Reader()
    reader.job(project(JOBS, objects.finetune_job(version=1, uid="a", profile="a")))
    spec = reader.job(project(JOBS, objects.finetune_job(version=1, uid="b", profile="b"))).view.spec
    assert spec.profile == "b"


def test_profile_is_read_again_when_it_changes() -> None:
    reader = Reader()
    one = reader.profile(project(PROFILES, profile(1)))
    assert reader.profile(project(PROFILES, profile(1))) is one
    assert one.spec is not None
    wrong = reader.profile(project(PROFILES, profile(2, maxActiveJobs="many")))
    assert wrong.spec is None
    assert "maxActiveJobs" in wrong.error
    assert wrong.name == "default"


def test_what_is_finished_or_gone_is_not_kept(parsed: list[str]) -> None:
    finished = {"type": "Finished", "status": "True", "reason": "Completed", "message": "", "lastTransitionTime": objects.CREATED}
    reader, job = Reader(), project(JOBS, objects.finetune_job(version=1))
    reader.job(job)
    reader.forget(job.key.uid)
    reader.job(job)
    reader.job(project(JOBS, objects.finetune_job(version=2, status={"conditions": [finished]})))
    assert parsed == ["parse_job", "read_status", "parse_job", "read_status", "read_status"]
    assert reader._jobs == {}


def test_what_is_large_is_read_again_each_time_and_never_kept(parsed: list[str]) -> None:
    """A tenant with a thousand manifests at the limit would otherwise take the operator's memory."""
    large = {**objects.finetune_job()["spec"], "data": {"source": "pvc://data/a", "format": "Chat", "chatTemplate": "x" * 65_536}}
    reader, held = Reader(), project(JOBS, {**objects.finetune_job(status=STATUS), "spec": large})
    assert reader.job(held).view.spec == reader.job(held).view.spec is not None
    assert parsed == ["parse_job", "read_status"] * 2
    assert reader._jobs == {}


def test_reasons_of_a_manifest_are_bounded() -> None:
    wrong = {**objects.finetune_job()["spec"], **{f"surprise{number}": 1 for number in range(5000)}}
    error = Reader().job(project(JOBS, {**objects.finetune_job(), "spec": wrong})).view.spec_error
    assert error.count("\n") == 32
    assert error.endswith("and 4968 more")
