"""Which Job runs an attempt: a Job has the number of its first attempt in its name, and may run one more in the same pod."""

from __future__ import annotations

from finetune_job.api.status import FineTuneJobStatus
from finetune_job.names import Role


def job_number(status: FineTuneJobStatus, role: Role, attempt: int) -> int:
    """Number in the name of the Job that runs an attempt."""
    before = attempt - 1
    is_continued = any(one.continued and one.number == before and one.role is role for one in status.attempts)
    return before if is_continued else attempt
