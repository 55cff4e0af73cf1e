"""What is told of pods that do not start, and what of it is only waited for."""

from dataclasses import replace

import pytest

from finetune_job.failures import FailureClass
from finetune_job.names import Role
from finetune_job.reasons import Reason
from finetune_operator.decide.failures.job_state import pending
from finetune_operator.decide.seen.children_seen import BatchJobView, PodView
from tests.support.builders import after

JOB = BatchJobView("tune-train-0", "job", Role.TRAIN, 0, created=after(0))
POD = PodView("pod", "uid", Role.TRAIN, 0, created=after(0))
NO_ROOM = replace(POD, name="no-room", node_rank=0, unschedulable="0/3 nodes are available")
NO_IMAGE = replace(POD, name="no-image", node_rank=1, node="node-a", waiting_reason="ErrImagePull", waiting_message="not found")
NO_SECRET = replace(POD, name="no-secret", node_rank=1, node="node-a", events=('FailedMount: secret "s" not found',))


@pytest.mark.parametrize(
    ("bad", "reason", "failure"),
    [(NO_IMAGE, Reason.IMAGE_PULL_FAILED, FailureClass.IMAGE_PULL), (NO_SECRET, Reason.MOUNT_FAILED, FailureClass.MOUNT)],
)
@pytest.mark.parametrize("bad_is_first", [False, True])
def test_what_somebody_has_to_fix_is_reported_before_what_only_needs_room(
    bad: PodView, reason: Reason, failure: FailureClass, bad_is_first: bool
) -> None:
    """Otherwise the startup deadline would not count as long as one pod of the gang has no node."""
    told = pending(JOB, (bad, NO_ROOM) if bad_is_first else (NO_ROOM, bad), 2)
    assert (told.reason, told.failure, told.is_capacity) == (reason, failure, False)
    assert bad.name in told.text
    assert NO_ROOM.name not in told.text


def test_a_lack_of_room_alone_is_reported_and_waited_for() -> None:
    told = pending(JOB, (NO_ROOM, replace(POD, node_rank=1, phase="Running", started=after(5))), 2)
    assert (told.reason, told.is_capacity) == (Reason.UNSCHEDULABLE, True)
    assert told.text == "1 of 2 pods have started. no-room: 0/3 nodes are available"
