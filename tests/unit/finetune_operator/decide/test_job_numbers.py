from finetune_job.api.status import Attempt, FineTuneJobStatus
from finetune_job.names import Role
from finetune_operator.decide.job_numbers import job_number


def test_an_attempt_has_a_job_of_its_own_unless_the_one_before_it_was_continued() -> None:
    status = FineTuneJobStatus(
        attempts=[
            Attempt(role=Role.MERGE, number=0, continued=True),
            Attempt(role=Role.TRAIN, number=0),
            Attempt(role=Role.TRAIN, number=1, continued=True),
            Attempt(role=Role.TRAIN, number=2),
        ]
    )
    assert [job_number(status, Role.TRAIN, attempt) for attempt in range(5)] == [0, 1, 1, 3, 4]
    assert [job_number(status, Role.MERGE, attempt) for attempt in range(3)] == [0, 0, 2]
    assert job_number(FineTuneJobStatus(), Role.TRAIN, 3) == 3
