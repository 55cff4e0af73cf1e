"""Jobs of every release since the first are taken over in the middle and carried to their end: nothing is frozen or begun
again."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from finetune_job.api.status import FineTuneJobStatus
from finetune_job.failures import EXIT_CODES, FailureClass, parse_envelope
from finetune_job.names import Role
from finetune_job.plan.launch_plan import read_launch_plan
from finetune_job.plan.run_plan import RunPlan
from finetune_operator.children.cpu_jobs import cpu_job
from finetune_operator.children.frozen_run import FrozenRun, Owner
from tests.releases.recorded import RELEASES, SCENARIOS, TakenOverCluster, has_succeeded, recording, stages, taken_over
from tests.support.builders import UID

RESTARTED = ("train-failing", "train-restarting")
"""Stages in which the gang has failed, so that its Job is to be deleted and made again."""


@cache
def carried(release: str, scenario: str, stage: str) -> tuple[FineTuneJobStatus, TakenOverCluster]:
    """The status at that stage, and the cluster in the end."""
    cluster = taken_over(release, scenario, stage)
    before = cluster.status
    cluster.reconcile_once()
    cluster.settle()
    return before, cluster


@pytest.mark.parametrize(("release", "scenario", "stage"), stages())
def test_a_job_of_any_release_is_carried_to_its_end(release: str, scenario: str, stage: str) -> None:
    before, cluster = carried(release, scenario, stage)
    role, _, attempt = stage.removesuffix("-running").partition("-")
    assert has_succeeded(cluster), cluster.status.conditions
    assert cluster.status.start_time == before.start_time
    assert cluster.status.plan.hash == before.plan.hash or stage == "frozen", "the plan is not frozen again"
    made = {f"{one.kind}/{one.name}" for one in cluster.made}
    assert not made & cluster.found, "what was there is adopted"
    assert cluster.deleted_while_running == []
    if stage.endswith("-running"):
        assert f"Job/tune-{role}-{attempt or 0}" in cluster.found
        assert not [name for name in made if name.startswith(f"Job/tune-{role}-")], "the Job that ran is the Job that ended"
    if stage == "ended":
        assert made == set()
        assert cluster.status == before
    assert cluster.status.attempt == (1 if stage in RESTARTED else before.attempt)


@pytest.mark.parametrize(("release", "scenario", "stage"), [one for one in stages() if "frozen" not in one])
def test_what_follows_is_what_the_release_itself_created(release: str, scenario: str, stage: str) -> None:
    """Names, arguments and mounts that the trainer image of the plan understands: the image is the one that the release froze."""
    recorded = recording(release)[scenario]
    _, cluster = carried(release, scenario, stage)
    for action in cluster.made:
        ours, theirs = action.body, recorded["bodies"].get(f"{action.kind}/{action.name}")
        if action.kind == "Job":
            assert theirs is not None, f"the release knew no Job {action.name}"
            mine, its = ours["spec"]["template"]["spec"], theirs["spec"]["template"]["spec"]
            assert mine["containers"][0]["args"] == its["containers"][0]["args"]
            assert mine["containers"][0]["image"] == its["containers"][0]["image"]
            assert mine["containers"][0]["resources"] == its["containers"][0]["resources"]
            for list_of in ("volumeMounts", "env"):
                missing = [one for one in its["containers"][0][list_of] if one not in mine["containers"][0][list_of]]
                assert not missing, f"the image looks for {missing}"
            assert mine.get("nodeSelector") == its.get("nodeSelector")
            assert ours["spec"].get("completionMode") == theirs["spec"].get("completionMode")


@pytest.mark.parametrize("release", RELEASES)
def test_every_container_reads_the_plan_of_every_release(release: str) -> None:
    for scenario in SCENARIOS:
        if scenario in recording(release):
            plan = RunPlan.model_validate_json(recording(release)[scenario]["bodies"]["ConfigMap/tune-plan"]["data"]["plan.json"])
            assert plan.training.max_steps == 10
            assert plan.data.train[0].field == "spec.data.source"


@pytest.mark.parametrize("release", RELEASES)
def test_pods_of_every_release_say_why_they_ended(release: str) -> None:
    """A run keeps its trainer image: exit codes and reports of old images mean what they meant."""
    for name, code in recording(release)["exit-codes"].items():
        assert EXIT_CODES[FailureClass(name)] == code
    for name, message in recording(release)["envelopes"].items():
        report = parse_envelope(message)
        assert (report.failure, report.role, report.message, report.hint) == (FailureClass(name), Role.TRAIN, "said", "do")


def test_the_first_release_and_the_latest_are_recorded() -> None:
    assert RELEASES[0] == "01-521725f"
    assert len(RELEASES) >= 6


def test_a_fetch_is_tried_again_with_the_credentials_that_its_old_image_reads() -> None:
    """Images of the first release that could fetch took them from variables, later ones take them from files."""
    recorded = recording("03-b9905b8")["elsewhere"]
    plan = read_launch_plan(recorded["bodies"]["ConfigMap/tune-plan"]["data"]["plan.json"])
    run = FrozenRun(Owner("team", "tune", UID), plan, plan.placement, "0" * 64)
    theirs = recorded["bodies"]["Job/tune-fetch-0"]["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {one["name"] for one in theirs} == {
        *("HOME", "HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    }
    assert cpu_job(run, Role.FETCH, 1)["spec"]["template"]["spec"]["containers"][0]["env"] == theirs
    later = read_launch_plan(recording("04-fae2541")["elsewhere"]["bodies"]["ConfigMap/tune-plan"]["data"]["plan.json"])
    environment = cpu_job(replace(run, plan=later), Role.FETCH, 1)["spec"]["template"]["spec"]["containers"][0]["env"]
    assert [one["name"] for one in environment] == ["HOME"]
