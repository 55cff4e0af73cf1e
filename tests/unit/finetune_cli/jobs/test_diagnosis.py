"""What is said to be the matter with a job, and the patches for a new one: each is accepted by the rules."""

import copy
import json
import shlex
from datetime import timedelta
from typing import Any

import pytest

from finetune_cli.checks.validate import validate_files
from finetune_cli.jobs.diagnosis import Diagnosis, diagnose
from finetune_cli.jobs.next_manifest import fork_of, parse_change
from finetune_cli.jobs.patches import NO_PATCH, merge_patch, patch_for
from finetune_cli.jobs.seen import seen_event, seen_job, seen_pod
from finetune_job.failures import FailureClass
from tests.support.cases import table
from tests.unit.finetune_cli.jobs import objects

Document = dict[str, Any]


def failed_with(failure: str, hint: str = "", **training: Any) -> Document:
    document = copy.deepcopy(objects.FAILED)
    document["spec"]["training"] |= training
    document["status"]["attempts"][-1] |= {"failure": failure, "hint": hint, "message": f"it was {failure}", "evidence": []}
    return document


def applied(document: Document, patch: Document) -> Document:
    """RFC 7396."""
    result = dict(document)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = applied(result.get(key) or {}, value) if isinstance(value, dict) else value
    return result


@pytest.mark.parametrize("failure", list(FailureClass))
def test_every_failure_class_has_a_reason_an_advice_and_a_patch_that_is_accepted(failure: FailureClass) -> None:
    document = failed_with(failure)
    found = diagnose(seen_job(document), objects.NOW)
    assert f"it was {failure}" in found.reason
    assert len(found.reason) > len(f"train failed: it was {failure}. ") + 10, "the class's meaning is told"
    assert found.word == failure
    assert found.advice[-1].startswith("A failed job does not run again")
    assert len(found.advice) > 1
    # The command is run as a shell would, up to what goes to the cluster.
    (command,) = found.commands
    fork, submit = (shlex.split(each) for each in command.split(" | "))
    # The manifest that is handed on names no namespace.
    assert fork[:5] == ["finetune", "fork", "failed", "-n", "team"]
    assert submit == ["finetune", "submit", "-", "-n", "team"]
    changes = [parse_change(each) for each in fork[5:] if each != "--set"]
    made = fork_of(document, "failed-2", changes)
    assert validate_files([("job", json.dumps(made))]).exit_code == 0
    unchanged = fork_of(document, "failed-2", [])
    assert made == applied(unchanged, found.patch or {}), "the patch and the command say the same"


@pytest.mark.parametrize(
    ("failure", "training", "patch"),
    table(__file__, "test_a_patch_changes_what_can_help"),
)  # fmt: skip
def test_a_patch_changes_what_can_help(failure: str, training: Document, patch: Document | None) -> None:
    job = seen_job(failed_with(failure, **training))
    assert patch_for(FailureClass(failure), job, "train") == (None if patch is None else {"spec": {"training": patch}})


EXPECTED: dict[str, Document | str] = table(__file__, "EXPECTED")


@pytest.mark.parametrize("failure", list(FailureClass))
def test_each_failure_class_has_its_patch_or_the_reason_why_there_is_none(failure: FailureClass) -> None:
    found, expected = diagnose(seen_job(failed_with(failure)), objects.NOW), EXPECTED[failure]
    if isinstance(expected, str):
        assert found.patch is None
        assert expected in found.advice
    else:
        assert found.patch == {"spec": expected}
        assert not set(found.advice) & {each for each in EXPECTED.values() if isinstance(each, str)}


@pytest.mark.parametrize(("failure", "said"), table(__file__, "test_a_job_that_has_ended_is_not_said_to_be_tried_again"))
def test_a_job_that_has_ended_is_not_said_to_be_tried_again(failure: str, said: str) -> None:
    document = failed_with(failure)
    document["spec"]["checkpoint"] = {"adaptive": True}
    assert said in diagnose(seen_job(document), objects.NOW).advice
    # The reasons are told of jobs that have failed or wait for a human, and of no other.
    assert [text for text in NO_PATCH.values() if "by itself" in text] == []


def full(**spec: Any) -> Document:
    """Trained with the least memory that batches leave."""
    document = failed_with("DeviceOutOfMemory", microBatchSize=1, activationCheckpointing="Full")
    document["spec"] |= spec
    return document


@pytest.mark.parametrize(("failure", "spec", "role", "patch"), table(__file__, "test_a_patch_is_of_the_setting_that_is_left"))
def test_a_patch_is_of_the_setting_that_is_left(failure: str, spec: Document, role: str, patch: Document | None) -> None:
    assert patch_for(FailureClass(failure), seen_job(full(**spec)), role) == (None if patch is None else {"spec": patch})


@pytest.mark.parametrize(
    ("profile", "training", "patch"),
    table(__file__, "test_a_host_needs_less_memory_for_less_only_where_ranks_compute_on_its_cores"),
)
def test_a_host_needs_less_memory_for_less_only_where_ranks_compute_on_its_cores(
    profile: Document | None, training: Document, patch: Document | None
) -> None:
    job = seen_job(failed_with("HostOutOfMemory", **training)).with_profile(profile)
    assert diagnose(job, objects.NOW).patch == (None if patch is None else {"spec": patch})


def given_up(failure: str) -> Document:
    """As the operator says that a training waits for a human."""
    document = failed_with(failure)
    document["status"]["conditions"] = objects.stages(4, objects.condition("Stalled", "True", "TrainStopped", "6 times."))
    finding = {"rule": f"train/{failure}", "severity": "error", "message": "It was lost.", "fix": "Look.", "source": "train"}
    document["status"]["findings"] = [finding]
    return document


def test_a_training_that_was_given_up_has_its_patch_for_a_new_job() -> None:
    document = given_up("NodeLost")
    found = diagnose(seen_job(document), objects.NOW)
    assert found.patch == {"spec": {"checkpoint": {"adaptive": True}}}
    assert not any("is not set" in each for each in found.evidence)
    assert found.commands == (
        "finetune retry failed -n team",
        "finetune fork failed -n team --set spec.checkpoint.adaptive=true | finetune submit - -n team",
    )
    document["spec"]["checkpoint"] = {"adaptive": True}
    found = diagnose(seen_job(document), objects.NOW)
    assert (found.patch, found.commands) == (None, ("finetune retry failed -n team",))
    assert "No setting brings a node back." in found.advice


@pytest.mark.parametrize("keep", [5, 2])
def test_room_is_made_before_a_new_job_writes_to_the_claim_that_is_full(keep: int) -> None:
    document = given_up("DiskFull")
    document["spec"]["checkpoint"] = {"keep": keep}
    folder = f"failed-{document['metadata']['uid'][:8]}"
    said = f"Before a new job writes to the same claim, remove the folder {folder} of claim work: it holds this job's files."
    found = diagnose(seen_job(document), objects.NOW)
    # Without a change there is no new job to make room for, and this one continues in that folder.
    assert (said in found.advice) == (found.patch is not None) == (keep == 5)
    document["spec"]["workspace"] = {"volumeClaimTemplate": {"storage": "1Gi"}}
    assert said not in diagnose(seen_job(document), objects.NOW).advice


def test_a_patch_starts_from_what_the_plan_chose() -> None:
    document = failed_with("DeviceOutOfMemory")
    del document["spec"]["training"]["microBatchSize"]
    document["status"]["plan"] = {"hash": "a", "choices": [{"field": "spec.training.microBatchSize", "value": "8"}]}
    assert patch_for(FailureClass.DEVICE_OUT_OF_MEMORY, seen_job(document), "train") == {
        "spec": {"training": {"microBatchSize": 4}}
    }
    document["status"]["plan"]["choices"][0]["value"] = "{"
    assert patch_for(FailureClass.DEVICE_OUT_OF_MEMORY, seen_job(document), "train") == {
        "spec": {"training": {"activationCheckpointing": "Full"}}
    }


def test_a_container_s_own_hint_comes_before_the_table_s() -> None:
    assert diagnose(seen_job(failed_with("UserData", hint="Rename the column.")), objects.NOW).advice[0] == "Rename the column."
    assert "spec.data.source" in diagnose(seen_job(failed_with("UserData")), objects.NOW).advice[0]


def with_conditions(*conditions: Document, done: int = 3, **status: Any) -> Document:
    document = copy.deepcopy(objects.WAITING)
    document["status"] |= {"conditions": objects.stages(done, *conditions), **status}
    return document


def waits(reason: str, message: str = "") -> Document:
    return with_conditions(objects.condition("Trained", "Unknown", reason, message))


def ended(reason: str, message: str = "") -> Document:
    conditions = (objects.condition("Succeeded", "False", reason, message), objects.condition("Finished", "True", reason))
    return with_conditions(*conditions)


SUSPENDED = with_conditions(objects.condition("Suspended", "True", "SuspendedByUser"))
PLAN_LOST = with_conditions(objects.condition("Stalled", "True", "PlanLost", "gone."))


@pytest.mark.parametrize(
    ("document", "reason", "advice"),
    [
        (SUSPENDED, "spec.run.suspend is true", "finetune resume waiting -n team"),
        (waits("Unschedulable", "0/3 nodes"), "No node has room", "the job wants 2 pods"),
        (waits("ImagePullFailed", "no such tag"), "no such tag", "Check the image of the profile"),
        (waits("MountFailed", "no Secret"), "no Secret", "Create the volume, Secret"),
        (waits("CreateRefused", "exceeded quota"), "exceeded quota", "Change the policy"),
        (waits("WaitingInLine"), "maxActiveJobs", "when an earlier one of this namespace"),
        (waits("BlockedOnNode"), "on a node that does not answer", "Look at the node"),
        (waits("WaitingForSource"), "does not answer", "can be reached from the cluster"),
        (with_conditions(objects.condition("Ready", "False", "OperatorError", "403")), "quotes the error. 403", "platform team"),
        (PLAN_LOST, "is gone, or its content has changed. gone.", "finetune retry waiting -n team"),
        (ended("Cancelled"), "spec.run.cancel is true", "finetune fork waiting -n team | finetune submit - -n team"),
        (ended("ActiveDeadlineExceeded", "6 h"), "The job was active for longer", "A failed job does not run again"),
    ],
)
def test_each_state_has_its_reason_and_its_advice(document: Document, reason: str, advice: str) -> None:
    found = diagnose(seen_job(document), objects.NOW)
    assert reason in found.reason
    assert advice in " ".join((*found.advice, *found.commands))


def test_a_training_that_is_silent_is_said_to_be() -> None:
    job = seen_job(objects.RUNNING)
    assert diagnose(job, objects.NOW) == Diagnosis()
    assert diagnose(job, objects.NOW + timedelta(minutes=30)).reason == "No new step was seen for 31m00s."
    assert diagnose(seen_job(objects.SUCCEEDED), objects.NOW + timedelta(days=1)) == Diagnosis()


def test_pods_and_events_are_evidence() -> None:
    waiting = seen_pod(
        objects.pod(objects.WAITING, "train", 0, 0, "Pending", waiting={"reason": "ErrImagePull", "message": "no"})
    )
    unplaced = objects.pod(objects.WAITING, "train", 0, 1, "Pending", waiting={"reason": "ContainerCreating"})
    del unplaced["spec"]["nodeName"]
    unplaced["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes"}]
    event = {"type": "Warning", "reason": "BackOff", "message": "again", "involvedObject": {"kind": "Pod", "name": "a"}}
    normal = {**event, "type": "Normal"}
    events = [seen_event(each) for each in (event, normal)]
    found = diagnose(seen_job(objects.WAITING), objects.NOW, [waiting, seen_pod(unplaced)], events)
    assert found.evidence == (
        "waiting-train-0-0 waits: ErrImagePull: no",
        "waiting-train-0-1 has no node: 0/3 nodes",
        "event of Pod/a: BackOff: again",
    )


@pytest.mark.parametrize(("before", "after", "patch"), table(__file__, "test_a_merge_patch_makes_the_one_of_the_other"))
def test_a_merge_patch_makes_the_one_of_the_other(before: Document, after: Document, patch: Document) -> None:
    assert merge_patch(before, after) == patch
    assert applied(before, patch) == after
