"""Waiting for a job: how it ends, and what a cluster may do meanwhile."""

import copy
from typing import Any

import pytest

from finetune_cli.cluster.errors import ClusterError
from finetune_cli.commands.follow import MOST_FAILURES, outcome, repeatedly, wait_for, wanted_condition
from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_cli.jobs.seen import SeenJob, seen_job
from finetune_job.reasons import ConditionType
from tests.unit.finetune_cli.jobs import objects

GONE = ClusterError("there is no such job", ExitCode.UNUSABLE, 404)
BUSY = ClusterError("busy", status=503)
SILENT = ClusterError("no answer")
FORBIDDEN = ClusterError("you may not", status=403)


class FakeCluster:
    """Gives one answer after another, the last one for good. Its clock advances with each pause."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.now = 0.0
        self.said: list[str] = []

    def job(self, name: str) -> SeenJob:
        found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(found, Exception):
            raise found
        return seen_job(found)

    def pause(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, wanted: ConditionType = ConditionType.FINISHED, seconds: float = 60.0) -> ExitCode:
        code, _ = wait_for(self, "job", wanted, seconds, self.said.append, clock=lambda: self.now, pause=self.pause)
        return code


OTHER = {**objects.SUCCEEDED, "metadata": {**objects.SUCCEEDED["metadata"], "uid": "other"}}


@pytest.mark.parametrize(
    ("answers", "code"),
    [
        ([objects.SUCCEEDED], ExitCode.DONE),
        ([objects.FAILED], ExitCode.REFUSED),
        ([objects.STALLED], ExitCode.REFUSED),
        ([objects.NEW, objects.NEW, objects.STALLED], ExitCode.REFUSED),
        ([objects.RUNNING], ExitCode.FAILED),
        ([objects.SUCCEEDED, GONE], ExitCode.DONE),
        ([objects.RUNNING, GONE], ExitCode.REFUSED),
        ([objects.RUNNING, OTHER], ExitCode.REFUSED),
        ([objects.RUNNING, BUSY, SILENT, BUSY], ExitCode.FAILED),
    ],
)
def test_a_wait_ends_with_the_exit_code_of_its_reason(answers: list[Any], code: ExitCode) -> None:
    assert FakeCluster(*answers).wait() is code


def test_another_condition_can_be_waited_for() -> None:
    running, failed = seen_job(objects.RUNNING), seen_job(objects.FAILED)
    assert outcome(running, ConditionType.PREPARED) is ExitCode.DONE
    assert outcome(running, ConditionType.TRAINED) is None
    assert outcome(failed, ConditionType.PREPARED) is ExitCode.DONE
    assert outcome(failed, ConditionType.TRAINED) is ExitCode.REFUSED
    assert outcome(seen_job(objects.STALLED), ConditionType.STALLED) is ExitCode.DONE


def test_a_verdict_on_an_earlier_spec_ends_no_wait() -> None:
    changed = copy.deepcopy(objects.STALLED)
    changed["metadata"]["generation"] = 2
    assert outcome(seen_job(changed), ConditionType.FINISHED) is None


def test_a_cluster_that_does_not_answer_is_tried_again_and_told_of_once() -> None:
    cluster = FakeCluster(BUSY, SILENT, objects.SUCCEEDED)
    assert cluster.wait() is ExitCode.DONE
    assert cluster.said == ["busy; trying again"]
    assert cluster.now == 4.0 + 8.0, "the pauses grow"
    with pytest.raises(ClusterError, match="busy"):
        FakeCluster(BUSY).wait(seconds=1e6)
    with pytest.raises(ClusterError, match="you may not"):
        FakeCluster(objects.RUNNING, FORBIDDEN).wait()
    with pytest.raises(ClusterError, match="no such job"):
        FakeCluster(GONE).wait()


def test_failures_count_in_a_row_only() -> None:
    answers = iter([*([BUSY] * (MOST_FAILURES - 1)), 1, *([BUSY] * (MOST_FAILURES - 1)), 2])

    def read() -> int:
        found = next(answers)
        if isinstance(found, ClusterError):
            raise found
        return found

    assert list(repeatedly(read, lambda _: None, lambda found: found == 2, lambda _: None)) == [1, 2]


@pytest.mark.parametrize("text", ["Finished", "finished", "condition=Finished", "condition=finished=True"])
def test_a_condition_is_named_as_kubectl_names_it(text: str) -> None:
    assert wanted_condition(text) is ConditionType.FINISHED
    with pytest.raises(LocalError, match="--for: 'Done' is not a condition of a job; it is one of Validated"):
        wanted_condition("Done")
