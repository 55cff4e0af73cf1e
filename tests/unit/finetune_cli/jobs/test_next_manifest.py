"""Manifests made from jobs: their names, what they keep, where their results go, and changes as people write them."""

import pytest

from finetune_cli.exit_codes import LocalError
from finetune_cli.jobs.next_manifest import copy_of, fork_of, next_name, other_destination, parse_change, start_changes
from finetune_job.finding import FieldChange
from tests.support.cases import table

JOB = {
    "apiVersion": "finetune.dev/v1alpha1",
    "kind": "FineTuneJob",
    "metadata": {"name": "tune", "namespace": "team", "uid": "u", "labels": {"a": "b"}, "managedFields": [{}], "generation": 3},
    "spec": {
        "model": {"source": "pvc://models/base"},
        "output": {"destination": "pvc://results/tune"},
        "run": {"suspend": True, "cancel": True, "retry": 4, "maxRestarts": 1},
    },
    "status": {"phase": "Failed"},
}


@pytest.mark.parametrize(("name", "taken", "expected"), table(__file__, "test_the_next_name_is_free_and_short_enough"))
def test_the_next_name_is_free_and_short_enough(name: str, taken: list[str], expected: str) -> None:
    assert next_name(name, taken) == expected
    assert len(expected) <= 63


def test_a_copy_keeps_spec_and_labels_and_nothing_of_the_run() -> None:
    made = copy_of(JOB, "tune-2")
    assert made == {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": "tune-2", "labels": {"a": "b"}},
        "spec": {
            "model": {"source": "pvc://models/base"},
            "output": {"destination": "pvc://results/tune"},
            "run": {"maxRestarts": 1},
        },
    }
    assert JOB["spec"]["run"]["suspend"] is True, "the job that was read stays as it was"
    ended = {**JOB, "spec": {**JOB["spec"], "run": {"cancel": True}}}
    assert "run" not in copy_of(ended, "tune-2")["spec"]


@pytest.mark.parametrize(("destination", "expected"), table(__file__, "test_results_of_a_fork_go_to_a_place_of_their_own"))
def test_results_of_a_fork_go_to_a_place_of_their_own(destination: str, expected: str) -> None:
    assert other_destination(destination, "tune-2") == expected


def test_a_fork_has_its_changes_and_leaves_a_named_destination_alone() -> None:
    changes = [parse_change("training.maxSteps=20"), parse_change("output.destination=pvc://results/here")]
    made = fork_of(JOB, "next", changes)
    assert made["spec"]["training"] == {"maxSteps": 20}
    assert made["spec"]["output"] == {"destination": "pvc://results/here"}
    assert fork_of(JOB, "next", [parse_change("run.maxRestarts=")])["spec"]["run"] == {}
    assert fork_of(JOB, "next", [])["spec"]["output"] == {"destination": "pvc://results/next"}
    # What else is changed of the output says nothing of the place.
    made = fork_of(JOB, "next", [parse_change("output.sampleAnswers=0")])
    assert made["spec"]["output"] == {"destination": "pvc://results/next", "sampleAnswers": 0}
    removed = fork_of(JOB, "next", [FieldChange(field="spec.output", value={"destination": "s3://bucket/all"})])
    assert removed["spec"]["output"] == {"destination": "s3://bucket/all"}


@pytest.mark.parametrize(("text", "path", "value"), table(__file__, "test_a_change_has_the_type_of_its_field"))
def test_a_change_has_the_type_of_its_field(text: str, path: str, value: object) -> None:
    assert parse_change(text) == FieldChange(field=path, value=value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("training.maxSteps", "is not of the form PATH=VALUE"),
        ("training.maxStep=3", "no field spec.training.maxStep; `finetune explain spec.training.maxStep`"),
        ("metadata.name=x", "no field metadata.name"),
        ("training.maxSteps=[", "is not YAML"),
        ("method.lora.targetModules=" + "[" * 5000, "is not YAML"),
        ("method.lora.targetModules=" + "a" * 70_000, "more than 65536 characters"),
    ],
)
def test_a_change_that_cannot_be_read_is_named(text: str, words: str) -> None:
    with pytest.raises(LocalError, match=words):
        parse_change(text)


def test_a_fork_begins_with_a_checkpoint_on_the_claim_of_its_origin() -> None:
    made = {**JOB, "metadata": {"name": "tune", "uid": "0a1b2c3d-4e5f"}}
    place = "tune-0a1b2c3d/checkpoints/step-0000000042"
    named = {**made, "spec": {**JOB["spec"], "workspace": {"claimName": "scratch"}}}
    forked = fork_of(named, "tune-2", start_changes(named, 42))["spec"]
    assert (forked["training"], forked["workspace"]) == ({"startFrom": place}, {"claimName": "scratch"})
    owned = {**made, "spec": {**JOB["spec"], "workspace": {"volumeClaimTemplate": {"storage": "1Gi"}, "retain": "Delete"}}}
    forked = fork_of(owned, "tune-2", start_changes(owned, 42))["spec"]
    assert (forked["training"], forked["workspace"]) == ({"startFrom": place}, {"claimName": "tune-workspace"})
    with pytest.raises(LocalError, match="--from: the job has no name or no uid"):
        start_changes({**named, "metadata": {"name": "tune"}}, 42)
    for broken in ({**named, "metadata": []}, {**made, "spec": {"workspace": "scratch"}}, made):
        with pytest.raises(LocalError, match=r"--from: the job has no metadata or no spec\.workspace"):
            start_changes(broken, 42)
