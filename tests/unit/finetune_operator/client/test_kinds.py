"""Paths of objects, and what is watched by which label."""

from __future__ import annotations

import pytest

from finetune_operator.client.kinds import BATCH_JOBS, CACHED, CONFIG_MAPS, JOBS, PODS, PROFILES, SERVICES, Kind, selector_of


@pytest.mark.parametrize("kind", [BATCH_JOBS, PODS, CONFIG_MAPS, SERVICES])
def test_children_are_watched_by_their_label_alone(kind: Kind) -> None:
    assert selector_of(kind) == "app.kubernetes.io/managed-by=finetune-operator"
    assert kind in CACHED


@pytest.mark.parametrize("kind", [JOBS, PROFILES])
def test_every_job_and_profile_is_watched(kind: Kind) -> None:
    assert selector_of(kind) is None
    assert kind in CACHED


@pytest.mark.parametrize(
    ("kind", "arguments", "path"),
    [
        (PODS, (), "/api/v1/pods"),
        (PODS, ("team",), "/api/v1/namespaces/team/pods"),
        (BATCH_JOBS, ("team", "a"), "/apis/batch/v1/namespaces/team/jobs/a"),
        (JOBS, ("team", "a", "status"), "/apis/finetune.dev/v1alpha1/namespaces/team/finetunejobs/a/status"),
        (PROFILES, ("team", "default"), "/apis/finetune.dev/v1alpha1/finetuneprofiles/default"),
    ],
)
def test_paths_have_a_namespace_only_for_kinds_that_live_in_one(kind: Kind, arguments: tuple[str, ...], path: str) -> None:
    assert kind.path(*arguments) == path
