"""How a fetch fails. What may pass by itself is retried first; everything else ends the role with a class."""

from __future__ import annotations

from finetune_job.failures import FailureClass
from finetune_trainer.errors import TrainerError
from finetune_trainer.network.errors import TransientError


class SourceUnavailableError(TrainerError):
    """The source did not answer, or not with what was asked for."""

    failure = FailureClass.SOURCE_UNAVAILABLE


class NoRoomError(TrainerError):
    """The claim has less room than the sources need."""

    failure = FailureClass.DISK_FULL


class WrongBytesError(TransientError):
    """A whole file came, and it is not the one that the source lists."""


def source_given_up(message: str) -> SourceUnavailableError:
    """What ends a fetch whose requests fail again and again."""
    return SourceUnavailableError(
        message,
        "what is complete is kept, and another attempt goes on from there; check the way out of the cluster and the "
        "endpoints of the profile's spec.fetch",
    )
