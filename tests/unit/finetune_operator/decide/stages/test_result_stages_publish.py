"""Publication: results that go out of the cluster."""

from dataclasses import replace

import pytest

from finetune_job.api.status import Restarts, RoleRestarts
from finetune_job.failures import FailureClass
from finetune_job.reasons import ConditionType, Reason
from finetune_operator.decide.reconcile import reconcile
from tests.support.builders import T0, JobBuilder, a_job, after, observing
from tests.unit.finetune_operator.decide.reading import condition, created, deleted, message, written

DIGEST = "d" * 64
ADDRESS = f"oci://registry.example/team/tuned:v1@sha256:{DIGEST}"


def published_job() -> JobBuilder:
    return a_job().spec("output.destination", "oci://registry.example/team/tuned:v1")


def test_a_merge_hands_over_to_the_publication() -> None:
    seen = observing(published_job()).trained().succeeded()
    actions = reconcile(seen.build(), T0)
    assert condition(actions, ConditionType.MERGED) == ("True", Reason.COMPLETED)
    assert condition(actions, ConditionType.FINISHED)[0] != "True"
    assert written(actions).phase == "Publishing"
    assert written(actions).artifacts == []
    assert created(actions) == ["Job/tune-publish-0"]


def test_the_report_is_listed_if_the_trainer_has_written_one() -> None:
    actions = reconcile(observing(a_job()).trained().succeeded(report_sha256=DIGEST).build(), T0)
    found = {artifact.name: (artifact.path, artifact.sha256) for artifact in written(actions).artifacts}
    assert found["report"] == ("pvc://results/tune/report.html", DIGEST)


@pytest.mark.parametrize(
    ("changes", "absent"),
    [
        ({"output.adapter": False}, {"adapter"}),
        ({"merge.enabled": False}, {"merged", "verification"}),
        ({"method.type": "Full"}, {"adapter", "verification"}),
    ],
)
def test_only_what_is_made_is_listed(changes: dict[str, object], absent: set[str]) -> None:
    job = a_job()
    for path, value in changes.items():
        job = job.spec(path, value)
    artifacts = written(reconcile(observing(job).trained().succeeded().build(), T0)).artifacts
    whole = {"adapter", "merged", "verification", "model-card", "provenance", "checksums"}
    assert {artifact.name for artifact in artifacts} == whole - absent


def test_success_ends_the_job_with_the_address_and_its_digest() -> None:
    seen = observing(published_job()).merged().succeeded(address=ADDRESS, digest=f"sha256:{DIGEST}")
    actions = reconcile(seen.build(), T0)
    assert condition(actions, ConditionType.PUBLISHED) == ("True", Reason.COMPLETED)
    assert condition(actions, ConditionType.SUCCEEDED) == ("True", Reason.COMPLETED)
    assert [(one.name, one.path, one.sha256) for one in written(actions).artifacts] == [("published", ADDRESS, DIGEST)]
    assert ADDRESS in message(actions, ConditionType.SUCCEEDED)


def test_a_commit_is_no_sha256() -> None:
    address = f"hf://org/tuned@{'c' * 40}"
    job = a_job().spec("output.destination", "hf://org/tuned")
    seen = observing(job).merged().succeeded(address=address, digest="c" * 40, adapter_address="hf://org/tuned-adapter@d")
    listed = [(one.name, one.path, one.sha256) for one in written(reconcile(seen.build(), T0)).artifacts]
    assert listed == [("published", address, ""), ("adapter", "hf://org/tuned-adapter@d", "")]


def test_a_destination_that_refuses_waits_for_a_human_and_is_asked_again() -> None:
    seen = observing(published_job()).merged().failed_pod(0, FailureClass.DESTINATION_REFUSED, message="401 from the registry")
    actions = reconcile(seen.batch_job_failed().build(), T0)
    assert condition(actions, ConditionType.STALLED) == ("True", Reason.PUBLISH_REFUSED)
    assert condition(actions, ConditionType.PUBLISHED) == ("False", Reason.PUBLISH_REFUSED)
    assert condition(actions, ConditionType.FINISHED)[0] != "True"
    for word in ("401 from the registry", "spec.run.retry", "workspace"):
        assert word in message(actions, ConditionType.STALLED)
    refused = replace(seen.batch_job_failed(), status=written(actions))
    assert reconcile(refused.build(), after(30)).status is None
    again = reconcile(replace(refused, job=published_job().run(retry=1)).build(), T0)
    assert (written(again).publish_attempt, written(again).retry_handled) == (1, 1)
    assert written(again).findings == []
    assert deleted(again) == ["Job/tune-publish-0"]
    gone = replace(refused, job=published_job().run(retry=1), status=written(again), batch_jobs=(), pods=()).nothing_left()
    assert created(reconcile(gone.build(), T0)) == ["Job/tune-publish-1"]


def test_a_destination_that_does_not_answer_is_asked_again_and_never_costs_the_results() -> None:
    seen = observing(published_job().run(maxRestarts=1)).merged()
    seen = seen.failed_pod(0, FailureClass.DESTINATION_UNAVAILABLE, message="connection reset").batch_job_failed()
    actions = reconcile(seen.build(), T0)
    assert (written(actions).publish_attempt, written(actions).role_restarts.publish.uncounted) == (1, 1)
    assert condition(actions, ConditionType.PUBLISHED) == ("Unknown", Reason.WAITING_FOR_DESTINATION)
    assert deleted(actions) == ["Job/tune-publish-0"]
    long_ago = RoleRestarts(publish=Restarts(in_a_row=300, in_a_row_since="2025-12-31T11:59:00Z"))
    exhausted = reconcile(seen.with_status(role_restarts=long_ago).build(), T0)
    assert deleted(exhausted) == []
    assert condition(exhausted, ConditionType.STALLED) == ("True", Reason.PUBLISH_REFUSED)
    assert condition(exhausted, ConditionType.FINISHED)[0] != "True"
    assert "connection reset" in message(exhausted, ConditionType.STALLED)


@pytest.mark.parametrize("failure", [FailureClass.USER_CONFIG, FailureClass.HOST_OUT_OF_MEMORY, FailureClass.PLAN_MISMATCH])
def test_no_failure_of_a_publication_ends_the_job(failure: FailureClass) -> None:
    actions = reconcile(observing(published_job()).merged().failed_pod(0, failure).batch_job_failed().build(), T0)
    advice = "Fix the cause and increase spec.run.retry; the results are kept on the workspace."
    assert advice in message(actions, ConditionType.STALLED)
    assert condition(actions, ConditionType.STALLED) == ("True", Reason.PUBLISH_REFUSED)
    assert condition(actions, ConditionType.FINISHED)[0] != "True"


def test_a_secret_that_is_missing_stalls_the_job_until_it_is_there() -> None:
    event = 'FailedMount: MountVolume.SetUp failed for volume "credentials" : secret "writer" not found'
    seen = observing(published_job()).merged().batch_job().pod(0, phase="Pending", events=(event,))
    actions = reconcile(seen.build(), T0)
    assert condition(actions, ConditionType.PUBLISHED) == ("Unknown", Reason.MOUNT_FAILED)
    assert 'secret "writer" not found' in message(actions, ConditionType.PUBLISHED)
    late = reconcile(seen.build(), after(24 * 3600))
    assert condition(late, ConditionType.STALLED) == ("True", Reason.STARTUP_DEADLINE_EXCEEDED)
    assert 'secret "writer" not found' in message(late, ConditionType.STALLED)
    assert condition(late, ConditionType.FINISHED)[0] != "True"
    stalled = replace(seen, status=written(late))
    assert reconcile(stalled.build(), after(25 * 3600)).status is None
    asked = reconcile(replace(stalled, job=published_job().run(retry=1)).build(), after(25 * 3600))
    assert (written(asked).publish_attempt, deleted(asked)) == (1, ["Job/tune-publish-0"])
    started = reconcile(stalled.running().build(), after(26 * 3600))
    assert condition(started, ConditionType.STALLED) == ("False", Reason.HEALTHY)
    assert condition(started, ConditionType.PUBLISHED) == ("Unknown", Reason.RUNNING)
