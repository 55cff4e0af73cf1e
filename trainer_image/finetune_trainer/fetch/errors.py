"""How a fetch fails. What may pass by itself is retried first; everything else ends the role with a class."""

from __future__ import annotations

from finetune_job.failures import FailureClass
from finetune_trainer.errors import TrainerError


class SourceUnavailableError(TrainerError):
    """The source did not answer, or not with what was asked for."""

    failure = FailureClass.SOURCE_UNAVAILABLE


class NoRoomError(TrainerError):
    """The claim has less room than the sources need."""

    failure = FailureClass.DISK_FULL


class TransientError(Exception):
    """One request failed in a way that may pass. The message holds no address, because signed addresses are credentials."""

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        """What the server asked for."""


class WrongBytesError(TransientError):
    """A whole file came, and it is not the one that the source lists."""


class StoppedError(Exception):
    """Another file of the same source has failed, so this one is given up."""
