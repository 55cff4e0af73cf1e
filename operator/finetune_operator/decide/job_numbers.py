"""Finds the Job that runs an attempt. A Job has the number of its first attempt in its name, and may run one more in the same
pod.
"""

from __future__ import annotations

from collections.abc import Collection

from finetune_job.api.status import FineTuneJobStatus
from finetune_job.names import Role


def job_number(status: FineTuneJobStatus, role: Role, attempt: int) -> int:
    """Number in the name of the Job that runs an attempt."""
    return number_of_job(attempt, [record.number for record in status.attempts if record.continued and record.role is role])


def number_of_job(attempt: int, continued: Collection[int]) -> int:
    """Number in the name of the Job that runs an attempt. continued: attempts of the role whose next one runs in the same pod."""
    return attempt - 1 if attempt - 1 in continued else attempt
